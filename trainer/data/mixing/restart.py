"""Continues a saved mixing state on changed files: some streams begin again, some are new, some are gone.

A changed data set is a reshard: the epoch's rest is planned from how far each stream was read. Streams that did not change
keep their past reads, so nothing of them is read twice or lost; the others have none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from trainer.data.keyed import keyed_generator
from trainer.data.mixing.dataset import StreamMixingDataset
from trainer.data.mixing.epochs import EpochOrder, QueueKey, RankCursor, ReshardPoint
from trainer.data.mixing.state import State, points_to_state, reshard


def restart_streams(
    states: Sequence[State], before: Sequence[str], dataset: StreamMixingDataset, restarted: Collection[str]
) -> list[dict[str, Any]]:
    """The states of a world that continues where another stopped, with changed files.

    Args:
        states: of all ranks of the world that stopped, in rank order.
        before: relative paths of its streams, by stream id.
        dataset: one that has read nothing, of the streams as they are now.
        restarted: relative paths of the streams that are read from their beginning. New ones always are.

    Returns:
        States to load into `dataset`, in rank order.
    """
    saved, fresh = states[0], dataset.state_dict()
    fingerprint = saved["fingerprint"]
    shared = fingerprint["batching_mode"] == "per_stream"
    old = QueueKey(fingerprint["namespace"], fingerprint["seed"], len(before), shared)
    new = replace(old, num_streams=len(dataset.streams))
    epoch, points = reshard(states, len(before), shared=shared)
    kept = {path: old for old, path in enumerate(before) if path not in restarted}
    old_ids = [kept.get(stream.relative_path) for stream in dataset.streams]
    generator = keyed_generator("restart", old.name, old.seed, epoch, len(points[epoch]))
    order: list[int] = generator.permutation(len(old_ids)).tolist()
    rewritten = {
        at: [_with_ids(old, new, at, parts[: number + 1], old_ids, order) for number in range(len(parts))]
        for at, parts in points.items()
    }
    common = {
        "fingerprint": {**fingerprint, "streams": fresh["fingerprint"]["streams"]},
        "epoch": epoch,
        "batch_index": max(state["batch_index"] for state in states),
        "queue_index": 0,
        "turn": 0,
        "is_barren": False,
        "pool": [],
        "observed": fresh["observed"],
        "chapters": points_to_state(rewritten),
    }
    return [{**state, **common} for state in states]


def _with_ids(
    old: QueueKey,
    new: QueueKey,
    epoch: int,
    points: Sequence[ReshardPoint],
    old_ids: Sequence[int | None],
    order: Sequence[int],
) -> ReshardPoint:
    """The last of `points` for other stream ids, with every unfinished stream listed as active.

    The old queues are permutations of the old ids: cursors into them mean nothing for the new ones. A stream of which
    nothing was read is active with no picks.

    Args:
        old_ids: the old id of each stream; None: it begins anew.
        order: the new ids in the order in which streams follow.
    """
    past, world_size = points[-1].cursors, len(points[-1].cursors)
    before = EpochOrder(old, epoch, points[:-1])
    waiting = [set(before.of_rank(rank)[cursor.queue_index :]) for rank, cursor in enumerate(past)]
    active = [dict(cursor.active) for cursor in past]
    cursors = []
    for rank in range(world_size):
        begun: list[tuple[int, int]] = []
        unread: list[tuple[int, int]] = []
        for stream in order:
            known = old_ids[stream]
            if known is None:
                unread.append((stream, 0))
                continue
            # Which rank reads a slice depends on the stream's id: this rank continues what another one began.
            reader = (rank - new.turns[stream] + old.turns[known]) % world_size
            if known in active[reader]:
                begun.append((stream, active[reader][known]))
            elif known in waiting[reader]:
                unread.append((stream, 0))
        cursors.append(RankCursor(len(old_ids), (*begun, *unread)))
    return replace(points[-1], cursors=tuple(cursors))
