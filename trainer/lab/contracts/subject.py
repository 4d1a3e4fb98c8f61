"""A private copy of the model at one precision, called as the training step calls it."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainer.import_path import format_error

CALL_SEED = 20_251
ZERO_MATRIX_SCALE = 0.5  # times 1 / sqrt(fan-in): about half of what an ordinary initialization draws
ZERO_VECTOR_SCALE = 0.1
DROPOUTS = frozenset(("dropout", "dropout_", "dropout1d", "dropout2d", "alpha_dropout", "feature_alpha_dropout"))
MODES = {True: "train()", False: "eval()"}
LIFTED = {
    **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64),
    torch.complex64: torch.complex128,
}


class CallFailed(Exception):
    """The model's forward or backward raised; the message says what."""


class NotTestable(Exception):
    """The check cannot be made with this model, here; the message says why."""


class Result(NamedTuple):
    """A forward's output, detached and copied unless gradients were asked for."""

    logits: Tensor  # [B, T, V], float64; as returned if gradients were asked for
    state: Tensor | None  # [B, state_width], of the dtype that the model returned


class Subject:
    """Calls a copy of the model; each call has the same seed, so that dropout repeats itself.

    Until `is_pure` is set, each call runs on a fresh copy: no attribute reaches the next one.

    `dtype` is that of parameters and states. Calls that are `is_live` run as outside of the checks:
    generators are not reseeded, and dropouts are as the model has them.
    """

    def __init__(
        self, model: nn.Module, *, dtype: torch.dtype, autocast: torch.dtype | None = None, is_live: bool = False
    ) -> None:
        self.model, self.dtype, self.autocast, self.is_live = model, dtype, autocast, is_live
        # A model without any tensor runs on the CPU.
        self.device = [*model.parameters(), *model.buffers(), torch.empty(0)][0].device
        self.is_pure, self.training = False, True

    def with_autocast(self, dtype: torch.dtype | None) -> Subject:
        other = copy.copy(self)
        other.autocast = dtype
        return other

    def fresh(self) -> nn.Module:
        """A copy in the subject's mode that shares the parameters and nothing else."""
        return copy_model(self.model, shares_parameters=True).train(self.training)

    def in_float64(self) -> Subject:
        """A copy that shares nothing, in double precision."""
        model = copy_model(self.model)
        convert: Any = model._apply  # untyped in torch; `double()` would pass over complex numbers
        convert(lambda tensor: tensor.to(LIFTED.get(tensor.dtype, tensor.dtype)))
        return Subject(model, dtype=torch.float64)

    def zeros(self, rows: int) -> Tensor | None:
        """The state from which a group starts; None for a model without state."""
        width: int = self.model.state_width  # type: ignore[assignment]
        if not width:
            return None
        return torch.zeros(rows, width, dtype=self.ledger_dtype, device=self.device)

    @property
    def precision(self) -> torch.dtype:
        """The dtype of most of its results."""
        return self.autocast or self.dtype

    @property
    def ledger_dtype(self) -> torch.dtype:
        """The dtype of incoming states: float32 as in the ledger, or float64."""
        return torch.promote_types(self.dtype, torch.float32)

    def carried(self, state: Tensor | None) -> Tensor | None:
        """A returned state as the ledger would give it to the next cell: a detached copy."""
        return None if state is None else state.detach().to(self.ledger_dtype, copy=True)

    def __call__(
        self,
        tokens: Tensor,
        state: Tensor | None,
        resets: Tensor | None = None,
        *,
        with_grad: bool = False,
        on: nn.Module | None = None,  # call this copy instead
        copies: bool = True,  # pass and return copies
    ) -> Result:
        """Run a forward with tokens [B, T]. Raises CallFailed: the model raised, or returned
        something else than logits and state.

        A forward that writes into its arguments, or into what it returned before, must not spoil
        the next comparison: hence `copies`.
        """
        model = on
        if model is None:
            model = self.model if self.is_pure else self.fresh()
        model.train(self.training)
        given = {"tokens": tokens.to(self.device, copy=copies), "state": state}
        if state is not None and copies and not with_grad:
            given["state"] = state.clone()
        if resets is not None:
            given["resets"] = resets.to(self.device)
        try:
            output = self.forward(model, given, with_grad=with_grad)
            logits, found = output.logits, output.state
        except torch.OutOfMemoryError as error:
            raise NotTestable("the device has too little memory") from error
        except Exception as error:  # what a user's model raises can be anything
            where = f"forward fails with tokens {list(tokens.shape)}"
            raise CallFailed(f"{where}: {one_line(error)}") from error
        if with_grad:
            return Result(logits, found)
        end = None
        if isinstance(found, Tensor):  # the next call may write into a buffer of the model's own
            end = found.detach().to(found.dtype, copy=copies)
        return Result(logits.detach().to(torch.float64, copy=True), end)

    def forward(self, model: nn.Module, inputs: dict[str, Any], *, with_grad: bool) -> Any:
        """The output of one of the copies, unwrapped; raises whatever the model raises."""
        with self._context(), torch.set_grad_enabled(with_grad):
            return model(**inputs)

    @contextmanager
    def _context(self) -> Iterator[None]:
        """The same dtype and autocast in every call; the same seed and no dropout, unless live."""
        with ExitStack() as stack:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            if self.dtype in (torch.float32, torch.float64):
                # Tensors that a forward makes without a dtype follow the parameters.
                torch.set_default_dtype(self.dtype)
            if not self.is_live:
                seed_generators()
                stack.enter_context(Plain(lift=self.dtype == torch.float64))
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.device.type, dtype=self.autocast))
            yield

    def draws_random_numbers(self, tokens: Tensor) -> bool:
        seed_generators()
        before = self.generator_state()
        self(tokens, self.zeros(tokens.shape[0]))
        return not torch.equal(before, self.generator_state())

    def generator_state(self) -> Tensor:
        own = torch.get_rng_state()
        if self.device.type == "cuda":
            return torch.cat([own, torch.cuda.get_rng_state(self.device)])
        return own

    @contextmanager
    def perturbed(self, relative: float) -> Iterator[None]:
        """Within it, all parameters are changed by a random relative amount."""
        parameters = [p for p in self.model.parameters() if p.is_floating_point()]
        saved = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(1 + relative * _normal(parameter))
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(parameters, saved, strict=True):
                    parameter.copy_(value)


class Plain(TorchFunctionMode):
    """Turns functional dropouts off, and casts to a lower precision into casts to float64.

    A dropout's mask differs between a row and its cells. Scans, norms and softmaxes are often run
    in float32 whatever the weights are: lifted, honest models agree to float64's rounding, and a
    breach stands out that float32 would hide.
    """

    def __init__(self, *, lift: bool) -> None:
        super().__init__()
        self._lift = lift

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in DROPOUTS:
            return next(iter(args), kwargs.get("input"))
        if name == "scaled_dot_product_attention":
            if len(args) > 4:  # its dropout is given by position
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        if self._lift:
            if name in ("float", "half", "bfloat16") and args:
                return args[0].double()
            args = tuple(map(_lifted, args))
            kwargs = {key: _lifted(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _lifted(value: Any) -> Any:
    """The dtype to compute in, if the value is a dtype."""
    return LIFTED.get(value, value) if isinstance(value, torch.dtype) else value


def seed_generators() -> None:
    torch.manual_seed(CALL_SEED)
    random.seed(CALL_SEED)  # a forward may draw from Python's generator, too


class _DetachCopies(TorchFunctionMode):
    """Lets `copy.deepcopy` copy tensors that have a graph, which torch refuses, without it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            return copy.deepcopy(tensor.detach(), memo)
        return func(*args, **(kwargs or {}))


def copy_model(model: nn.Module, *, shares_parameters: bool = False) -> nn.Module:
    """A copy, with the values of what a forward has left in it, such as a router's loss.
    Raises NotTestable: it holds something that cannot be copied."""
    shared: dict[int, Any] = {}
    if shares_parameters:
        shared = {id(parameter): parameter for parameter in model.parameters()}
    try:
        with _DetachCopies():
            return copy.deepcopy(model, shared)
    except Exception as error:  # what a user's module holds can be anything
        raise NotTestable(f"the model cannot be copied: {one_line(error)}") from error


def private_copy(model: nn.Module) -> nn.Module:
    """A copy whose zeros are drawn at random. Raises NotTestable: it cannot be copied.

    Heads, gates and projections are often zero at the start: logits that are all 0 hide every
    breach. Frozen parameters and those with gradient hooks stay: their zeros may be a mask.
    """
    hooked = {name for name, parameter in model.named_parameters() if parameter._backward_hooks}
    made = copy_model(model)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.grad = None  # a graph that it holds would be copied with every call
            is_drawn = parameter.requires_grad and parameter.is_floating_point()
            if is_drawn and name not in hooked:
                _draw_zeros(parameter)
    return made


def _draw_zeros(parameter: Tensor) -> None:
    """Draw a vector that is zero, or the rows of a matrix that are."""
    # Single zeros among others mean something, or hide nothing.
    scale, is_zero = ZERO_VECTOR_SCALE, (parameter == 0).all()
    if parameter.dim() > 1:
        scale = ZERO_MATRIX_SCALE * parameter.shape[-1] ** -0.5
        is_zero = (parameter == 0).all(-1, keepdim=True)
    drawn = scale * _normal(parameter)
    parameter.add_(torch.where(is_zero, drawn, torch.zeros_like(parameter)))


def without_dropout(model: nn.Module) -> nn.Module:
    """A copy with its dropout modules off, which shares the parameters."""
    made = copy_model(model, shares_parameters=True)
    for module in made.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            module.dropout = 0.0
    return made


def _normal(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(like.numel())
    return torch.randn(like.shape, generator=generator).to(like.device, like.dtype)


def gradients(loss: Tensor, of: Sequence[Tensor]) -> list[Tensor]:
    """Zeros for tensors that the loss does not use. Raises CallFailed."""
    try:
        return list(torch.autograd.grad(loss, of, allow_unused=True, materialize_grads=True))
    except Exception as error:  # autograd functions of the user's own may raise anything
        raise CallFailed(f"backward: {one_line(error)}") from error


def norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(each.double().square().sum()) for each in tensors))


def ratio(gap: float, unit: float) -> float:
    """`gap` in units of a norm; 0 if both vanish."""
    if unit:
        return gap / unit
    return math.inf if gap else 0.0


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def one_line(error: Exception) -> str:
    text = format_error(error)
    return f"{text[:300]} ..." if len(text) > 300 else text


def shape_of(value: Any) -> Any:
    """The shape of a tensor as a list; the type's name of anything else."""
    return list(value.shape) if isinstance(value, Tensor) else type(value).__name__
