"""Continues a saved mixing state on changed files: some streams begin again, some are new, some are gone.

A changed data set is a reshard: the epoch's rest is planned from how far each stream was read. Streams that did not change
keep their past reads, so nothing of them is read twice or lost; the others have none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainer.data.keyed import keyed_generator
from trainer.data.mixing.dataset import StreamMixingDataset
from trainer.data.mixing.epochs import QueueKey, RankCursor, ReshardPoint
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
    key = QueueKey(fingerprint["namespace"], fingerprint["seed"], len(before), shared)
    epoch, points = reshard(states, len(before), shared=shared)
    kept = {path: old for old, path in enumerate(before) if path not in restarted}
    old_ids = [kept.get(stream.relative_path) for stream in dataset.streams]
    generator = keyed_generator("restart", key.name, key.seed, epoch, len(points[epoch]))
    order: list[int] = generator.permutation(len(old_ids)).tolist()
    rewritten = {
        at: [_with_ids(key, at, parts[: number + 1], old_ids, order) for number in range(len(parts))]
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
    key: QueueKey, epoch: int, points: Sequence[ReshardPoint], old_ids: Sequence[int | None], order: Sequence[int]
) -> ReshardPoint:
    """The last of `points` for other stream ids, with every unfinished stream listed as active.

    The old queues are permutations of the old ids: cursors into them mean nothing for the new ones. A stream of which
    nothing was read is active with no picks.

    Args:
        old_ids: the old id of each stream; None: it begins anew.
        order: the new ids in the order in which unread streams follow.
    """
    cursors = []
    for rank, cursor in enumerate(points[-1].cursors):
        waiting = set(key.order(epoch, rank, points[:-1])[cursor.queue_index :])
        picks: Mapping[int, int] = {**dict.fromkeys(waiting, 0), **dict(cursor.active)}
        new_ids = {old: new for new, old in enumerate(old_ids) if old is not None}
        begun = [(new_ids[old], count) for old, count in cursor.active if old in new_ids]
        is_begun = {new for new, _ in begun}
        unread = [
            (new, 0)
            for new in order
            if new not in is_begun and ((old := old_ids[new]) is None or picks.get(old, -1) == 0)
        ]
        cursors.append(RankCursor(len(old_ids), (*begun, *unread)))
    return replace(points[-1], cursors=tuple(cursors))
