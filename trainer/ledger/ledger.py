"""`Ledger`: the recurrent states of groups between steps; docs/ledger.md has a loop that uses it.

Begin each step; for each micro-batch look up, run forward and backward, and store: outside `forward`,
which activation checkpointing runs twice. Nothing is ever undone: when the optimizer skips a step,
its weights are still valid, and the states computed with them are the right continuation. Only rows
that are not finite are dropped. That is decided on the device, so neither `lookup` nor `store` waits
for it (except inside the collectives of `exchange`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    *(f"ledger/evictions/{mode}" for mode in EVICTION_MODES),
    *(f"ledger/false_evictions/{mode}" for mode in EVICTION_MODES),
    "ledger/cold_starts",
    "ledger/refused_rows",
    "ledger_wipe_count",
)
"""Summed over the window and over ranks (the worst rank's count is `<key>_max`)."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
GAUGE_KEYS = ("ledger/live_groups", "ledger/fill_fraction")


def owner_of(group_ids: Ints, world_size: int) -> Ints:
    """The rank owning each group; plain modulo would follow the ids' strides."""
    return (splitmix64(group_ids) % np.uint64(world_size)).astype(np.int64)


class Route(NamedTuple):
    """Where the items of this rank go, and how many arrive from each rank."""

    order: Tensor  # item indices sorted by owner, int64 [n] on the exchange's device
    send_counts: list[int]
    receive_counts: list[int]


class OwnerExchange:
    """The all-to-all that takes ids and rows to their owners and brings answers back.

    Every rank must make each call, in the same order, also with nothing to send. `seconds` were
    spent in collectives so far.
    """

    def __init__(self, *, world_size: int, device: torch.device) -> None:
        self._world_size = world_size
        # gloo moves CPU tensors only: rows are copied to the CPU and back.
        self._wire = torch.device("cpu") if dist.get_backend() == "gloo" else device
        self.seconds = 0.0

    def route(self, group_ids: Ints) -> Route:
        """Exchange the number of items per pair of ranks: one collective."""
        owners = owner_of(group_ids, self._world_size)
        send = np.bincount(owners, minlength=self._world_size).astype(np.int64)
        ones = [1] * self._world_size
        received = self._all_to_all(torch.from_numpy(send).to(self._wire), ones, ones)
        order = torch.from_numpy(np.argsort(owners, kind="stable")).to(self._wire)
        return Route(order, send.tolist(), received.tolist())

    def to_owners(self, route: Route, items: Tensor) -> Tensor:
        """Send each of `items` [n, ...] to its owner; returns those sent here, by sending rank."""
        sorted_items = items.to(self._wire).index_select(0, route.order)
        received = self._all_to_all(sorted_items, route.send_counts, route.receive_counts)
        return received.to(items.device)

    def from_owners(self, route: Route, answers: Tensor) -> Tensor:
        """Send one answer per item received back; returns those to this rank's items, in order."""
        returned = self._all_to_all(answers.to(self._wire), route.receive_counts, route.send_counts)
        items = torch.empty_like(returned)
        items.index_copy_(0, route.order, returned)
        return items.to(answers.device)

    def _all_to_all(self, items: Tensor, send: list[int], receive: list[int]) -> Tensor:
        received = items.new_empty((sum(receive), *items.shape[1:]))
        began = time.perf_counter()
        dist.all_to_all_single(received, items.contiguous(), receive, send)
        self.seconds += time.perf_counter() - began
        return received


class Ledger:
    """The states of groups, one row each, held by the rank that owns the group.

    A state is a row of `state_width` numbers or, with a `layout` instead, any nest of tensors
    [B, ...]. `device` and `dtype` (None: that of the options) are those of the kept states.
    """

    metric_keys = (*COUNTER_KEYS, *GAUGE_KEYS)  # of `drain_metrics`, on every rank

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
        if (state_width is None) == (layout is None):
            raise TypeError("Ledger takes either state_width or layout")
        self._options = options
        self.owners = owners
        self._step = -1  # before the first
        self._stored_at = -1
        self._layout = layout
        width = state_width if layout is None else layout.width
        assert width is not None
        dtype = dtype or DTYPES[options.dtype]
        where = torch.device(device)
        self._slab = Slab(width=width, capacity=options.capacity, device=where, dtype=dtype)
        self._given_dtype = torch.promote_types(dtype, torch.float32)
        # Numbers, or tensors of the device where it alone knows them.
        self._counts: dict[str, Native] = dict.fromkeys(COUNTER_KEYS, 0)
        self._index = GroupIndex(options, self._counts)
        self._exchange: OwnerExchange | None = None
        if owners.ownership == "exchange" and owners.world_size > 1:
            self._exchange = OwnerExchange(world_size=owners.world_size, device=where)

    @property
    def is_collective(self) -> bool:
        """Whether `lookup` and `store` communicate: every rank must call them equally often."""
        return self._exchange is not None

    @property
    def exchange_sec(self) -> float:
        """Seconds spent so far in the collectives of `exchange`."""
        return 0.0 if self._exchange is None else self._exchange.seconds

    def begin_step(self, step: int) -> None:
        """Begin optimizer step `step`: wipe or sweep if due since the last step.

        Raises RuntimeError if `step` is before that of the last store.
        """
        # A step may begin again: a run that finds its data exhausted has begun steps without tokens.
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

    def lookup(self, group_ids: Ints, cell_index: Ints) -> Any:
        """The states from which a micro-batch's cells continue, [B, state_width]: a detached copy,
        in float32 or wider; with a layout the nest, each tensor in its own type.

        Zeros at the start of a group (cell 0), for group id -1, and where no state is held; the last
        is counted as a cold start. Raises ValueError if a group appears twice, or an id is neither
        -1 nor in [0, 2^63).
        """
        group_ids = _as_group_ids(group_ids)
        is_fresh = (np.ascontiguousarray(cell_index, np.int64) == 0) | (group_ids < 0)
        if self._exchange is None:
            slots = self._index.find(group_ids)
            slots[is_fresh] = self._slab.capacity
            states, is_valid = self._slab.read(slots)
        else:
            distinct(group_ids)
            asked = np.flatnonzero(~is_fresh)
            states, is_valid = self._fetch(self._exchange, group_ids, asked)
        num_found = self._slab.library.count_nonzero(is_valid)
        self._counts["ledger/cold_starts"] += np.count_nonzero(~is_fresh) - num_found
        states = states.to(self._given_dtype)
        return states if self._layout is None else self._layout.unflatten(states)

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
        """Copy the states after a micro-batch's cells ([B, state_width], or the nest).

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
        RuntimeError before the first step, ValueError for other shapes, or as `lookup`. Then nothing
        is changed; with `exchange`, on the rank that raises.
        """
        if self._step < 0:
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
            # Groups that ended within their row come first: they free slots, and have no state.
            ended = np.flatnonzero(group_ids != np.asarray(end_ids))
            end_ids = _as_group_ids(end_ids)
            end_cell_index = np.ascontiguousarray(end_cell_index, np.int64)
            if not end_ids.shape == end_cell_index.shape == group_ids.shape:
                raise ValueError(f"end_ids and end_cell_index must have the shape {list(group_ids.shape)}")
            is_last = np.concatenate([np.ones(ended.size, np.bool_), end_ids < 0])
            group_ids = np.concatenate([group_ids[ended], end_ids])
            cell_index = np.concatenate([cell_index[ended], end_cell_index])
            if ended.size:
                states = torch.cat([states[: ended.size], states])
        if self._exchange is not None:
            distinct(group_ids)
            group_ids, cell_index, is_last, states = self._send(self._exchange, group_ids, cell_index, is_last, states)
        is_kept = ~is_last & (group_ids >= 0)
        # Raises before it changes anything.
        slots = self._index.place(group_ids, cell_index, is_kept, self._step)
        if is_kept.any():
            self._stored_at = self._step
        slots[~is_kept] = self._slab.waste_slot
        self._counts["ledger/refused_rows"] += self._slab.write(slots, states)

    def keep(self, group_ids: Iterable[int]) -> None:
        """Let no sweep evict these groups, which wait for a row, until they are stored or end."""
        self._index.kept = set(group_ids)

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
        """This rank's shard, without the counters. States are in `held_rows` if not in "rows"."""
        shard = save_shard(self._index, self._slab, owners=self.owners, step=self._step)
        if with_rows:
            empty = torch.empty(0, self._slab.width, dtype=self._slab.dtype)
            shard["rows"] = torch.cat([empty, *self.held_rows()])
        return shard

    @property
    def num_row_bytes(self) -> int:
        return self._index.num_live * self._slab.width * self._slab.dtype.itemsize

    def held_rows(self) -> Iterator[Tensor]:
        """The states held, in pieces [n, state_width] of some megabytes, on the CPU."""
        slots = self._index.held_slots()
        for piece in self._slab.pieces(slots.size):
            yield self._slab.read(slots[piece])[0].cpu()

    def load_state_dict(
        self, shards: Sequence[Mapping[str, Any]], *, owned: Callable[[Ints], Flags] | None = None, room: int = 0
    ) -> None:
        """Replace the contents by those of a checkpoint; counters start at zero.

        `shards` are those of all saving ranks, in order. With the saved world size, capacity and
        ownership this rank takes its own exactly, including the order in which slots are used.
        Otherwise entries are distributed again: with `exchange` to their owners, with `reader` to
        the ranks whose `owned` (group ids -> bool) says so, without it to every rank; of a group
        that several shards hold, the state that was stored last. A capacity that does not also hold
        `room` groups in flight is warned about. If it raises a UserError, nothing is changed.
        """
        keeps = self._is_mine if self.owners.ownership == "exchange" else owned
        how: dict[str, Any] = {"owners": self.owners, "keeps": keeps, "room": room}
        self._step = load_shards(self._index, self._slab, shards, **how)
        self._stored_at = int(self._index.last_step.max(initial=-1))
        self.load_undrained({})

    def _fetch(self, exchange: OwnerExchange, group_ids: Ints, asked: Ints) -> tuple[Tensor, Native]:
        """Ask the owners for the states at positions `asked`; zeros, not valid, elsewhere."""
        route = exchange.route(group_ids[asked])
        asked_for = exchange.to_owners(route, torch.from_numpy(group_ids[asked])).numpy()
        # Several ranks may ask for one group.
        wanted, places = np.unique(asked_for, return_inverse=True)
        index = to_device(asked, self._slab.device)
        slots = self._index.find(wanted)[places]
        rows, is_valid = self._slab.read(slots)
        # Only the owner knows whether there was a state.
        answers = []
        for found in (rows, torch.as_tensor(is_valid).long()):
            whole = found.new_zeros((group_ids.size, *found.shape[1:]))
            answers.append(whole.index_copy_(0, index, exchange.from_owners(route, found)))
        states, are_held = answers
        return states, self._slab.native(are_held != 0)

    def _send(
        self, exchange: OwnerExchange, group_ids: Ints, cell_index: Ints, is_last: Flags, states: Tensor
    ) -> tuple[Ints, Ints, Flags, Tensor]:
        """Send all that is stored to its owners; returns what this rank is to store."""
        known = np.flatnonzero(group_ids >= 0)
        ids = torch.from_numpy(np.stack([group_ids, cell_index, is_last], axis=1)[known])
        route = exchange.route(group_ids[known])
        groups, cells, lasts = exchange.to_owners(route, ids).numpy().T.copy()
        rows = exchange.to_owners(route, states[to_device(known, states.device)])
        return groups, cells, lasts != 0, rows

    def _is_mine(self, groups: Ints) -> Flags:
        is_mine: Flags = owner_of(groups, self.owners.world_size) == self.owners.rank
        return is_mine


def _as_group_ids(values: Ints) -> Ints:
    """The ids as int64. Raises ValueError at a negative one that is not -1, such as a hash of 64
    bits: it would stand for no group, and its state would never be kept."""
    group_ids = np.ascontiguousarray(values, np.int64)
    if group_ids.min(initial=0) < -1:
        raise ValueError(f"group id {group_ids.min()}: must be -1 (no group) or in [0, 2^63)")
    return group_ids
