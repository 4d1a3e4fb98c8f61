"""`Ledger`: the recurrent states of groups between steps.

    ledger.begin_step(step)                                         # wipes or sweeps when due
    for batch in window:
        state = ledger.lookup(batch.group_ids, batch.cell_index)    # [B, state_width], detached
        ...forward, backward...
        ledger.store(batch.group_ids, batch.cell_index, batch.is_last, output.state)

Store once per micro-batch, after the backward and outside `forward`, which activation checkpointing runs twice. A group's
first cell starts from zero whatever is held; its last cell frees its slot.

Nothing is ever undone: when the optimizer skips a step, its weights are still valid, and the states computed with them are
the right continuation. Only rows that are not finite are dropped. That is decided on the device, so neither `lookup` nor
`store` waits for it (except inside the collectives of `exchange`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.arrays import Flags, Ints
from trainer.hashing import splitmix64
from trainer.ledger.index import EVICTION_MODES, GroupIndex, distinct, is_due
from trainer.ledger.slab import Native, Slab
from trainer.ledger.snapshot import Owners, load_shards, save_shard
from trainer.on_device import to_device
from trainer.options import LedgerOptions

if TYPE_CHECKING:
    from trainer.model.protocol import StateLayout

COUNTER_KEYS = (
    *(f"ledger/{what}/{mode}" for what in ("evictions", "false_evictions") for mode in EVICTION_MODES),
    "ledger/cold_starts",
    "ledger/refused_rows",
    "ledger_wipe_count",
)
"""Summed over the window and over ranks (with the worst rank beside, as `<key>_max`)."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
GAUGE_KEYS = ("ledger/live_groups", "ledger/fill_fraction")


def owner_of(group_ids: Ints, world_size: int) -> Ints:
    """The rank owning each group: `splitmix64(group_id) % world_size`; plain modulo would follow the ids' strides."""
    return (splitmix64(group_ids) % np.uint64(world_size)).astype(np.int64)


class Route(NamedTuple):
    """Where the items of this rank go, and how many arrive from each rank."""

    order: Tensor
    """Item indices sorted by owner, int64 [n] on the exchange's device."""

    send_counts: list[int]
    receive_counts: list[int]


class OwnerExchange:
    """The all-to-all that takes ids and rows to their owners and brings answers back.

    Every rank must make each call, in the same order, also with nothing to send.

    Args:
        world_size: ranks of the default process group.
        device: of the rows; for gloo, which moves CPU tensors only, they are copied to the CPU and back.
    """

    def __init__(self, *, world_size: int, device: torch.device) -> None:
        self._world_size = world_size
        self._wire = torch.device("cpu") if dist.get_backend() == "gloo" else device
        self.seconds = 0.0
        """Spent in collectives so far."""

    def route(self, group_ids: Ints) -> Route:
        """Exchange the number of items per pair of ranks: one collective."""
        owners = owner_of(group_ids, self._world_size)
        send = np.bincount(owners, minlength=self._world_size)
        ones = [1] * self._world_size
        received = self._all_to_all(torch.from_numpy(send.astype(np.int64)).to(self._wire), ones, ones)
        order = torch.from_numpy(np.argsort(owners, kind="stable")).to(self._wire)
        return Route(order, send.tolist(), received.tolist())

    def to_owners(self, route: Route, items: Tensor) -> Tensor:
        """Send each of `items` [n, ...] to its owner; returns the items sent to this rank, ordered by sending rank."""
        sorted_items = items.to(self._wire).index_select(0, route.order)
        received = self._all_to_all(sorted_items, route.send_counts, route.receive_counts)
        return received.to(items.device)

    def from_owners(self, route: Route, answers: Tensor) -> Tensor:
        """Return one answer per item that `to_owners` received; returns the answers to this rank's items, in their order."""
        returned = self._all_to_all(answers.to(self._wire), route.receive_counts, route.send_counts)
        items = torch.empty_like(returned)
        items.index_copy_(0, route.order, returned)
        return items.to(answers.device)

    def _all_to_all(self, items: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        received = items.new_empty((sum(receive_counts), *items.shape[1:]))
        began = time.perf_counter()
        dist.all_to_all_single(received, items.contiguous(), receive_counts, send_counts)
        self.seconds += time.perf_counter() - began
        return received


class Ledger:
    """The states of groups, one row each, held by the rank that owns the group.

    Args:
        options: how many groups it holds, and which it evicts; see `LedgerOptions`.
        state_width: numbers per state.
        layout: instead, of states that are any nest of tensors [B, ...]: `trainer.model.protocol.StateLayout(state)`.
        device: of the states.
        dtype: of the states as they are kept; None: that of the options. bfloat16 halves the memory and rounds to 8 bits.
        owners: which rank holds a group.

    Raises:
        TypeError: neither or both of state_width and layout are given.
    """

    def __init__(
        self,
        options: LedgerOptions = LedgerOptions(),  # noqa: B008 - immutable
        *,
        state_width: int | None = None,
        layout: StateLayout | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        owners: Owners = Owners(),  # noqa: B008 - immutable
    ) -> None:
        self._options = options
        self.owners = owners
        self._step: int | None = None
        self._stored_at = -1
        self._layout = layout
        width = state_width if layout is None else layout.width
        if width is None or None not in (state_width, layout):
            raise TypeError("Ledger takes either state_width or layout")
        dtype = dtype or DTYPES[options.dtype]
        self._slab = Slab(width=width, capacity=options.capacity, device=torch.device(device), dtype=dtype)
        self._given_dtype = torch.promote_types(dtype, torch.float32)
        # Numbers, or tensors of the device where it alone knows them.
        self._counts: dict[str, Native] = dict.fromkeys(COUNTER_KEYS, 0)
        self._index = GroupIndex(options, self._counts)
        # Computed where it is asked for, which is on few steps.
        self._stored_steps: Callable[[], Tensor] | None = None
        self._exchange: OwnerExchange | None = None
        if owners.ownership == "exchange" and owners.world_size > 1:
            self._exchange = OwnerExchange(world_size=owners.world_size, device=self._slab.device)

    @property
    def is_collective(self) -> bool:
        """Whether `lookup` and `store` communicate, so that every rank must call them equally often."""
        return self._exchange is not None

    @property
    def exchange_sec(self) -> float:
        """Seconds spent so far in the collectives of `exchange`, in which a rank waits for the others."""
        return 0.0 if self._exchange is None else self._exchange.seconds

    def begin_step(self, step: int) -> None:
        """Begin optimizer step `step`: wipe or sweep if due.

        A wipe or sweep that falls on a step that is never begun happens at the next one. A step may begin again, or be one
        before it, as long as nothing was stored since: a run that finds its data exhausted has begun steps without tokens.

        Raises:
            RuntimeError: `step` is before that of the last store.
        """
        if step < max(self._stored_at, 0):
            raise RuntimeError(f"ledger steps go forward from 0: step {step} after a store at step {self._stored_at}")
        previous = step - 1 if self._step is None else self._step
        self._step = step
        mode = self._options.wipe_mode
        if mode == "full" and is_due(step, previous, self._options.wipe_every):
            self._index.wipe()
            self._counts["ledger_wipe_count"] += 1
        if mode == "periodic_stale" and is_due(step, previous, max(self._options.wipe_every, 1)):
            self._index.sweep(step - self._options.stale_threshold, step)

    def lookup(self, group_ids: Ints, cell_index: Ints) -> Any:
        """The states from which a micro-batch's cells continue, [B, state_width]: a detached copy, in float32 or wider; with a
        layout the nest, each tensor in its own type.

        Zeros at the start of a group (cell 0), for group id -1, and where no state is held. The last is counted as a
        cold start, on the rank that asks.

        Raises:
            ValueError: a group appears twice, or an id is neither -1 nor in [0, 2^63).
        """
        group_ids, cell_index = _as_group_ids(group_ids), np.ascontiguousarray(cell_index, np.int64)
        is_fresh = (cell_index == 0) | (group_ids < 0)
        if self._exchange is None:
            slots = self._index.find(group_ids)
            slots[is_fresh] = self._slab.capacity
            states, is_valid = self._slab.read(slots)
            self._stored_steps = partial(self._steps_at, slots, is_valid)
        else:
            distinct(group_ids)
            states, is_valid = self._fetch(self._exchange, group_ids, np.flatnonzero(~is_fresh))
        self._counts["ledger/cold_starts"] += np.count_nonzero(~is_fresh) - self._slab.library.count_nonzero(is_valid)
        states = states.to(self._given_dtype)
        return states if self._layout is None else self._layout.unflatten(states)

    def lookup_age(self) -> Tensor:
        """Steps since each state that the last `lookup` returned was stored, int64 [B] on the device; -1 where it was zeros.

        Call it before the next `store`. It communicates nothing, and waits for nothing.

        Raises:
            RuntimeError: nothing was looked up since the last store.
        """
        if self._stored_steps is None or self._step is None:
            raise RuntimeError("the age of states is known between a lookup and the next store, in a step")
        steps = self._stored_steps()
        return torch.where(steps >= 0, self._step - steps, -1)

    def store(
        self,
        group_ids: Ints,
        cell_index: Ints,
        is_last: Flags,
        states: Any,
        *,
        end_ids: Ints | None = None,
        end_cell_index: Ints | None = None,
    ) -> None:
        """Store the states after a micro-batch's cells ([B, state_width], or the nest; copied); call it after the backward.

        Group id -1 is ignored. A last cell's state is not stored; its group's slot is freed, which is not an eviction.
        Then, with `lru`, the least recently stored groups are evicted until the new ones fit; groups of this micro-batch
        never are, and groups stored at the same step go in slot order.

        A row that is not finite is not kept, but counted, on the device. Its group holds a slot without a state until its
        next store: looked up in between, it reads zeros and is a cold start, not a continuation of the wrong state.

        A cell that is not its group's first, of a group that was evicted, counts as a false eviction of that mode.

        Rows in which a group ends and another begins have `end_ids`, the group that each state is of (-1: of none), and its
        cell, `end_cell_index`. A group that was looked up and is not the one at the row's end has ended.

        If it raises, nothing is changed; with `exchange`, on the rank that raises.

        Raises:
            ValueError: a group appears twice, an id is neither -1 nor in [0, 2^63), or `states` has another shape or layout.
            UserError: the capacity is exhausted (with `lru`: below one micro-batch's groups).
            RuntimeError: no step has begun.
        """
        if self._step is None:
            raise RuntimeError("the ledger has no step yet: call begin_step before store")
        group_ids, cell_index = _as_group_ids(group_ids), np.ascontiguousarray(cell_index, np.int64)
        is_last = np.ascontiguousarray(is_last, np.bool_)
        if self._layout is not None:
            states = self._layout.flatten(states)
        if states.shape != (group_ids.size, self._slab.width):
            raise ValueError(f"states must be [{group_ids.size}, {self._slab.width}], got {list(states.shape)}")
        if not group_ids.shape == cell_index.shape == is_last.shape:
            shapes = f"{list(group_ids.shape)}, {list(cell_index.shape)} and {list(is_last.shape)}"
            raise ValueError(f"group_ids, cell_index and is_last must have the same shape, got {shapes}")
        if states.requires_grad:
            states = states.detach()
        if states.dtype != self._slab.dtype or states.device != self._slab.device:
            states = states.to(self._slab.device, self._slab.dtype)
        if end_ids is not None:
            ended = np.flatnonzero(group_ids != np.asarray(end_ids))  # those come first, and have no state
            end_ids, end_cell_index = _as_group_ids(end_ids), np.ascontiguousarray(end_cell_index, np.int64)
            if not end_ids.shape == end_cell_index.shape == group_ids.shape:
                raise ValueError(f"end_ids and end_cell_index must have the shape {list(group_ids.shape)}")
            is_last = np.concatenate([np.ones(ended.size, np.bool_), end_ids < 0])
            group_ids = np.concatenate([group_ids[ended], end_ids])
            cell_index = np.concatenate([cell_index[ended], end_cell_index])
            states = torch.cat([states[: ended.size], states]) if ended.size else states
        if self._exchange is not None:
            distinct(group_ids)
            group_ids, cell_index, is_last, states = self._send(self._exchange, group_ids, cell_index, is_last, states)
        self._stored_steps = None
        is_kept = ~is_last & (group_ids >= 0)
        slots = self._index.place(group_ids, cell_index, is_kept, self._step)  # raises before it changes anything
        if is_kept.any():
            self._stored_at = self._step
        slots[~is_kept] = self._slab.waste_slot
        self._counts["ledger/refused_rows"] += self._slab.write(slots, states)

    def keep(self, group_ids: Iterable[int]) -> None:
        """Let no sweep evict these groups until they are stored again or have ended: they wait for a row."""
        self._index.kept = set(group_ids)

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """All keys of `drain_metrics`; the same on every rank."""
        return (*COUNTER_KEYS, *GAUGE_KEYS)

    @property
    def last_extra_metrics(self) -> dict[str, float]:
        """The counters since the last drain, and the gauges. All keys, always. Waits for the device."""
        num_live = self._index.num_live
        gauges = {"ledger/live_groups": float(num_live), "ledger/fill_fraction": num_live / self._slab.capacity}
        return {**{key: float(count) for key, count in self._counts.items()}, **gauges}

    def drain_metrics(self) -> dict[str, float]:
        """`last_extra_metrics`; the counters restart at zero."""
        metrics = self.last_extra_metrics
        self.load_undrained({})
        return metrics

    def undrained(self) -> dict[str, int]:
        """The counters since the last drain, which are kept: what a checkpoint between two drains needs beside the shard.

        Waits for the device.
        """
        return {key: int(count) for key, count in self._counts.items()}

    def load_undrained(self, counts: Mapping[str, int]) -> None:
        """Restore the counters from `undrained`, after `load_state_dict`."""
        self._counts.update({key: counts.get(key, 0) for key in COUNTER_KEYS})

    def state_dict(self, *, with_rows: bool = True) -> dict[str, Any]:
        """This rank's shard: tensors (on the CPU), numbers and strings; counters are not part of it (`undrained`).

        Args:
            with_rows: the states too, under "rows"; or else they are to be had from `held_rows`, in the same order.
        """
        shard = save_shard(self._index, self._slab, owners=self.owners, step=self._step)
        if with_rows:
            empty = torch.empty(0, self._slab.width, dtype=self._slab.dtype)
            shard["rows"] = torch.cat([empty, *self.held_rows()])
        return shard

    @property
    def num_row_bytes(self) -> int:
        """Size of all of `held_rows`."""
        return self._index.num_live * self._slab.width * self._slab.dtype.itemsize

    def held_rows(self) -> Iterator[Tensor]:
        """The states held, in pieces [n, state_width] of some megabytes, on the CPU: for writing more than memory has."""
        slots = self._index.held_slots()
        for piece in self._slab.pieces(slots.size):
            yield self._slab.read(slots[piece])[0].cpu()

    def load_state_dict(
        self, shards: Sequence[Mapping[str, Any]], *, owned: Callable[[Ints], Flags] | None = None, room: int = 0
    ) -> None:
        """Replace the contents by those of a checkpoint; counters start at zero.

        With the saved world size, capacity and ownership this rank takes its own shard exactly, including the order in
        which slots are used, so that a resumed run counts and computes what the uninterrupted one would.

        Otherwise the entries of all shards are distributed again: with `exchange` to their owners, with `reader` to the
        ranks whose `owned` (group ids -> bool) says so. Without `owned` every rank keeps every entry, since any of them
        may come to read it; the capacity must then hold them all. Of a group that several shards hold, the state that
        was stored last counts.

        Args:
            shards: the `state_dict()` of every saving rank, in order of rank.
            owned: which groups this rank will read; only used with `reader`, when the world size changed.
            room: groups that this rank will have in flight beside those of the shards. A capacity that holds the shards' but
                not both is warned about: states that are still needed may be evicted.

        Raises:
            UserError: the states are of another width, or do not fit the capacity. Nothing is changed.
        """
        keeps = self._is_mine if self.owners.ownership == "exchange" else owned
        self._step = load_shards(self._index, self._slab, shards, owners=self.owners, keeps=keeps, room=room)
        self._stored_at = int(self._index.last_step.max(initial=-1))
        self.load_undrained({})

    def _fetch(self, exchange: OwnerExchange, group_ids: Ints, asked: Ints) -> tuple[Tensor, Native]:
        """Ask the owners for the states at positions `asked`: all states, and which are valid; zeros elsewhere."""
        route = exchange.route(group_ids[asked])
        # Several ranks may ask for one group.
        asked_for = exchange.to_owners(route, torch.from_numpy(group_ids[asked])).numpy()
        wanted, places = np.unique(asked_for, return_inverse=True)
        index = to_device(asked, self._slab.device)
        slots = self._index.find(wanted)[places]
        rows, is_valid = self._slab.read(slots)
        # The step of the store says that there was one, and the reader alone cannot know it.
        answers = []
        for found, absent in ((rows, 0), (self._steps_at(slots, is_valid), -1)):
            whole = found.new_full((group_ids.size, *found.shape[1:]), absent)
            answers.append(whole.index_copy_(0, index, exchange.from_owners(route, found)))
        states, steps = answers
        self._stored_steps = lambda: steps
        return states, self._slab.native(steps >= 0)

    def _steps_at(self, slots: Ints, is_valid: Native) -> Tensor:
        """The step at which each slot was stored, int64 on the device; -1 without a valid state."""
        held = np.minimum(slots, self._slab.capacity - 1)  # the slot that stands for none is never valid
        steps = to_device(self._index.last_step[held], self._slab.device)
        return torch.where(torch.as_tensor(is_valid), steps, -1)

    def _send(
        self, exchange: OwnerExchange, group_ids: Ints, cell_index: Ints, is_last: Flags, states: Tensor
    ) -> tuple[Ints, Ints, Flags, Tensor]:
        """Send all that is stored to its owners; returns what this rank is to store."""
        known = np.flatnonzero(group_ids >= 0)
        ids = torch.from_numpy(np.stack([group_ids, cell_index, is_last], axis=1)[known])
        route = exchange.route(group_ids[known])
        groups, cells, lasts = exchange.to_owners(route, ids).numpy().T.copy()
        return groups, cells, lasts != 0, exchange.to_owners(route, states[to_device(known, states.device)])

    def _is_mine(self, groups: Ints) -> Flags:
        is_mine: Flags = owner_of(groups, self.owners.world_size) == self.owners.rank
        return is_mine


def _as_group_ids(values: Ints) -> Ints:
    """The ids as int64. Raises ValueError: an id that stands for no group and is not -1, such as a hash of 64 bits: its
    state would never be kept."""
    group_ids = np.ascontiguousarray(values, np.int64)
    if group_ids.min(initial=0) < -1:
        raise ValueError(f"group id {group_ids.min()}: must be -1 (no group) or in [0, 2^63)")
    return group_ids
