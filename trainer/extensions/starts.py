"""`StartingLedger`: a share of the groups begins not from zero but from a state that other text has led to.

A model that only ever began from zero has not seen the states that long texts lead to, and may fail on texts longer than it was
trained on; such starts show it those states (arXiv 2507.02782). Which groups begin so is a pure function of seed, group and
epoch. What they begin from are the states that this rank holds, so nothing more has to be saved.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.arrays import Flags, Ints
from trainer.hashing import splitmix64, stable_hash
from trainer.ledger.ledger import COUNTER_KEYS, Ledger
from trainer.on_device import to_device

Start = Literal["carried", "noise"]
ZERO_KEY: Final = "ledger/starts/zero"
START_KEYS: Final = (ZERO_KEY, "ledger/starts/carried", "ledger/starts/noise")
MOST_SAMPLED: Final = 64
"""States whose moments noise has."""


class StartingLedger(Ledger):
    """A ledger whose groups begin from other states than zero, a share of them.

    Where no state is held yet, they begin from zero.

    Args:
        start: `carried`: from the state of another group; `noise`: from independent normal numbers with the mean and the
            standard deviation that each number has over at most `MOST_SAMPLED` states.
        share: of the groups.
        seed: of the choices.
        settings: of `Ledger`.
    """

    counter_keys = (*COUNTER_KEYS, *START_KEYS)

    def __init__(self, *, start: Start, share: float, seed: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._start, self._share, self._seed = start, share, seed
        self._key = f"ledger/starts/{start}"
        self._is_elsewhere: Flags = np.zeros(0, np.bool_)

    def lookup(self, group_ids: Ints, cell_index: Ints, epoch: int = 0) -> Tensor:
        """As `Ledger.lookup`, but for first cells of groups that do not begin from zero."""
        states = super().lookup(group_ids, cell_index, epoch)
        keys = splitmix64(np.asarray(group_ids, np.int64) ^ np.int64(stable_hash("start", self._seed, epoch) >> 1))
        uniforms = (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53
        self._is_elsewhere = (np.asarray(group_ids) >= 0) & (uniforms < self._share)
        is_first = (np.asarray(group_ids) >= 0) & (np.asarray(cell_index) == 0)
        begin = np.flatnonzero(is_first & self._is_elsewhere)
        held = self._index.held_slots() if begin.size else begin
        if not held.size:
            self._counts[ZERO_KEY] += int(is_first.sum())
            return states
        made, is_valid = (self._carried if self._start == "carried" else self._noise)(held, splitmix64(keys[begin]))
        num_begun = self._slab.library.count_nonzero(self._slab.native(is_valid))  # the others found no state
        self._counts[self._key] += num_begun
        self._counts[ZERO_KEY] += int(is_first.sum()) - num_begun
        return states.index_copy_(0, to_device(begin, states.device), made.to(states.dtype))

    def lookup_age(self) -> Tensor:
        """As `Ledger.lookup_age`; -1 also for groups that were to begin elsewhere, whose states are not of their own text."""
        age = super().lookup_age()
        return age.masked_fill(to_device(self._is_elsewhere, age.device), -1)

    def _carried(self, held: Ints, draws: NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
        """A held state for each draw, [n, state_width], and whether it is one."""
        rows, is_valid = self._slab.read(held[(draws % np.uint64(held.size)).astype(np.int64)])
        return rows, torch.as_tensor(is_valid)

    def _noise(self, held: Ints, draws: NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
        """A state of normal numbers for each draw, likewise; zeros from fewer than two states."""
        rows, is_valid = self._slab.read(held[:: -(-held.size // MOST_SAMPLED)])
        rows = rows.to(self._given_dtype)
        is_state = torch.as_tensor(is_valid)[:, None].to(rows.dtype)
        count = is_state.sum()
        mean = rows.sum(0) / count.clamp(min=1)  # rows that are no states are zeros
        deviation = (((rows - mean).square() * is_state).sum(0) / count.clamp(min=1)).sqrt()
        drawn = torch.empty(draws.size, rows.shape[1], dtype=rows.dtype)
        for row, draw in zip(drawn, draws.tolist(), strict=True):
            row.normal_(generator=torch.Generator().manual_seed(draw >> 1))
        made = mean + deviation * to_device(drawn, rows.device)
        return torch.where(count >= 2, made, 0.0), (count >= 2).expand(draws.size)
