"""`Ledger`: the recurrent states of groups between steps; docs/ledger.md has a loop that uses it.

Begin each step; for each micro-batch look up, run forward and backward, and store: outside
`forward`, which activation checkpointing runs twice. Nothing is ever undone: when the optimizer
skips a step, its weights are still valid, and the states computed with them are the right
continuation. Only rows that are not finite are dropped. That is decided on the device, so neither
`lookup` nor `store` waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.arrays import Flags, Ints
from trainer.errors import UserError
from trainer.ledger.index import EVICTION_MODES, Evicted, GroupIndex, is_due
from trainer.ledger.slab import Native, Slab
from trainer.options import LedgerOptions

COUNTER_KEYS = (
    *(f"ledger/evictions/{mode}" for mode in EVICTION_MODES),
    *(f"ledger/false_evictions/{mode}" for mode in EVICTION_MODES),
    "ledger/cold_starts",
    "ledger/refused_rows",
    "ledger_wipe_count",
)
"""Summed over the window and over ranks (the worst rank's count is `<key>_max`)."""

GAUGE_KEYS = ("ledger/live_groups", "ledger/fill_fraction")

Shard = Mapping[str, Any]
"""A `state_dict`."""


class Ledger:
    """The states of the groups that a rank reads, a row of `state_width` numbers each; it never
    communicates. `device` and `dtype` (None: that of the options) are those of the kept states.
    """

    metric_keys = (*COUNTER_KEYS, *GAUGE_KEYS)  # of `drain_metrics`, on every rank

    def __init__(
        self,
        options: LedgerOptions = LedgerOptions(),  # noqa: B008 - immutable
        *,
        state_width: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        if state_width < 1:
            raise ValueError("state_width must be 1 or more: a model without a state needs no ledger")
        self._options = options
        self._step = -1  # before the first
        self._stored_at = -1
        dtype = dtype or getattr(torch, options.dtype)
        self._slab = Slab(width=state_width, capacity=options.slots, device=torch.device(device), dtype=dtype)
        self._given_dtype = torch.promote_types(dtype, torch.float32)
        # Numbers, or tensors of the device where it alone knows them.
        self._counts: dict[str, Native] = dict.fromkeys(COUNTER_KEYS, 0)
        self._index = GroupIndex(options, self._counts)

    def begin_step(self, step: int) -> None:
        """Begin optimizer step `step`: wipe or sweep if due since the last step.

        Raises RuntimeError if `step` is below 0, or before that of the last store.
        """
        # A step may begin again: a run whose data are exhausted has begun steps without tokens.
        if step < max(self._stored_at, 0):
            raise RuntimeError(f"ledger steps go forward from 0: step {step} after a store at step {self._stored_at}")
        previous = self._step if self._step >= 0 else step - 1
        self._step = step
        options = self._options
        if options.wipe_mode == "full" and is_due(step, previous, options.wipe_every):
            self._index.wipe()
            self._counts["ledger_wipe_count"] += 1
        if options.wipe_mode == "periodic_stale" and is_due(step, previous, options.sweep_every):
            self._index.sweep(step - options.stale_threshold, step)

    def lookup(self, group_ids: Ints, cell_index: Ints) -> Tensor:
        """The states from which a micro-batch's cells continue, [B, state_width]: a detached copy,
        in float32 or wider.

        Zeros at the start of a group (cell 0), for group id -1, and where no state is held; the
        last is counted as a cold start. Raises ValueError if a group appears twice, or an id is
        neither -1 nor in [0, 2^63).
        """
        group_ids = _as_group_ids(group_ids)
        is_fresh = (np.ascontiguousarray(cell_index, np.int64) == 0) | (group_ids < 0)
        slots = self._index.find(group_ids)
        slots[is_fresh] = self._slab.capacity
        states, is_valid = self._slab.read(slots)
        num_found = self._slab.library.count_nonzero(is_valid)
        self._counts["ledger/cold_starts"] += np.count_nonzero(~is_fresh) - num_found
        return states.to(self._given_dtype)

    def store(
        self,
        group_ids: Ints,
        cell_index: Ints,
        is_last: Flags,
        states: Tensor,
        *,
        end_ids: Ints | None = None,
        end_cell_index: Ints | None = None,
    ) -> None:
        """Copy the states after a micro-batch's cells ([B, state_width]).

        Group id -1 is ignored. A last cell's state is not stored; its group's slot is freed, which
        is not an eviction. Then, with `lru`, the least recently stored groups are evicted until the
        new ones fit; groups of this micro-batch never are, and groups stored at the same step go in
        slot order. A later cell of a group that was evicted is a false eviction of that mode.

        A row that is not finite is not kept, but counted. Its group holds a slot without a state
        until its next store: looked up in between, it is a cold start.

        Rows in which a group ends and another begins have `end_ids`, the group that each state is
        of (-1: of none), and its cell, `end_cell_index`. A group that was looked up and is not the
        one at the row's end has ended.

        Raises UserError if the capacity is exhausted (with `lru`: below one micro-batch's groups),
        RuntimeError before the first step, ValueError for other shapes, or as `lookup`. Then
        nothing is changed.
        """
        if self._step < 0:
            raise RuntimeError("the ledger has no step yet: call begin_step before store")
        group_ids, cell_index = _as_group_ids(group_ids), np.ascontiguousarray(cell_index, np.int64)
        is_last = np.ascontiguousarray(is_last, np.bool_)
        if states.shape != (group_ids.size, self._slab.width):
            raise ValueError(f"states must be [{group_ids.size}, {self._slab.width}], got {list(states.shape)}")
        if not group_ids.shape == cell_index.shape == is_last.shape:
            shapes = f"{list(group_ids.shape)}, {list(cell_index.shape)} and {list(is_last.shape)}"
            raise ValueError(f"group_ids, cell_index and is_last must have the same shape, got {shapes}")
        states = states.detach().to(self._slab.device, self._slab.dtype)
        if end_ids is not None:
            end_ids, end_cell_index = _as_group_ids(end_ids), np.asarray(end_cell_index)
            if not end_ids.shape == end_cell_index.shape == group_ids.shape:
                raise ValueError(f"end_ids and end_cell_index must have the shape {list(group_ids.shape)}")
            # Groups that ended in their row come first: they free slots, and have no state.
            ended = np.flatnonzero(is_last | (group_ids != end_ids))
            is_last = np.concatenate([np.ones(ended.size, np.bool_), end_ids < 0])
            group_ids = np.concatenate([group_ids[ended], end_ids])
            cell_index = np.concatenate([cell_index[ended], end_cell_index], dtype=np.int64)
            if ended.size:
                states = torch.cat([states[: ended.size], states])
        is_kept = ~is_last & (group_ids >= 0)
        # Raises before it changes anything.
        slots = self._index.place(group_ids, cell_index, is_kept, self._step)
        if is_kept.any():
            self._stored_at = self._step
        slots[~is_kept] = self._slab.waste_slot
        self._counts["ledger/refused_rows"] += self._slab.write(slots, states)

    def reserve(self, number: int) -> None:
        """Have room for so many more groups, before any is stored or loaded."""
        if number:
            slab, capacity = self._slab, self._slab.capacity + number
            self._slab = Slab(width=slab.width, capacity=capacity, device=slab.device, dtype=slab.dtype)
            self._index = GroupIndex(replace(self._options, capacity=capacity), self._counts)

    def keep(self, group_ids: Iterable[int]) -> None:
        """Let no sweep evict these groups, which wait for a row, until they are stored or end."""
        self._index.kept = set(group_ids)

    @property
    def capacity(self) -> int:
        """The number of groups that it has room for."""
        return self._slab.capacity

    @property
    def last_extra_metrics(self) -> dict[str, float]:
        """The counters since the last drain, and the gauges: always all. Waits for the device."""
        metrics = {key: float(count) for key, count in self._counts.items()}
        metrics["ledger/live_groups"] = float(self._index.num_live)
        metrics["ledger/fill_fraction"] = self._index.num_live / self._slab.capacity
        return metrics

    def drain_metrics(self) -> dict[str, float]:
        """`last_extra_metrics`; the counters restart at zero."""
        metrics = self.last_extra_metrics
        self.load_undrained({})
        return metrics

    def undrained(self) -> dict[str, int]:
        """The counters since the last drain, which are kept. Waits for the device."""
        return {key: int(count) for key, count in self._counts.items()}

    def load_undrained(self, counts: Mapping[str, int]) -> None:
        """Restore the counters from `undrained`, after `load_state_dict`."""
        self._counts.update({key: counts.get(key, 0) for key in COUNTER_KEYS})

    def state_dict(self, *, with_rows: bool = True) -> dict[str, Any]:
        """This rank's shard, without the counters, as `torch.load(weights_only=True)` accepts it.
        States are in `held_rows` if not in "rows"."""
        index, slab = self._index, self._slab
        slots, groups, how = index.held_slots(), list(index.evicted), list(index.evicted.values())
        modes = [EVICTION_MODES.index(mode) for mode, _ in how]
        shard = {
            "capacity": slab.capacity,
            "width": slab.width,
            "dtype": slab.dtype,
            "step": self._step,
            "slots": torch.from_numpy(slots),
            "groups": torch.from_numpy(index.group_of[slots]),
            "last_step": torch.from_numpy(index.last_step[slots]),
            "valid": slab.are_valid(slots).cpu(),
            "free_slots": torch.from_numpy(index.free_slots()),
            "evicted_groups": torch.tensor(groups, dtype=torch.int64),
            "evicted_modes": torch.tensor(modes, dtype=torch.int64),
            "evicted_steps": torch.tensor([at for _, at in how], dtype=torch.int64),
        }
        if with_rows:
            empty = torch.empty(0, slab.width, dtype=slab.dtype)
            shard["rows"] = torch.cat([empty, *self.held_rows()])
        return shard

    def held_rows(self) -> Iterator[Tensor]:
        """The states held, in `Slab.pieces` [n, state_width], on the CPU."""
        slots = self._index.held_slots()
        for piece in self._slab.pieces(slots.size):
            yield self._slab.read(slots[piece])[0].cpu()

    def load_state_dict(self, shard: Shard) -> None:
        """Replace the contents by a saved `state_dict`; counters start at zero.

        With the saved capacity it is restored exactly, including the order in which slots are used.
        """
        if shard["capacity"] != self._slab.capacity:
            self.load_shards([shard])
            return
        self._check([shard])
        names = ("groups", "slots", "last_step", "free_slots")
        groups, slots, last_step, free = (shard[name].numpy() for name in names)
        self._index.fill((groups, slots, last_step), free, _evicted(shard))
        _restore_rows(self._slab, slots, shard, np.arange(slots.size))
        self._restored([shard])

    def load_shards(self, shards: Sequence[Shard], *, owned: Callable[[Ints], Flags] | None = None) -> None:
        """Replace the contents by those that other ranks saved; counters start at zero.

        Taken are the groups for which `owned` (group ids -> bool) says so, without it all; of a
        group that several shards hold, the state that was stored last. A UserError changes nothing.
        """
        self._check(shards)
        groups = torch.cat([shard["groups"] for shard in shards]).numpy()
        last_step = torch.cat([shard["last_step"] for shard in shards]).numpy()
        # Oldest first, and of a group that several shards hold only the newest entry.
        order = np.argsort(last_step, kind="stable")
        _, from_end = np.unique(groups[order][::-1], return_index=True)
        order = order[np.sort(order.size - 1 - from_end)]
        if owned is not None:
            order = order[owned(groups[order])]
        capacity = self._slab.capacity
        if order.size > capacity:
            problem = f"must hold the checkpoint's {order.size} groups, got {capacity}"
            raise UserError("ledger.capacity", problem, f"set it to at least {order.size}")
        groups, slots = groups[order], np.arange(order.size)
        free = np.arange(capacity - 1, order.size - 1, -1)
        evicted = _joined_evicted(shards, set(groups.tolist()), owned)
        self._index.fill((groups, slots, last_step[order]), free, evicted)
        start = 0
        for shard in shards:
            places = order - start
            is_its_own = (places >= 0) & (places < len(shard["groups"]))
            _restore_rows(self._slab, slots[is_its_own], shard, places[is_its_own])
            start += len(shard["groups"])
        self._restored(shards)

    def _check(self, shards: Sequence[Shard]) -> None:
        """Refuse shards of another width."""
        for shard in shards:
            if shard["width"] != self._slab.width:
                problem = f"the checkpoint's states are {shard['width']} wide, the model's {self._slab.width}"
                fix = "resume with the model that was saved, or begin with its weights (model.weights)"
                raise UserError("ledger", problem, fix)

    def _restored(self, shards: Sequence[Shard]) -> None:
        self._step = max(int(shard["step"]) for shard in shards)
        self._stored_at = int(self._index.last_step.max(initial=-1))
        self.load_undrained({})


def _as_group_ids(values: Ints) -> Ints:
    """The ids as int64. A negative one that is not -1, such as a hash of 64 bits, would stand for
    no group, and its state would never be kept."""
    group_ids = np.ascontiguousarray(values, np.int64)
    if group_ids.min(initial=0) < -1:
        raise ValueError(f"group id {group_ids.min()}: must be -1 (no group) or in [0, 2^63)")
    return group_ids


def _restore_rows(slab: Slab, slots: Ints, shard: Shard, places: Ints) -> None:
    """Copy the rows at `places` of a shard into `slots`."""
    for piece in slab.pieces(slots.size):
        chosen = torch.from_numpy(places[piece])
        slab.restore(slots[piece], shard["rows"][chosen], shard["valid"][chosen])


def _joined_evicted(
    shards: Sequence[Shard], held: set[int], owned: Callable[[Ints], Flags] | None
) -> list[tuple[int, Evicted]]:
    """The evicted groups that are not held, each by its newest eviction, oldest first."""
    by_step = sorted((item for shard in shards for item in _evicted(shard)), key=lambda item: item[1][1])
    newest = {group: evicted for group, evicted in by_step if group not in held}
    joined = sorted(newest.items(), key=lambda item: item[1][1])
    if owned is None:
        return joined
    is_owned = owned(np.array([group for group, _ in joined], np.int64))
    return [item for item, is_own in zip(joined, is_owned, strict=True) if is_own]


def _evicted(shard: Shard) -> list[tuple[int, Evicted]]:
    columns = (shard[f"evicted_{name}"].tolist() for name in ("groups", "modes", "steps"))
    return [(group, (EVICTION_MODES[mode], at)) for group, mode, at in zip(*columns, strict=True)]
