"""Runs the rows of a training batch cell by cell, so that the gradient flows through several cells of a group."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.errors import UserError
from trainer.model.protocol import ModelOutput


class Cellwise(nn.Module):
    """A model whose rows are several cells long: truncated back-propagation through time (Williams and Peng 1990).

    The model sees one cell per call. Each cell starts from the state that the previous one returned, which is not
    detached, and the logits are concatenated: outputs and gradients are those of the model run on the whole row.

    Args:
        model: implements `trainer.model.protocol`, with a state.
        cell: tokens per call of the model.
        cells: cells per row.
        recompute: activation checkpointing. The backward recomputes each cell from its tokens and its incoming state, so
            that activations of one cell are held at a time, not of the whole row.
    """

    def __init__(self, model: nn.Module, *, cell: int, cells: int, recompute: bool = False) -> None:
        super().__init__()
        self.model = model
        self._cell = cell
        self._row = cell * cells
        self._recompute = recompute

    def forward(self, tokens: Tensor, state: Tensor | None = None, **inputs: Any) -> ModelOutput:
        """Predict from tokens [B, row], starting from `state` [B, state_width] (None: zero).

        Other inputs that are shaped [B, row, ...] are cut like the tokens; what has another shape goes to every cell.

        Raises:
            UserError: rows have another length, or the model returned no state.
        """
        if tokens.shape[1] != self._row:
            problem = f"rows of tbptt_cells x data.seq_len = {self._row} tokens are needed, got {tokens.shape[1]}"
            raise UserError("train.tbptt_cells", problem, "build the data with the seq_len that its target is given")
        bounds = [*range(0, self._row, self._cell), self._row]
        logits = []
        for start, stop in itertools.pairwise(bounds):
            cell = {name: _cut(value, tokens.shape, start, stop) for name, value in inputs.items()}
            output = self._run(tokens[:, start:stop], state, cell, is_last=stop == self._row)
            if output.state is None:
                raise UserError("train.tbptt_cells", "the model returned no state", "set it to 1")
            # As the ledger would return it: in the type of the incoming state.
            state = output.state if state is None else output.state.to(state.dtype)
            logits.append(output.logits)
        return ModelOutput(torch.cat(logits, dim=1), state)

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
