"""Models whose state is a nest of tensors: its packing into rows; `nn.GRU` and `nn.LSTM`.

For models without `state_width`. It can go when every model states the width of its state.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trainer.errors import UserError
from trainer.import_path import users_code
from trainer.model.encoder import check_sizes
from trainer.model.protocol import FEW_TOKENS, ModelOutput, evaluating, extras_of

if TYPE_CHECKING:
    from trainer.data.loader import MicroBatch

TRIED_ROWS = (2, 3)  # two numbers of rows: the dimension that follows them is that of the batch


@dataclass(frozen=True)
class Leaf:
    """One tensor of a state: its path, and its shape without the batch.

    A complex number is two numbers, an integer one per byte: exact in any dtype of the ledger.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Numbers per row."""
        if self.dtype.is_complex:
            return 2 * math.prod(self.shape)
        return math.prod(self.shape) * (1 if self.dtype.is_floating_point else self.dtype.itemsize)

    def to_rows(self, tensor: Tensor) -> Tensor:
        """A tensor of this leaf as rows of numbers, [B, size]."""
        numbers = tensor
        if tensor.is_complex():
            numbers = torch.view_as_real(tensor.resolve_conj())
        elif not tensor.is_floating_point():
            numbers = tensor.flatten().view(torch.uint8)
        return numbers.reshape(len(tensor), self.size)

    def from_rows(self, rows: Tensor) -> Tensor:
        """The tensor of rows [B, size]."""
        shape = (len(rows), *self.shape)
        if not (self.dtype.is_complex or self.dtype.is_floating_point):
            return rows.to(torch.uint8).flatten().view(self.dtype).reshape(shape)
        # A model that runs in float64 has states of float64.
        numbers = rows if rows.dtype == torch.float64 else rows.to(self.dtype.to_real())
        if self.dtype.is_complex:
            return torch.complex(*numbers.reshape(*shape, 2).unbind(-1))
        return numbers.reshape(shape)


class NestLayout:
    """The tensors of a state, batch first, in any nest of tuples, lists and dicts.

    Rows of the flat form are [leaf 0 | leaf 1 | ...], each in row-major order. Raises ValueError: the
    state holds anything but tensors of equally many rows.
    """

    def __init__(self, state: Any) -> None:
        found, self._spec = pytree.tree_flatten_with_path(state)
        if not found:
            raise ValueError("it holds no tensor")
        self.leaves: list[Leaf] = []
        for path, leaf in found:
            name = f"state{pytree.keystr(path)}"
            if not isinstance(leaf, Tensor):
                raise ValueError(f"{name} is a {type(leaf).__name__}, not a tensor")
            if leaf.ndim == 0 or leaf.shape[0] != found[0][1].shape[0]:
                problem = "every tensor needs the batch as its first dimension"
                raise ValueError(f"{name} has the shape {list(leaf.shape)}: {problem}")
            self.leaves.append(Leaf(name, tuple(leaf.shape[1:]), leaf.dtype))
        self.width = sum(leaf.size for leaf in self.leaves)  # numbers per row

    def __deepcopy__(self, memo: dict[int, Any]) -> NestLayout:
        return self  # nothing in it changes

    def flatten(self, state: Any) -> Tensor:
        """The state as rows [B, width], in the widest type of its tensors, at least float32. Raises
        ValueError: it has another layout."""
        tensors, spec = pytree.tree_flatten(state)
        shapes = [isinstance(each, Tensor) and each.shape[1:] for each in tensors]
        if spec != self._spec or shapes != [leaf.shape for leaf in self.leaves]:
            raise ValueError(f"a state of another layout than {self}")
        rows = [leaf.to_rows(tensor) for leaf, tensor in zip(self.leaves, tensors, strict=True)]
        dtype = reduce(torch.promote_types, (each.dtype for each in rows), torch.float32)
        return torch.cat([each.to(dtype) for each in rows], dim=1)

    def unflatten(self, rows: Tensor) -> Any:
        """The state of rows [B, width], each tensor in the type of its leaf, or the double one."""
        pieces = torch.split(rows, [leaf.size for leaf in self.leaves], dim=1)
        tensors = [leaf.from_rows(piece) for leaf, piece in zip(self.leaves, pieces, strict=True)]
        return pytree.tree_unflatten(tensors, self._spec)

    def to_json(self) -> list[list[Any]]:
        """[[path, shape], ...], for a checkpoint."""
        return [[leaf.path, list(leaf.shape)] for leaf in self.leaves]

    def __str__(self) -> str:
        return ", ".join(f"{leaf.path} {list(leaf.shape)}" for leaf in self.leaves)


def carry_flat(model: nn.Module, *, seq_len: int | None = None, micro: MicroBatch | None = None) -> nn.Module:
    """Let a model take and return a nested state as rows [B, state_width], by hooks.

    Sets `model.state_layout` and `model.state_width`: the layout of the state that forwards without
    gradient return in `eval()`, or None and 0 if they return none.

    `seq_len`: tokens of the rows that the model is for, tried if it does not take `FEW_TOKENS`; the
    forward's own error is raised if it takes neither. `micro`: tried in their place, of a model
    that takes more than tokens. Raises UserError: the state's tensors do not have the batch first.
    """
    with evaluating(model):
        states = _first_states(model, seq_len, micro)
    layout, width = None, 0
    if all(state is not None for state in states):
        try:
            layout, other = map(NestLayout, states)
            sizes = [len(pytree.tree_leaves(state)[0]) for state in states]
            if str(layout) != str(other) or sizes != [*TRIED_ROWS]:
                raise ValueError(f"{layout} does not have the batch as its first dimension")
        except ValueError as error:
            fix = "return tensors [B, ...], in any nest of tuples, lists and dicts"
            raise UserError("model.target", f"its state cannot be kept: {error}", fix) from None
        names = [*inspect.signature(model.forward).parameters, "state"]  # last: it is given by name alone
        model.register_forward_pre_hook(partial(_take_rows, names.index("state")), with_kwargs=True)
        model.register_forward_hook(_return_rows, with_kwargs=True)
        width = layout.width
    attributes: Any = model
    attributes.state_layout, attributes.state_width = layout, width
    return model


def some_rows(micro: MicroBatch, rows: int) -> dict[str, Any]:
    """The inputs of so many rows; those of a batch of fewer rows are repeated."""
    count, found = len(micro.targets), dict(micro.inputs)
    for key, value in micro.inputs.items():
        if isinstance(value, Tensor) and value.shape[:1] == (count,):
            found[key] = value[torch.arange(rows, device=value.device) % count]
    return found


def shapes_of(micro: MicroBatch) -> str:
    """The first batch in words, with the type and shape of each tensor."""
    shapes = []
    for key, each in {**micro.inputs, "targets": micro.targets}.items():
        shapes.append(f"{key} {type(each).__name__}")
        if isinstance(each, Tensor):
            shapes[-1] = f"{key} {str(each.dtype).removeprefix('torch.')} {list(each.shape)}"
    return f"the first batch ({', '.join(shapes)})"


@torch.no_grad()
def _first_states(model: nn.Module, seq_len: int | None, micro: MicroBatch | None) -> list[Any]:
    """The states after `TRIED_ROWS` of the first batch, or of the first length that is taken."""
    if micro is not None:
        with users_code("model.target", f"forward fails on {shapes_of(micro)}"):
            return [model(**some_rows(micro, rows), state=None).state for rows in TRIED_ROWS]
    device = next(model.parameters(), torch.empty(0)).device

    def states(length: int) -> list[Any]:
        tried = [torch.zeros(rows, length, dtype=torch.long, device=device) for rows in TRIED_ROWS]
        return [model(tokens=tokens, state=None).state for tokens in tried]

    try:
        return states(FEW_TOKENS)
    except Exception:  # a custom model may raise anything
        if seq_len is None:
            raise
        return states(seq_len)  # the error of this length, the model's own, tells its author most


def _take_rows(
    place: int, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The arguments; rows of states, given by name or at `place`, become the model's own."""
    layout: Any = model.state_layout
    if len(args) > place and isinstance(args[place], Tensor):
        args = (*args[:place], layout.unflatten(args[place]), *args[place + 1 :])
    elif isinstance(kwargs.get("state"), Tensor):
        kwargs = {**kwargs, "state": layout.unflatten(kwargs["state"])}
    return args, kwargs


def _return_rows(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> ModelOutput:
    layout: Any = model.state_layout
    if output.state is None:
        mode = "train" if model.training else "eval"
        raise ValueError(f"it returns no state in {mode}(); in eval(), from no state, it returns {layout}")
    return ModelOutput(output.logits, layout.flatten(output.state), *extras_of(output))


class TorchRnn(nn.Module):
    """Embedding, torch's `GRU` or `LSTM` layers, linear output; the state: h (and c)."""

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        num_layers: int,
        *,
        kind: str,
        dropout: float = 0.0,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(vocab_size, dim, num_layers, 1.0, tie_embeddings)
        self.embedding = nn.Embedding(vocab_size, dim)
        self.rnn = getattr(nn, kind)(dim, dim, num_layers=num_layers, dropout=dropout, batch_first=True)
        self.head = nn.Linear(dim, vocab_size)
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        if tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, state: tuple[Tensor, ...] | None = None) -> ModelOutput:
        """Predict from tokens [B, T]; the state is (h,) or (h, c), each [B, layers, dim]."""
        given: Any = None
        if state is not None:
            given = tuple(part.transpose(0, 1).contiguous() for part in state)
            if len(given) == 1:  # torch's GRU takes h itself
                (given,) = given
        x, end = self.rnn(self.embedding(tokens), given)
        ends = end if isinstance(end, tuple) else (end,)
        carried: Any = tuple(part.transpose(0, 1) for part in ends)
        return ModelOutput(self.head(x), carried)

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations per trained token: 6 per weight of a matrix product."""
        weights = [*self.rnn.parameters(), self.head.weight]
        return 6.0 * sum(int(each.numel()) for each in weights if each.ndim == 2)
