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
from trainer.ledger.counters import Counters
from trainer.ledger.eviction import WipeMode, check_settings
from trainer.ledger.exchange import OwnerExchange, owner_of
from trainer.ledger.pending import PendingRows
from trainer.ledger.shard import LedgerShard
from trainer.ledger.snapshot import load_shards, save_shard
from trainer.ledger.store import StateStore, to_device

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
        is_confirmed: never wait for the device (but for the exchange's own collectives). Whoever steps then reads
            `num_refused` of each step with what else it reads, calls `refuse` if that is not 0, and `confirm` when the step
            stands; until then it and a step after it can be rolled back, one by one. Needs `keep_undo`.

    Raises:
        UserError: a setting is out of range.
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
        self._rank = rank
        self._world_size = world_size
        self._ownership = ownership
        self._counters = Counters()
        self._checked_bytes = b""
        self._checked: tuple[list[int], bool] = ([], False)
        self._store = StateStore(
            width=state_width,
            capacity=capacity,
            device=torch.device(device),
            dtype=dtype,
            has_recency=wipe_mode in ("lru", "periodic_stale"),
            keep_undo=keep_undo,
        )
        is_shared = ownership == "exchange" and world_size > 1
        self._shard = LedgerShard(
            self._store,
            self._counters,
            wipe_mode=wipe_mode,
            stale_threshold=stale_threshold,
            sweep_every=sweep_every,
            wipe_every=wipe_every,
            is_owned=self._is_mine if is_shared else None,
            pending=PendingRows() if is_confirmed else None,
        )
        self._exchange = (
            OwnerExchange(world_size=world_size, process_group=process_group, device=self._store.device)
            if is_shared
            else None
        )

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
        groups, has_none = self._distinct(group_ids)
        is_fresh = cell_index == 0
        if has_none:
            is_fresh |= group_ids < 0
        if self._exchange is None:
            states, num_missing = self._shard.lookup(groups, is_fresh)
        else:
            states, num_missing = self._fetch(self._exchange, group_ids, is_fresh)
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
        groups, has_none = self._distinct(group_ids)
        is_start = cell_index == 0
        states = states.detach()
        if has_none:
            known = np.flatnonzero(group_ids >= 0)
            groups, is_start, is_last = group_ids[known].tolist(), is_start[known], is_last[known]
            states = states.index_select(0, to_device(known, states.device))
        if self._exchange is not None:
            ids = np.stack([np.array(groups, np.int64), is_start, is_last], axis=1)
            route = self._exchange.route(ids[:, 0])
            columns = self._exchange.to_owners(route, torch.from_numpy(ids)).numpy().T
            states = self._exchange.to_owners(route, states)
            groups, is_start, is_last = columns[0].tolist(), columns[1] != 0, columns[2] != 0
            check_distinct(groups)
        self._shard.store(groups, is_start, is_last, states)

    def release(self, group_ids: Ints) -> None:
        """Free the slots of groups that will not come back; unknown groups and -1 are ignored. Not an eviction."""
        groups = group_ids[group_ids >= 0]
        if self._exchange is not None:
            groups = self._exchange.to_owners(self._exchange.route(groups), torch.from_numpy(groups)).numpy()
        self._shard.release(np.unique(groups).tolist())

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
        return self._shard.pending.count(self._store.device)

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
        return {group: (ghost.mode, ghost.step) for group, ghost in self._shard.ghosts.items()}

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
        groups = group_ids[asked]
        route = exchange.route(groups)
        wanted: list[int] = exchange.to_owners(route, torch.from_numpy(groups)).tolist()
        rows, _ = self._shard.lookup(wanted, np.zeros(len(wanted), np.bool_))
        is_held = torch.tensor([group in self._store.slot_of for group in wanted], dtype=torch.int64)
        held = exchange.from_owners(route, is_held)
        rows = exchange.from_owners(route, rows)
        states = rows.new_zeros(group_ids.size, self._store.width)
        states.index_copy_(0, torch.from_numpy(asked).to(rows.device), rows)
        return states, asked.size - int(held.sum())

    def _distinct(self, group_ids: Ints) -> tuple[list[int], bool]:
        """The ids as a list, found to be distinct, and whether -1 is among them."""
        # A store comes with the groups of the look-up before it.
        as_bytes = group_ids.astype(np.int64, copy=False).tobytes()
        if as_bytes != self._checked_bytes:
            groups: list[int] = group_ids.tolist()
            check_distinct(groups)
            self._checked = groups, bool(groups) and min(groups) < 0
            self._checked_bytes = as_bytes
        return self._checked

    def _is_mine(self, groups: Ints) -> Flags:
        return cast(Flags, owner_of(groups, self._world_size) == self._rank)

    def _gauges(self) -> dict[str, float]:
        num_live = self._store.num_live
        return {"ledger/live_groups": float(num_live), "ledger/fill_fraction": num_live / self._store.capacity}


def check_distinct(groups: list[int]) -> None:
    """Raise a ValueError that names a group (not -1) that appears twice."""
    if len(set(groups)) < len(groups):
        known = [group for group in groups if group >= 0]
        twice = next((group for i, group in enumerate(known) if group in known[:i]), None)
        if twice is not None:
            raise ValueError(f"group {twice} appears twice in one micro-batch")
