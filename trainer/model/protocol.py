"""The interface between the trainer and a model: the `SequenceModel` protocol and the `ModelOutput` that it returns.

A model's own nest of tensors becomes the one row of numbers per group that the ledger keeps (`carry_flat`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trainer.errors import UserError

GATE_SHARPNESS: Final = 8.0
"""The constant c of `a = exp(-c * softplus(Lambda) * sigmoid(r))`, as in De et al. 2024 (arXiv 2402.19427)."""
TRIED_TOKENS = (8, 16, 32, 64, 128, 256)  # of the forward that shows what a model's state looks like
TRIED_ROWS = (2, 3)  # two numbers of rows: the dimension that follows them is that of the batch


class ModelOutput(NamedTuple):
    """The result of one forward pass."""

    logits: Tensor
    """Scores over the vocabulary, [B, T, V]; row t predicts `targets[:, t]`."""

    state: Tensor | None
    """The state after each row's last position, [B, state_width]; None from a model without state. A model without
    `state_width` may return any nest of tensors [B, ...], see `carry_flat`."""

    losses: Mapping[str, Tensor] | None = None
    """Auxiliary losses, which are trained on too: those that `loss_keys` declares."""

    metrics: Mapping[str, Any] | None = None
    """Numbers to report, as `Run.record` takes them: those that `metric_keys` lists."""


def extras_of(output: Any) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """Losses and metrics of an output, which need not have the fields."""
    return getattr(output, "losses", None) or {}, getattr(output, "metrics", None) or {}


class SequenceModel(Protocol):
    """A `torch.nn.Module` that predicts the next token and may carry a state from one cell of a group to the next.

    A model with `state_width == 0` has no state: it receives `state=None` and returns `state=None`. A model that lacks the
    attribute and returns no state breaks its contract (docs/contracts.md).

    Required: a `torch.nn.Module` with `state_width` and a `forward` that takes `tokens` and `state` by name and returns
    an object with `.logits` and `.state`. Without `state_width`, `carry_flat` finds it and lets a state
    be any nest of tensors; `[model] target` and `family` do. Optional: `flops_per_token` (without it no MFU is
    logged), `resets`, which is passed where rows hold several documents, `resets_in_one_pass = True`, which says that these
    run at one shape and at the cost of any others, `shard_units()`, the modules that FSDP gathers one by one,
    and `loss_keys` and `metric_keys`, the names of the output's losses and metrics. `train check` runs one forward pass.
    """

    state_width: int
    """Size of one group's state; 0: the model has no state."""

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations per trained token, forward and backward; a multiply-add counts as two. Optional."""
        ...

    def __call__(self, tokens: Tensor, state: Tensor | None = None, resets: Tensor | None = None) -> ModelOutput:
        """Run `tokens` (int64 [B, T]) starting from `state` ([B, state_width]; None: zero).

        `resets` (bool [B, T]; None: nowhere) is True where the state resets to zero inside a row. Optional: it is passed
        by name and only where documents begin within rows, so a model for other data need not accept it.
        """
        ...


@dataclass(frozen=True)
class Leaf:
    """One tensor of a state: where it is, and its shape without the batch.

    A complex number is kept as two numbers, an integer as one for each of its bytes: exact in any dtype of the ledger.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Numbers per row."""
        parts = 2 if self.dtype.is_complex else 1 if self.dtype.is_floating_point else self.dtype.itemsize
        return math.prod(self.shape) * parts

    def to_rows(self, found: Tensor) -> Tensor:
        """A tensor of this leaf as rows of numbers, [B, size]."""
        if found.is_complex():
            numbers = torch.view_as_real(found.resolve_conj())
        else:
            numbers = found if found.is_floating_point() else found.flatten().view(torch.uint8)
        return numbers.reshape(len(found), self.size)

    def from_rows(self, rows: Tensor) -> Tensor:
        """The tensor that rows [B, size] stand for."""
        # A model that is run in float64 has states of float64.
        is_double = rows.dtype == torch.float64
        if self.dtype.is_complex:
            numbers = rows.to(torch.float64 if is_double else self.dtype.to_real())
            return torch.complex(*numbers.reshape(len(rows), *self.shape, 2).unbind(-1))
        if self.dtype.is_floating_point:
            return rows.reshape(len(rows), *self.shape).to(torch.float64 if is_double else self.dtype)
        return rows.to(torch.uint8).flatten().view(self.dtype).reshape(len(rows), *self.shape)


class StateLayout:
    """What a model's state is made of: tensors with the batch first, in any nest of tuples, lists, dicts and dataclasses.

    Rows of the flat form are [leaf 0 | leaf 1 | ...], each in row-major order.

    Args:
        state: as the model returns it, [B, ...] in each tensor.

    Raises:
        ValueError: it holds something else than tensors of as many rows.
    """

    def __init__(self, state: Any) -> None:
        _register_dataclasses(state)
        found, self._spec = pytree.tree_flatten_with_path(state)
        self.leaves: list[Leaf] = []
        for path, leaf in found:
            name = f"state{pytree.keystr(path)}"
            if not isinstance(leaf, Tensor):
                raise ValueError(f"{name} is a {type(leaf).__name__}, not a tensor")
            if leaf.ndim == 0 or leaf.shape[0] != found[0][1].shape[0]:
                shape = list(leaf.shape)
                raise ValueError(f"{name} has the shape {shape}: every tensor needs the batch as its first dimension")
            self.leaves.append(Leaf(name, tuple(leaf.shape[1:]), leaf.dtype))
        if not found:
            raise ValueError("it holds no tensor")

    def __deepcopy__(self, memo: dict[int, Any]) -> StateLayout:
        return self  # nothing in it changes

    @property
    def width(self) -> int:
        """Numbers per row."""
        return sum(leaf.size for leaf in self.leaves)

    def flatten(self, state: Any) -> Tensor:
        """The state as rows of numbers, [B, width], in the widest type of its tensors, at least float32.

        Raises:
            ValueError: it is built otherwise.
        """
        leaves, spec = pytree.tree_flatten(state)
        if spec != self._spec or [tuple(leaf.shape[1:]) for leaf in leaves] != [leaf.shape for leaf in self.leaves]:
            raise ValueError(f"a state of another layout than {self}")
        rows = [leaf.to_rows(found) for leaf, found in zip(self.leaves, leaves, strict=True)]
        dtype = torch.float32
        for each in rows:
            dtype = torch.promote_types(dtype, each.dtype)
        return torch.cat([each.to(dtype) for each in rows], dim=1)

    def unflatten(self, rows: Tensor) -> Any:
        """The state that rows [B, width] stand for, each tensor in the type of its leaf, or in the double one if `rows` are."""
        pieces = torch.split(rows, [leaf.size for leaf in self.leaves], dim=1)
        found = [leaf.from_rows(piece) for leaf, piece in zip(self.leaves, pieces, strict=True)]
        return pytree.tree_unflatten(found, self._spec)

    def to_json(self) -> list[list[Any]]:
        """[[path, shape], ...], for a checkpoint."""
        return [[leaf.path, list(leaf.shape)] for leaf in self.leaves]

    def __str__(self) -> str:
        shown = ", ".join(f"{leaf.path} {list(leaf.shape)}" for leaf in self.leaves[:4])
        return shown + (f" and {len(self.leaves) - 4} more" if len(self.leaves) > 4 else "")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, uncompiled: other shapes would be compiled anew. Afterwards it is in the mode it was in."""
    was_training, is_compiled = model.training, any(each._compiled_call_impl is not None for each in model.modules())
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
            yield
    finally:
        model.train(was_training)


def _register_dataclasses(state: Any) -> None:
    """Let pytree look into the dataclasses of a nest."""
    unknown = {type(each) for each in pytree.tree_leaves(state) if is_dataclass(each)}
    for each in unknown:
        pytree.register_dataclass(each)
    if unknown:
        _register_dataclasses(state)


def carry_flat(model: nn.Module, *, lengths: Sequence[int] = ()) -> nn.Module:
    """Let a model with a structured state take and return it as rows [B, state_width], by hooks of its own forward.

    The module stays what it is, its parameters keep their names. `model.state_layout` and `model.state_width` are set: the
    layout of what forwards without gradient in `eval()` return, None and 0 if that is no state.

    Args:
        lengths: tokens of the rows that the model is for; tried after `TRIED_TOKENS`.

    Raises:
        UserError: the state's tensors do not have the batch first.
        Exception: what the forward raises, where it takes none of the lengths.
    """
    with evaluating(model):
        states = _first_states(model, lengths)
    layout = None
    if all(state is not None for state in states):
        try:
            layout, other = (StateLayout(state) for state in states)
            for leaf, again in zip(layout.leaves, other.leaves, strict=True):
                if leaf.shape != again.shape:
                    raise ValueError(f"{leaf.path} has the batch in another dimension than the first")
        except ValueError as error:
            fix = "return tensors [B, ...], in any nest of tuples, lists, dicts and dataclasses"
            raise UserError("model.target", f"its state cannot be kept: {error}", fix) from None
        model.register_forward_pre_hook(_take_rows, with_kwargs=True)
        model.register_forward_hook(_return_rows, with_kwargs=True)
    attributes: Any = model
    attributes.state_layout, attributes.state_width = layout, 0 if layout is None else layout.width
    return model


def _first_states(model: nn.Module, lengths: Sequence[int]) -> list[Any]:
    """The states after rows of the first length that the model takes, one for each number of `TRIED_ROWS`."""
    parameter = next(model.parameters(), None)
    device = parameter.device if parameter is not None else torch.device("cpu")
    errors: dict[int, Exception] = {}
    for length in (*TRIED_TOKENS, *lengths):
        try:
            with torch.no_grad():
                tried = [torch.zeros(rows, length, dtype=torch.long, device=device) for rows in TRIED_ROWS]
                return [model(tokens=tokens, state=None).state for tokens in tried]
        except Exception as error:  # noqa: BLE001 - a user's model may raise anything
            errors[length] = error
    raise errors[lengths[0] if lengths else TRIED_TOKENS[0]]


def _take_rows(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    layout: Any = model.state_layout
    if len(args) > 1 and isinstance(args[1], Tensor):
        args = (args[0], layout.unflatten(args[1]), *args[2:])
    elif isinstance(kwargs.get("state"), Tensor):
        kwargs = {**kwargs, "state": layout.unflatten(kwargs["state"])}
    return args, kwargs


def _return_rows(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> ModelOutput:
    layout: Any = model.state_layout
    if output.state is None:
        given = args[1] if len(args) > 1 else kwargs.get("state")
        when = f"in {'train' if model.training else 'eval'}(), {'from no' if given is None else 'when given a'} state"
        raise ValueError(f"it returns no state {when}; in eval(), from none, it returns {layout}")
    return ModelOutput(output.logits, layout.flatten(output.state), *extras_of(output))
