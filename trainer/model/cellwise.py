"""Runs the rows of a training batch piece by piece: the gradient through several cells of a group, and burn-in of states."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.errors import UserError
from trainer.model.protocol import ModelOutput


class Cellwise(nn.Module):
    """A model whose rows run in pieces, each from the state that the previous piece returned.

    Rows of several cells: truncated back-propagation through time (Williams and Peng 1990). The model sees one cell per
    call, and states inside a row are not detached, so outputs and gradients are those of the model run on the whole row.

    Burn-in: stored states with burn-in (Kapturowski et al. 2019, R2D2), for states that older weights made. The state that
    is returned, and stored, is that of `burn_in` tokens before the row's end; the row that continues reads these tokens
    again, without gradient, from the stored state. With equal weights both ways give the same numbers up to rounding.

    Args:
        model: implements `trainer.model.protocol`, with a state.
        cell: tokens per call of the model.
        cells: cells per row.
        burn_in: tokens read again before a row, less than `cell`; 0: none.
        recompute: activation checkpointing. The backward recomputes each piece from its tokens and its incoming state, so
            that activations of one cell are held at a time, not of the whole row.
    """

    def __init__(
        self, model: nn.Module, *, cell: int, cells: int = 1, burn_in: int = 0, recompute: bool = False
    ) -> None:
        super().__init__()
        assert 0 <= burn_in < cell, (burn_in, cell)
        self.model = model
        self._row = cell * cells
        self._burn_in = burn_in
        self._stores_at = self._row - burn_in
        self._bounds = sorted({*range(0, self._row, cell), self._stores_at, self._row})
        self._recompute = recompute

    def forward(
        self,
        tokens: Tensor,
        state: Tensor | None = None,
        *,
        tokens_before: Tensor | None = None,
        resets_before: Tensor | None = None,
        continues: Tensor | None = None,
        **inputs: Any,
    ) -> ModelOutput:
        """Predict from tokens [B, row], starting from `state` [B, state_width] (None: zero).

        Other inputs that are shaped [B, row, ...] are cut like the tokens; what has another shape goes to every piece.

        Args:
            tokens: int64 [B, row].
            state: with burn-in, of `burn_in` tokens before the row.
            tokens_before: int64 [B, n], n >= burn_in: the tokens that precede the row in its group, right-aligned.
            resets_before: bool [B, n]: where the state resets among them.
            continues: bool [B]: False for a group's first row, and for rows without a group: they start from zero.

        Raises:
            UserError: rows have another length, the model returned no state, or burn-in lacks what it needs.
        """
        if tokens.shape[1] != self._row:
            problem = f"rows of data.seq_len x train.tbptt_cells = {self._row} tokens are needed, got {tokens.shape[1]}"
            raise UserError("data", problem, "build rows of the seq_len that the source's target is given")
        if self._burn_in:
            state = self._burn(state, tokens_before, resets_before, continues, inputs)
        logits, stored = [], state
        for start, stop in itertools.pairwise(self._bounds):
            piece = {name: _cut(value, tokens.shape, start, stop) for name, value in inputs.items()}
            output = self._run(tokens[:, start:stop], state, piece, is_last=stop == self._row)
            state = _returned(output.state, state)
            if stop == self._stores_at:
                stored = state
            logits.append(output.logits)
        return ModelOutput(torch.cat(logits, dim=1), stored)

    def _run(self, tokens: Tensor, state: Tensor | None, inputs: dict[str, Any], *, is_last: bool) -> Any:
        # The row's last piece is the first one that the backward needs: recomputing it would save nothing.
        if not self._recompute or is_last:
            return self.model(tokens=tokens, state=state, **inputs)
        return checkpoint(self.model, use_reentrant=False, tokens=tokens, state=state, **inputs)

    @torch.no_grad()
    def _burn(
        self,
        state: Tensor | None,
        tokens: Tensor | None,
        resets: Tensor | None,
        continues: Tensor | None,
        inputs: dict[str, Any],
    ) -> Tensor:
        """The state before the row, from the stored one of `burn_in` tokens earlier; zeros where nothing precedes it."""
        missing = [name for name, value in (("tokens_before", tokens), ("group_ids", continues)) if value is None]
        if tokens is None or continues is None:
            problem = f"a micro-batch has no {' and no '.join(missing)}"
            raise UserError("ledger.burn_in", problem, "add it in your data set (docs/ledger.md), or set burn_in to 0")
        if tokens.shape[1] < self._burn_in:
            problem = f"{self._burn_in} tokens before a row are needed, tokens_before has {tokens.shape[1]}"
            raise UserError("ledger.burn_in", problem, "lengthen it in your data set, or lower burn_in")
        if others := sorted(inputs.keys() - {"resets"}):
            problem = f"a micro-batch has the input {', '.join(others)}, which is not known for the tokens before a row"
            raise UserError("ledger.burn_in", problem, "set it to 0")
        last = slice(tokens.shape[1] - self._burn_in, None)
        given = {} if resets is None else {"resets": resets[:, last]}
        # Autocast keeps the weights that it converts. Until torch 2.10 those converted here would be used for the row itself,
        # without the way back to the parameter: no gradient (pytorch/pytorch issue 158232).
        device = tokens.device.type
        is_on, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        with torch.autocast(device, dtype, enabled=is_on, cache_enabled=False):
            output = self.model(tokens=tokens[:, last], state=state, **given)
        return torch.where(continues[:, None], _returned(output.state, state), 0.0)


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
