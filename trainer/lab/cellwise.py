"""Rows of several cells: gradients through the carried state, and a backward that recomputes
(`train.tbptt_cells`, `train.activation_checkpointing`).

Both wrap a model without its knowledge, and a plain run of one cell per row needs neither. They can
go when models offer longer gradients and recomputation themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.errors import UserError
from trainer.metrics.aggregate import Recorder
from trainer.metrics.best_effort import BestEffort
from trainer.model.protocol import ModelOutput, extras_of


class Cellwise(nn.Module):
    """A model whose rows run cell by cell, each from the state that the previous cell returned.

    Truncated back-propagation through time (Williams and Peng 1990). States inside a row are not
    detached: outputs and gradients are those of the model run on the whole row.

    Args:
        model: implements `trainer.model.protocol`, with a state.
        cell: tokens per call of the model.
        cells: cells per row.
        recompute: the backward recomputes each cell from its tokens and incoming state, so that the
            activations of one cell are held at a time.
    """

    def __init__(self, model: nn.Module, *, cell: int, cells: int = 1, recompute: bool = False) -> None:
        super().__init__()
        self.model = model
        self._cell, self._row, self._recompute = cell, cell * cells, recompute
        self._leave_out = BestEffort("model").leave_out

    def forward(self, tokens: Tensor, state: Tensor | None = None, **inputs: Any) -> ModelOutput:
        """Predict from tokens [B, row], starting from `state` [B, state_width] (None: zero).

        Other inputs are cut like the tokens if they are [B, row, ...]; else every cell gets them.

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
        """The losses of whole rows, [B, T]: one that is [] or [B] counts for each token of its
        cell."""
        if any(each.keys() != losses[0].keys() for each in losses):
            problem = "the losses of its output are not the same in all cells of a row"
            raise UserError("model.target", problem, "return each of them in every call")
        joined = {}
        for name, first in losses[0].items():
            values = [each[name] for each in losses]
            if first.ndim == 1:
                values = [value[:, None] for value in values]
            joined[name] = torch.cat([value.expand(rows, self._cell) for value in values], dim=1)
        return joined

    def _run(self, tokens: Tensor, state: Tensor | None, inputs: dict[str, Any], *, is_last: bool) -> Any:
        # The backward needs the row's last cell first: recomputing it would save nothing.
        if not self._recompute or is_last:
            return self.model(tokens=tokens, state=state, **inputs)
        return checkpoint(self.model, use_reentrant=False, tokens=tokens, state=state, **inputs)


def _cut(value: Any, shape: torch.Size, start: int, stop: int) -> Any:
    """Positions [start, stop) of an input that is shaped like the tokens; others unchanged."""
    if isinstance(value, Tensor) and value.shape[:2] == shape:
        return value[:, start:stop]
    return value


def _returned(state: Tensor | None, given: Tensor | None) -> Tensor:
    """A returned state as the ledger would hand it on: in the type of the given one."""
    if state is None:
        raise UserError("model.target", "the model returned no state", "return it, or set train.tbptt_cells to 1")
    return state if given is None else state.to(given.dtype)


def recompute_blocks(model: nn.Module) -> None:
    """Have the backward run each of `model.blocks` again, instead of keeping its activations.

    A block must be a function of its inputs: one that writes into them, or into itself, would get
    another gradient when it is called again (the contract's checks would show it).

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
    # A method, so that copies of the model have their own; torch.compile ignores partials.
    return checkpoint(block.kept_forward, *args, use_reentrant=False, **kwargs)
