"""A rank's shard as plain tensors for a checkpoint, and back, for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trainer.arrays import Flags, Ints
from trainer.errors import UserError
from trainer.ledger.index import EVICTION_MODES, Evicted, GroupIndex
from trainer.ledger.slab import Slab
from trainer.metrics.logger import get_logger

logger = get_logger(__name__)
Shard = Mapping[str, Any]
Keeps = Callable[[Ints], Flags] | None
"""Which groups a rank takes; None: all."""

FORMAT = 1
ARRAYS = ("groups", "slots", "last_step", "free_slots")
TOO_SMALL = (
    "ledger.capacity: %d holds %s, but not the %d that may be in flight beside them: "
    "states that are still needed may be evicted; set it to at least %d"
)


def save_shard(index: GroupIndex, slab: Slab, *, step: int) -> dict[str, Any]:
    """Copy a shard but for its rows into what `torch.load(weights_only=True)` accepts."""
    slots = index.held_slots()
    groups, how = list(index.evicted), list(index.evicted.values())
    modes = [EVICTION_MODES.index(mode) for mode, _ in how]
    return {
        "format": FORMAT,
        "capacity": slab.capacity,
        "width": slab.width,
        "dtype": slab.dtype,
        "step": step,
        "slots": torch.from_numpy(slots),
        "groups": torch.from_numpy(index.group_of[slots]),
        "last_step": torch.from_numpy(index.last_step[slots]),
        "valid": slab.are_valid(slots).cpu(),
        "free_slots": torch.from_numpy(index.free_slots()),
        "evicted_groups": torch.tensor(groups, dtype=torch.int64),
        "evicted_modes": torch.tensor(modes, dtype=torch.int64),
        "evicted_steps": torch.tensor([at for _, at in how], dtype=torch.int64),
    }


def check_shards(saved: Sequence[Shard], slab: Slab) -> None:
    """Refuse shards of another format or width, or whose groups were not held by their readers."""
    for shard in saved:
        if shard.get("ownership") == "exchange" and shard["world_size"] > 1:
            problem = f'its states were dealt to {shard["world_size"]} ranks by ownership = "exchange", which is gone'
            raise UserError("ledger", problem, "begin a run with its weights ([model] weights)")
        if shard["format"] != FORMAT:
            problem = f"checkpoint format must be {FORMAT}, got {shard['format']}"
            raise UserError("ledger", problem, "resume with the version that saved it")
        if shard["width"] != slab.width:
            problem = f"the checkpoint's states are {shard['width']} wide, the model's {slab.width}"
            fix = "resume with the model that was saved, or drop the ledger from the checkpoint"
            raise UserError("ledger", problem, fix)


def load_as_saved(index: GroupIndex, slab: Slab, own: Shard) -> None:
    """Fill index and slab from one shard of the same capacity, in the same slots."""
    groups, slots, last_step, free = (own[name].numpy() for name in ARRAYS)
    index.fill((groups, slots, last_step), free, _evicted(own))
    _restore_rows(slab, slots, own, np.arange(slots.size))


def load_anew(index: GroupIndex, slab: Slab, saved: Sequence[Shard], *, keeps: Keeps, room: int) -> None:
    """Fill index and slab from any shards, see `Ledger.load_shards`."""
    groups = torch.cat([shard["groups"] for shard in saved]).numpy()
    last_step = torch.cat([shard["last_step"] for shard in saved]).numpy()
    # Oldest first, and of a group that several shards hold only the newest entry.
    order = np.argsort(last_step, kind="stable")
    _, from_end = np.unique(groups[order][::-1], return_index=True)
    order = order[np.sort(order.size - 1 - from_end)]
    if keeps is not None:
        order = order[keeps(groups[order])]
    needed, held = order.size + room, f"the checkpoint's {order.size} groups"
    if order.size > slab.capacity:
        problem = f"must hold {held}, got {slab.capacity}"
        raise UserError("ledger.capacity", problem, f"set it to at least {needed}")
    if needed > slab.capacity:
        logger.warning(TOO_SMALL, slab.capacity, held, room, needed)
    groups, slots = groups[order], np.arange(order.size)
    free = np.arange(slab.capacity - 1, order.size - 1, -1)
    evicted = _joined_evicted(saved, set(groups.tolist()), keeps)
    index.fill((groups, slots, last_step[order]), free, evicted)
    start = 0
    for shard in saved:
        places = order - start
        is_its_own = (places >= 0) & (places < len(shard["groups"]))
        _restore_rows(slab, slots[is_its_own], shard, places[is_its_own])
        start += len(shard["groups"])


def _restore_rows(slab: Slab, slots: Ints, shard: Shard, places: Ints) -> None:
    """Copy the rows at `places` of a shard into `slots`."""
    for piece in slab.pieces(slots.size):
        chosen = torch.from_numpy(places[piece])
        slab.restore(slots[piece], shard["rows"][chosen], shard["valid"][chosen])


def _joined_evicted(saved: Sequence[Shard], held: set[int], keeps: Keeps) -> list[tuple[int, Evicted]]:
    """The evicted groups of all shards that are not held, each by its newest eviction, oldest first."""
    by_step = sorted((item for shard in saved for item in _evicted(shard)), key=lambda item: item[1][1])
    newest = {group: evicted for group, evicted in by_step if group not in held}
    joined = sorted(newest.items(), key=lambda item: item[1][1])
    if keeps is None:
        return joined
    is_kept = keeps(np.array([group for group, _ in joined], np.int64))
    return [item for item, kept in zip(joined, is_kept, strict=True) if kept]


def _evicted(shard: Shard) -> list[tuple[int, Evicted]]:
    columns = (shard[f"evicted_{name}"].tolist() for name in ("groups", "modes", "steps"))
    return [(group, (EVICTION_MODES[mode], at)) for group, mode, at in zip(*columns, strict=True)]
