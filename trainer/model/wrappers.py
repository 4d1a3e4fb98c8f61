"""Other ways to run a model: rows cell by cell (gradients through several cells), without the output layer, and with blocks
that the backward recomputes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.errors import UserError
from trainer.metrics.aggregate import Recorder
from trainer.metrics.best_effort import BestEffort
from trainer.metrics.logger import get_logger
from trainer.model.protocol import ModelOutput, evaluating, extras_of

logger = get_logger(__name__)

KEY = "objective.chunk_tokens"
FEW_TOKENS = 8


class Cellwise(nn.Module):
    """A model whose rows run cell by cell, each from the state that the previous cell returned.

    Truncated back-propagation through time (Williams and Peng 1990). The model sees one cell per call, and states inside a
    row are not detached, so outputs and gradients are those of the model run on the whole row.

    Args:
        model: implements `trainer.model.protocol`, with a state.
        cell: tokens per call of the model.
        cells: cells per row.
        recompute: activation checkpointing. The backward recomputes each cell from its tokens and its incoming state, so
            that activations of one cell are held at a time, not of the whole row.
    """

    def __init__(self, model: nn.Module, *, cell: int, cells: int = 1, recompute: bool = False) -> None:
        super().__init__()
        self.model = model
        self._cell, self._row = cell, cell * cells
        self._recompute = recompute
        self._leave_out = BestEffort("model").leave_out

    def forward(self, tokens: Tensor, state: Tensor | None = None, **inputs: Any) -> ModelOutput:
        """Predict from tokens [B, row], starting from `state` [B, state_width] (None: zero).

        Other inputs that are shaped [B, row, ...] are cut like the tokens; what has another shape goes to every cell.

        Raises:
            UserError: rows have another length, or the model returned no state.
        """
        if tokens.shape[1] != self._row:
            problem = f"rows of data.seq_len x train.tbptt_cells = {self._row} tokens are needed, got {tokens.shape[1]}"
            raise UserError("data", problem, "build rows of the seq_len that the source's target is given")
        logits, losses = [], []
        metrics = Recorder(leave_out=self._leave_out)  # cells count as so many micro-batches
        for start in range(0, self._row, self._cell):
            stop = start + self._cell
            cut = {name: _cut(value, tokens.shape, start, stop) for name, value in inputs.items()}
            output = self._run(tokens[:, start:stop], state, cut, is_last=stop == self._row)
            state = _returned(output.state, state)
            logits.append(output.logits)
            own, numbers = extras_of(output)
            losses.append(own)
            metrics.add(numbers)
        joined = self._join(losses, len(tokens))
        return ModelOutput(torch.cat(logits, dim=1), state, joined, metrics.drain_metrics())

    def _join(self, losses: Sequence[Mapping[str, Tensor]], rows: int) -> dict[str, Tensor]:
        """The losses of whole rows, [B, T]: what is [] or [B] counts for each token of its cell. `Auxiliary`, which knows the
        targets, makes the number of a row."""
        if any(each.keys() != losses[0].keys() for each in losses):
            problem = "the losses of its output are not the same in all cells of a row"
            raise UserError("model.target", problem, "return each of them in every call")
        found = {}
        for name, first in losses[0].items():
            values = [each[name] for each in losses]
            if first.ndim == 1:
                values = [value[:, None] for value in values]
            found[name] = torch.cat([value.expand(rows, self._cell) for value in values], dim=1)
        return found

    def _run(self, tokens: Tensor, state: Tensor | None, inputs: dict[str, Any], *, is_last: bool) -> Any:
        # The row's last cell is the first one that the backward needs: recomputing it would save nothing.
        if not self._recompute or is_last:
            return self.model(tokens=tokens, state=state, **inputs)
        return checkpoint(self.model, use_reentrant=False, tokens=tokens, state=state, **inputs)


def _cut(value: Any, shape: torch.Size, start: int, stop: int) -> Any:
    """Positions [start, stop) of an input that is shaped as the tokens [B, row] are; anything else as it is."""
    if isinstance(value, Tensor) and value.shape[:2] == shape:
        return value[:, start:stop]
    return value


def _returned(state: Tensor | None, given: Tensor | None) -> Tensor:
    """A returned state as the ledger would hand it on: in the type of the one that the model was given."""
    if state is None:
        raise UserError("model.target", "the model returned no state", "return it, or set train.tbptt_cells to 1")
    return state if given is None else state.to(given.dtype)


def run_few_tokens(model: nn.Module, device: torch.device, *, seq_len: int, below: int = 1) -> Any:
    """The output of one row of a few tokens; of a whole cell, where the model takes no such row.

    Args:
        seq_len: tokens of a cell.
        below: token ids are.
    """
    few, cell = (torch.arange(length, device=device)[None] % below for length in (FEW_TOKENS, seq_len))
    try:
        return model(tokens=few, state=None)
    except Exception:  # noqa: BLE001 - a model of the user's own may raise anything
        return model(tokens=cell, state=None)


def output_layer(model: nn.Module) -> nn.Linear:
    """The layer that gives the logits: what `model.get_output_embeddings()` returns (as in `transformers`), or `model.head`.

    Raises:
        UserError: there is none, or it is not an `nn.Linear`.
    """
    getter = getattr(model, "get_output_embeddings", None)
    layer = getter() if getter is not None else getattr(model, "head", None)
    if not isinstance(layer, nn.Linear):
        problem = f"the model's output layer is not known ({type(model).__name__} has no nn.Linear named head)"
        raise UserError(KEY, problem, "name it head, or return it from get_output_embeddings(); or set 0")
    return layer


class Headless(nn.Module):
    """A model whose output has, instead of logits, what enters its output layer: [B, T, D].

    Args:
        model: implements `trainer.model.protocol`. It is itself as before when it is called without this wrapper.
        head: its output layer, which must be the last thing that a forward computes.
    """

    def __init__(self, model: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.model = model
        self._heads = [head]  # in a list: its parameters are the model's already

    def forward(self, **inputs: Any) -> Any:
        """Run the model; `output.logits` is [B, T, D], in whatever type the model gives it."""
        (head,) = self._heads
        head.forward = _as_it_is  # type: ignore[method-assign, assignment]
        try:
            return self.model(**inputs)
        finally:
            del head.forward


def _as_it_is(hidden: Tensor) -> Tensor:
    return hidden


@torch.no_grad()
def refuse_more_than_a_head(model: nn.Module, head: nn.Linear, device: torch.device, *, seq_len: int) -> None:
    """Refuse a model that does something to its logits, which a headless one would leave out.

    Args:
        seq_len: tokens of a cell.

    Raises:
        UserError: its logits for a few tokens are not what its output layer makes of the headless model's output.
    """
    try:
        inspect.signature(model.forward).bind(tokens=None, state=None)
    except TypeError:
        text = (
            "%s: the model takes inputs that only the data have, so it was not seen whether it does more to its logits "
        )
        logger.warning(text + "than its output layer", KEY)
        return
    with evaluating(model):
        logits = run_few_tokens(model, device, seq_len=seq_len, below=head.out_features).logits
        hidden = run_few_tokens(Headless(model, head), device, seq_len=seq_len, below=head.out_features).logits
    is_same = hidden.shape == (*logits.shape[:-1], head.in_features)
    if is_same:
        again = head(hidden.to(head.weight.dtype))
        is_same = again.shape == logits.shape and bool((again - logits).abs().amax() <= 1e-5 * logits.abs().amax())
    if not is_same:
        problem = "the model's logits are not those of its output layer: it scales, caps or changes them afterwards"
        raise UserError(KEY, problem, "set it to 0")


def recompute_blocks(model: nn.Module) -> None:
    """Have the backward run each of `model.blocks` again from its input, instead of keeping its activations.

    A block must give the same when it is called again with the same inputs: one that writes into them, or into itself, would
    get another gradient (the contract's checks would show it).

    Raises:
        UserError: the model has no `nn.ModuleList` of that name.
    """
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        problem = f'is "block", but {type(model).__name__} has no nn.ModuleList named blocks'
        fix = 'choose "off", or name it so in a model of your own'
        raise UserError("train.activation_checkpointing", problem, fix)
    for block in blocks:
        block.kept_forward = block.forward  # type: ignore[assignment]
        block.forward = MethodType(_recomputed, block)


def _recomputed(block: Any, *args: Any, **kwargs: Any) -> Any:
    # A method, of which a copy of the model has its own; with a `functools.partial` torch.compile silently compiles nothing.
    return checkpoint(block.kept_forward, *args, use_reentrant=False, **kwargs)
