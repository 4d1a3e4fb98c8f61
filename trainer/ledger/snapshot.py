"""A ledger shard as plain tensors and numbers for a checkpoint, and back, for the same or another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.errors import UserError
from trainer.ledger.eviction import EVICTION_MODES
from trainer.ledger.ghosts import Ghost
from trainer.ledger.placement import Entries
from trainer.ledger.shard import LedgerShard
from trainer.ledger.slab import Ints

Flags = NDArray[np.bool_]
Shard = Mapping[str, Any]

FORMAT = 1


def save_shard(shard: LedgerShard, *, ownership: str, rank: int, world_size: int) -> dict[str, Any]:
    """Copy a shard into tensors, numbers and strings, which `torch.load(weights_only=True)` accepts."""
    slab, entries = shard.slab, shard.placement.entries()
    evicted = list(shard.placement.evicted())
    return {
        "format": FORMAT,
        "ownership": ownership,
        "rank": rank,
        "world_size": world_size,
        "capacity": slab.capacity,
        "width": slab.width,
        "step": -1 if shard.step is None else shard.step,
        "slots": torch.from_numpy(entries.slots),
        "groups": torch.from_numpy(entries.groups),
        "last_step": torch.from_numpy(entries.last_step),
        "rows": slab.read(entries.slots).cpu(),
        "free_slots": torch.from_numpy(entries.free_slots),
        "evicted_groups": torch.tensor([group for group, _ in evicted], dtype=torch.int64),
        "evicted_modes": torch.tensor([EVICTION_MODES.index(ghost.mode) for _, ghost in evicted], dtype=torch.int64),
        "evicted_steps": torch.tensor([ghost.step for _, ghost in evicted], dtype=torch.int64),
    }


def load_shards(
    shard: LedgerShard,
    saved: Sequence[Shard],
    *,
    ownership: str,
    rank: int,
    world_size: int,
    keeps: Callable[[Ints], Flags] | None,
) -> None:
    """Fill `shard` from the shards of a checkpoint; see `Ledger.load_state_dict`."""
    for other in saved:
        if other["format"] != FORMAT:
            problem = f"checkpoint format must be {FORMAT}, got {other['format']}"
            raise UserError("ledger", problem, "resume with the version that saved it")
        if other["width"] != shard.slab.width:
            raise UserError(
                "ledger",
                f"the checkpoint's states are {other['width']} wide, the model's {shard.slab.width}",
                "resume with the model that was saved, or drop the ledger from the checkpoint",
            )
    shard.step = max((int(other["step"]) for other in saved if other["step"] >= 0), default=None)
    own = saved[rank] if len(saved) == world_size else None
    if own is not None and (own["ownership"], own["capacity"], own["world_size"]) == (
        ownership,
        shard.slab.capacity,
        world_size,
    ):
        _fill_exactly(shard, own)
    else:
        _fill_anew(shard, saved, keeps)


def _fill_exactly(shard: LedgerShard, own: Shard) -> None:
    entries = Entries(*(own[name].numpy() for name in ("groups", "slots", "last_step", "free_slots")))
    shard.placement.fill(entries, _ghosts(own))
    shard.slab.write(entries.slots, own["rows"].to(shard.slab.device, shard.slab.dtype))


def _fill_anew(shard: LedgerShard, saved: Sequence[Shard], keeps: Callable[[Ints], Flags] | None) -> None:
    groups = _joined(saved, "groups").numpy()
    last_step = _joined(saved, "last_step").numpy()
    # Oldest first, and of a group that several shards hold only the newest entry.
    order = np.argsort(last_step, kind="stable")
    _, from_end = np.unique(groups[order][::-1], return_index=True)
    order = order[np.sort(order.size - 1 - from_end)]
    if keeps is not None:
        order = order[keeps(groups[order])]
    if order.size > shard.slab.capacity:
        raise UserError(
            "ledger.capacity",
            f"must hold the checkpoint's {order.size} groups, got {shard.slab.capacity}",
            f"set it to at least {order.size}",
        )
    slots, capacity = np.arange(order.size), shard.slab.capacity
    groups = groups[order]
    evicted = sorted((ghost for other in saved for ghost in _ghosts(other)), key=lambda item: item[1].step)
    held = set(groups.tolist())
    newest = {item[0]: item for item in evicted if item[0] not in held}
    evicted = [item for item in evicted if newest.get(item[0]) is item]
    if keeps is not None:
        is_kept = keeps(np.array([group for group, _ in evicted], np.int64))
        evicted = [item for item, kept in zip(evicted, is_kept, strict=True) if kept]
    free_slots = np.arange(capacity - 1, order.size - 1, -1)
    shard.placement.fill(Entries(groups, slots, last_step[order], free_slots), evicted)
    rows = _joined(saved, "rows")[torch.from_numpy(order)]
    shard.slab.write(slots, rows.to(shard.slab.device, shard.slab.dtype))


def _ghosts(saved: Shard) -> list[tuple[int, Ghost]]:
    columns = (saved[key].tolist() for key in ("evicted_groups", "evicted_modes", "evicted_steps"))
    return [(group, Ghost(EVICTION_MODES[mode], step)) for group, mode, step in zip(*columns, strict=True)]


def _joined(saved: Sequence[Shard], key: str) -> Tensor:
    return torch.cat([other[key] for other in saved])
