"""`Ledger`: where the recurrent states of groups live between steps.

    ledger.begin_step(step)                                         # wipes or sweeps where that is due
    for batch in window:
        state = ledger.lookup(batch.group_ids, batch.cell_index)    # [B, state_width], detached
        ...forward, backward...
        ledger.store(batch.group_ids, batch.cell_index, batch.is_last, output.state)

States are stored once per micro-batch, after the backward and outside `forward`, which activation checkpointing runs
twice. A group's first cell starts from zero whatever is held; its last cell frees its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.errors import UserError
from trainer.ledger.counters import COUNTER_KEYS, GAUGE_KEYS, Counters
from trainer.ledger.eviction import WipeMode, check_settings
from trainer.ledger.exchange import OwnerExchange, owner_of
from trainer.ledger.pending import PendingRows
from trainer.ledger.placement import check_distinct, make_placement
from trainer.ledger.shard import LedgerShard
from trainer.ledger.slab import Slab, to_device
from trainer.ledger.snapshot import load_shards, save_shard

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

Ownership = Literal["reader", "exchange"]


class Ledger:
    """The states of groups, one row each, held by the rank that owns the group.

    Args:
        state_width: numbers per state.
        capacity: most groups that this rank can hold.
        wipe_mode: `none`, `full`, `lru` or `periodic_stale`; see `trainer.ledger.eviction`.
        stale_threshold: with `periodic_stale`, steps that a group may go without a store.
        sweep_every: with `periodic_stale`, steps from sweep to sweep.
        wipe_every: with `full`, steps from wipe to wipe.
        device, dtype: of the states.
        ownership: `reader`: whoever reads a group owns it, and nothing is communicated. `exchange`: the owner is
            `splitmix64(group_id) % world_size`, and `lookup`, `store` and `release` are collective: every rank calls
            them equally often, with empty arrays where it has nothing.
        rank, world_size, process_group: who this is, and the ranks that take part (None: the default group).
        keep_undo: journal every change of a step so that `rollback` can undo it.
        compiled: keep the books in loops that numba compiles, in half the time of a micro-batch; the numbers are the same.
            Needs the extra `jit`, and takes half a second once.
        is_confirmed: never wait for the device (but for the exchange's own collectives). Whoever steps then reads
            `num_refused` of each step with what else it reads, calls `refuse` if that is not 0, and `confirm` when the step
            stands; until then it and a step after it can be rolled back, one by one. Needs `keep_undo`.

    Raises:
        UserError: a setting is out of range, or `compiled` without numba.
        ValueError: `is_confirmed` without `keep_undo`.
    """

    def __init__(
        self,
        *,
        state_width: int,
        capacity: int,
        wipe_mode: WipeMode,
        stale_threshold: int = 0,
        sweep_every: int = 1,
        wipe_every: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        ownership: Ownership = "reader",
        rank: int = 0,
        world_size: int = 1,
        process_group: Any = None,
        keep_undo: bool = False,
        compiled: bool = False,
        is_confirmed: bool = False,
    ) -> None:
        if is_confirmed and not keep_undo:
            raise ValueError("a ledger whose steps are confirmed needs keep_undo=True")
        check_settings(
            wipe_mode=wipe_mode,
            capacity=capacity,
            stale_threshold=stale_threshold,
            sweep_every=sweep_every,
            wipe_every=wipe_every,
        )
        if ownership not in get_args(Ownership):
            raise UserError("ledger.ownership", f"must be one of {', '.join(get_args(Ownership))}, got {ownership!r}")
        self.exchange_sec = 0.0
        self._rank = rank
        self._world_size = world_size
        self._ownership = ownership
        self._counters = Counters()
        is_shared = ownership == "exchange" and world_size > 1
        self._shard = LedgerShard(
            Slab(width=state_width, capacity=capacity, device=torch.device(device), dtype=dtype),
            make_placement(
                compiled=compiled,
                capacity=capacity,
                is_lru=wipe_mode == "lru",
                has_recency=wipe_mode in ("lru", "periodic_stale"),
                keep_undo=keep_undo,
            ),
            self._counters,
            wipe_mode=wipe_mode,
            stale_threshold=stale_threshold,
            sweep_every=sweep_every,
            wipe_every=wipe_every,
            keep_undo=keep_undo,
            is_owned=self._is_mine if is_shared else None,
            pending=PendingRows() if is_confirmed else None,
        )
        self._exchange = (
            OwnerExchange(world_size=world_size, process_group=process_group, device=self._shard.slab.device)
            if is_shared
            else None
        )

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """Every key that `drain_metrics` returns."""
        return (*COUNTER_KEYS, *GAUGE_KEYS)

    @property
    def ownership(self) -> Ownership:
        """Who owns a group: its reader, or the rank that its id hashes to."""
        return self._ownership

    def begin_step(self, step: int) -> None:
        """Begin optimizer step `step`: the step before becomes final (with `is_confirmed` by `confirm` alone); then wipe or
        sweep, where that is due.

        A sweep or wipe that falls on a step that is never begun, or is rolled back, happens at the next one.

        Raises:
            RuntimeError: `step` is before the last one.
        """
        self._shard.begin_step(step)

    def lookup(self, group_ids: Ints, cell_index: Ints) -> Tensor:
        """The states from which a micro-batch's cells go on, [B, state_width]: a detached copy.

        Zeros at the start of a group (cell 0), for group id -1, and where no state is held. The last is counted as a
        cold start, on the rank that asks.

        Raises:
            ValueError: a group appears twice.
        """
        group_ids, cell_index = _as_ids(group_ids), _as_ids(cell_index)
        if self._exchange is None:
            states, _, num_missing = self._shard.lookup(group_ids, cell_index)
        else:
            check_distinct(group_ids.tolist())
            states, num_missing = self._fetch(self._exchange, group_ids, (cell_index == 0) | (group_ids < 0))
        if num_missing:
            self._counters.add("ledger/cold_starts", num_missing)
        return states

    def store(self, group_ids: Ints, cell_index: Ints, is_last: Flags, states: Tensor) -> None:
        """Store the states after a micro-batch's cells ([B, state_width], copied); call it after the backward.

        Group id -1 is ignored. A last cell's state is not stored; its group's slot is freed, which is no eviction. A
        row that is not finite is refused and counted, and what was held for its group is dropped: the group's next cell
        is a cold start, not a continuation of the wrong state. Then, with `lru`, the least recently stored groups are
        evicted until the new ones fit; groups of this micro-batch never are, and groups stored at the same step go in
        slot order. The check for finite rows is the ledger's one wait for the device; with `is_confirmed` there is none:
        such a row is stored as zeros until `refuse`, and takes a slot until then.

        A cell that is not a group's first, of a group that was evicted, counts as a false eviction of that mode.

        Raises:
            ValueError: a group appears twice.
            UserError: the capacity is exhausted (with `lru`: below one micro-batch's groups); nothing is changed.
            RuntimeError: no step has begun.
        """
        group_ids, cell_index, is_last = (
            _as_ids(group_ids),
            _as_ids(cell_index),
            np.ascontiguousarray(is_last, np.bool_),
        )
        states = states.detach()
        if self._exchange is not None:
            check_distinct(group_ids.tolist())
            known = np.flatnonzero(group_ids >= 0)
            ids = torch.from_numpy(np.stack([group_ids, cell_index, is_last], axis=1)[known])
            route = self._exchange.route(group_ids[known])
            columns = self._exchange.to_owners(route, ids).numpy().T.copy()
            states = self._exchange.to_owners(route, states.index_select(0, to_device(known, states.device)))
            group_ids, cell_index, is_last = columns[0], columns[1], columns[2] != 0
        self._shard.store(group_ids, cell_index, is_last, states)

    def release(self, group_ids: Ints) -> None:
        """Free the slots of groups that will not come back; unknown groups and -1 are ignored. Not an eviction."""
        groups = group_ids[group_ids >= 0]
        if self._exchange is not None:
            groups = self._exchange.to_owners(self._exchange.route(groups), torch.from_numpy(groups)).numpy()
        self._shard.release(np.unique(groups))

    def rollback(self) -> None:
        """Undo the step: everything since `begin_step`, its sweep or wipe and all counts included.

        The next call is `begin_step`, with the same step again or a later one; or, with `is_confirmed`, what the step before
        is still due.

        Raises:
            RuntimeError: the ledger was built without `keep_undo`.
        """
        self._shard.roll_back()

    @property
    def is_confirmed(self) -> bool:
        """Whether steps become final by `confirm`."""
        return self._shard.pending is not None

    def num_refused(self) -> Tensor:
        """Rows that this rank stored in this step and that are not finite, [] float64 on the device. No wait.

        Those of last cells count too, which are not kept anyway.
        """
        assert self._shard.pending is not None, "is_confirmed is not set"
        return self._shard.pending.count(self._shard.slab.device)

    def refuse(self) -> None:
        """Refuse the rows of the newest step that are not finite, as `store` says, and count them. Waits for the device.

        Look-ups of the same step that read zeros in their place count as cold starts. Not a collective.
        """
        self._shard.refuse()

    def confirm(self) -> None:
        """The oldest step that is not final becomes it."""
        self._shard.confirm()

    def drain_metrics(self) -> dict[str, float]:
        """The counters since the last drain, which start again from zero, and the gauges. All keys, always."""
        return {**self._counters.drain(), **self._gauges()}

    @property
    def last_extra_metrics(self) -> dict[str, float]:
        """The counters of the current step, and the gauges. All keys, always."""
        return {**self._counters.step(), **self._gauges()}

    @property
    def recently_evicted(self) -> Mapping[int, tuple[str, int]]:
        """The groups evicted lately that have not come back: how and at which step, oldest first."""
        return {group: (ghost.mode, ghost.step) for group, ghost in self._shard.placement.evicted()}

    def undrained(self) -> dict[str, int]:
        """The counters since the last drain, which go on: what a checkpoint between two drains needs beside the shard."""
        return self._counters.undrained()

    def load_undrained(self, counts: Mapping[str, int]) -> None:
        """Count on from `undrained`, after `load_state_dict`."""
        self._counters.load(counts)

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard: tensors (on the CPU), numbers and strings; counters are not part of it (`undrained`)."""
        return save_shard(self._shard, ownership=self._ownership, rank=self._rank, world_size=self._world_size)

    def load_state_dict(
        self, shards: Sequence[Mapping[str, Any]], *, owned: Callable[[Ints], Flags] | None = None
    ) -> None:
        """Replace the contents by those of a checkpoint; counters start at zero.

        With the saved world size, capacity and ownership this rank takes its own shard exactly, the order in which
        slots are used included, so that a resumed run counts and computes what the uninterrupted one would.

        Otherwise the entries of all shards are dealt out again: with `exchange` to their owners, with `reader` to the
        ranks whose `owned` (group ids -> bool) says so. Without `owned` every rank keeps every entry, since any of them
        may come to read it; the capacity must then hold them all. Of a group that several shards hold, the state that
        was stored last counts.

        Args:
            shards: the `state_dict()` of every saving rank, in order of rank.
            owned: which groups this rank will read; only used with `reader`, when the world size changed.

        Raises:
            UserError: the states are of another width, or do not fit the capacity.
        """
        keeps = self._is_mine if self._ownership == "exchange" else owned
        load_shards(
            self._shard,
            shards,
            ownership=self._ownership,
            rank=self._rank,
            world_size=self._world_size,
            keeps=keeps,
        )
        self._counters.drain()
        self._counters.begin_step()
        if self._shard.pending is not None:
            self._shard.pending.clear()

    def _fetch(self, exchange: OwnerExchange, group_ids: Ints, is_fresh: Flags) -> tuple[Tensor, int]:
        """The states from their owners, zeros for the fresh, and how many are not held."""
        asked = np.flatnonzero(~is_fresh)
        route = exchange.route(group_ids[asked])
        asked_for = exchange.to_owners(route, torch.from_numpy(group_ids[asked])).numpy()
        wanted, places = np.unique(asked_for, return_inverse=True)
        rows, slots, _ = self._shard.lookup(wanted, np.ones(wanted.size, np.int64))
        rows = rows.index_select(0, to_device(places, rows.device))
        is_missing = torch.from_numpy((slots[places] == self._shard.slab.capacity).astype(np.int64))
        num_missing = int(exchange.from_owners(route, is_missing).sum())
        rows = exchange.from_owners(route, rows)
        states = rows.new_zeros(group_ids.size, self._shard.slab.width)
        states.index_copy_(0, to_device(asked, rows.device), rows)
        return states, num_missing

    def _is_mine(self, groups: Ints) -> Flags:
        return cast(Flags, owner_of(groups, self._world_size) == self._rank)

    def _gauges(self) -> dict[str, float]:
        num_live = self._shard.placement.num_live
        return {"ledger/live_groups": float(num_live), "ledger/fill_fraction": num_live / self._shard.slab.capacity}


def _as_ids(values: Ints) -> Ints:
    return values if values.dtype == np.int64 and values.flags.c_contiguous else np.ascontiguousarray(values, np.int64)
