"""A private copy of the model at one precision, called as the training step calls it."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainer.import_path import format_error

CALL_SEED = 20_251
ZERO_SCALE = 0.5  # times 1 / sqrt(fan-in): about half of what an ordinary initialization draws
DROPOUTS = frozenset(
    ("dropout", "dropout_", "alpha_dropout", "feature_alpha_dropout", *(f"dropout{n}d" for n in (1, 2, 3)))
)
MODES = {True: "train()", False: "eval()"}
LIFTED = {
    **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64),
    torch.complex64: torch.complex128,
}


class CallFailed(Exception):
    """The model's forward or backward raised, or returned something else; the message says what."""


class NotTestable(Exception):
    """The check cannot be made with this model, here; the message says why."""


class Result(NamedTuple):
    """A forward's output, detached and copied unless a backward follows."""

    logits: Tensor  # [B, T, V], float64; as returned if a backward follows
    state: Tensor | None  # [B, state_width], of the dtype that the model returned
    written: str = ""  # which argument the forward wrote into, in place


@dataclass(frozen=True)
class Subject:
    """Calls a copy of the model, as it says."""

    model: nn.Module
    vocab_size: int
    dtype: torch.dtype  # of parameters and states
    autocast: torch.dtype | None = None
    training: bool = True
    is_pure: bool = False  # all calls share this copy; else each runs on a fresh one
    is_seeded: bool = True  # each call has the same seed
    is_plain: bool = True  # without functional dropouts, see `Plain`
    with_grad: bool = False
    backward: bool = False  # results keep their graph

    def __str__(self) -> str:
        return f"{MODES[self.training]} in {dtype_name(self.precision)}"

    def fresh(self) -> nn.Module:
        """A copy in the subject's mode that shares the parameters and nothing else."""
        return copy_model(self.model, shares_parameters=True).train(self.training)

    def in_float64(self) -> Subject:
        """A copy that shares nothing, in double precision."""
        model = copy_model(self.model)
        convert: Any = model._apply  # untyped in torch; `double()` would pass over complex numbers
        convert(lambda tensor: tensor.to(LIFTED.get(tensor.dtype, tensor.dtype)))
        return replace(self, model=model, dtype=torch.float64)

    @property
    def device(self) -> torch.device:
        """A model without any tensor runs on the CPU."""
        return next(chain(self.model.parameters(), self.model.buffers()), torch.empty(0)).device

    @property
    def width(self) -> int:
        """Of a row of the state; 0: there is none. Raises CallFailed: it is no number of them."""
        found: Any = self.model.state_width
        if not isinstance(found, Integral) or found < 0:
            raise CallFailed(f"its state_width is {found!r}, not an integer from 0 on")
        return int(found)

    def zeros(self, rows: int) -> Tensor | None:
        """The state from which a group starts; None for a model without state."""
        if not self.width:
            return None
        return torch.zeros(rows, self.width, dtype=self.ledger_dtype, device=self.device)

    @property
    def precision(self) -> torch.dtype:
        """The dtype of most of its results."""
        return self.autocast or self.dtype

    @property
    def ledger_dtype(self) -> torch.dtype:
        """The dtype of incoming states: float32 as in the ledger, or float64."""
        return torch.promote_types(self.dtype, torch.float32)

    def __call__(self, tokens: Tensor, state: Tensor | None, resets: Tensor | None = None) -> Result:
        """Run a forward with tokens [B, T]; a state is given as the ledger holds it. Raises
        CallFailed: the model raised, or its output does not fit the tokens."""
        model = self.model
        if not self.is_pure:
            model = self.fresh()
        model.train(self.training)
        # A forward that writes into its arguments, or into what it returned before, must not spoil
        # the next comparison: hence copies.
        given = {"tokens": tokens.to(self.device, copy=True), "state": state}
        if state is not None:
            given["state"] = state.to(self.ledger_dtype, copy=not self.with_grad)
        if resets is not None:
            given["resets"] = resets.to(self.device, copy=True)
        try:
            output = self.forward(model, given)
            if problem := self.mismatch(output, tokens):
                raise ValueError(f"it returns {problem}")
        except torch.OutOfMemoryError as error:
            raise NotTestable("the device has too little memory") from error
        except Exception as error:  # what a user's model raises can be anything
            where = f"forward fails with tokens {list(tokens.shape)}"
            raise CallFailed(f"{where}: {one_line(error)}") from error
        logits, end = output.logits, output.state if self.width else None
        if self.backward:
            return Result(logits, end)
        if end is not None:  # the next call may write into a buffer of the model's own
            end = end.detach().clone()
        exact = logits.detach().to(torch.float64, copy=True)
        return Result(exact, end, self._written(given, tokens, state, resets))

    def mismatch(self, output: Any, tokens: Tensor) -> str:
        """The problem of an output for tokens [B, T]; empty if there is none."""
        if missing := [f".{name}" for name in ("logits", "state") if not hasattr(output, name)]:
            return f"a {type(output).__name__} without {' and '.join(missing)}"
        rows, length = given = list(tokens.shape)
        logits, state, wanted = shape_of(output.logits), shape_of(output.state), [rows, self.width]
        # More columns than ids do no harm: some pad the vocabulary.
        has_rank = isinstance(logits, list) and len(logits) == 3
        if not has_rank or logits[:2] != given or logits[2] < self.vocab_size:
            return f"logits {logits} for tokens {given}, not {[rows, length, self.vocab_size]}"
        if self.width and state != wanted:
            return f"a state {state} for tokens {given}, not {wanted} as state_width says"
        if self.width and not output.state.is_floating_point():
            dtype = dtype_name(output.state.dtype)
            return f"a state of {dtype}: leave out state_width, and it is carried exactly"
        return ""

    def _written(self, given: dict[str, Any], *arguments: Tensor | None) -> str:
        """Which of the copies `given` of tokens, state and resets the forward has changed, in place."""
        names = ("tokens", "the incoming state", "resets")
        for name, before, after in zip(names, arguments, given.values(), strict=False):
            if before is not None and not torch.equal(before.to(after).nan_to_num(), after.nan_to_num()):
                return name
        return ""

    def forward(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """The output of one of the copies, unwrapped; raises whatever the model raises."""
        with ExitStack() as stack:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            if self.dtype in (torch.float32, torch.float64):
                # Tensors that a forward makes without a dtype follow the parameters.
                torch.set_default_dtype(self.dtype)
            if self.is_seeded:
                seed_generators()
            if self.is_plain:
                stack.enter_context(Plain(lift=self.dtype == torch.float64))
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.device.type, dtype=self.autocast))
            stack.enter_context(torch.set_grad_enabled(self.with_grad))
            return model(**inputs)

    @contextmanager
    def perturbed(self, relative: float) -> Iterator[None]:
        """Within it, all parameters but complex ones are changed by a random relative amount."""
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
    """A copy whose parameters of zeros are drawn at random, without the dropouts that `Plain` does
    not see. Raises NotTestable: it cannot be copied.

    Heads, gates and projections are often zero at the start: logits that are all 0 hide every
    breach. Frozen parameters stay: their zeros may be a mask.
    """
    made = copy_model(model)
    for module in made.modules():
        if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            module.dropout = 0.0
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.grad = None  # a graph that it holds would be copied with every call
            if parameter.requires_grad and not parameter.any():
                *_, fan_in = (1, *parameter.shape)
                parameter.copy_(ZERO_SCALE * max(fan_in, 1) ** -0.5 * _normal(parameter))
    return made


def _normal(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(like.numel())
    return torch.randn(like.shape, generator=generator).to(like.device, like.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def one_line(error: Exception) -> str:
    text = format_error(error)
    return f"{text[:300]} ..." if len(text) > 300 else text


def shape_of(value: Any) -> Any:
    """The shape of a tensor as a list; the type's name of anything else."""
    return list(value.shape) if isinstance(value, Tensor) else type(value).__name__
