"""The saved state of a mixing dataset: what must match, and how it continues on another world or on changed files.

Changed files are a reshard: the rest of the epoch is planned from how far each stream was read. Streams that did not
change keep their past reads, so nothing of them is read twice or lost; the others have none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from trainer.data.documents import ReadOptions
from trainer.data.epochs import EpochOrder, QueueKey, ReshardPoint
from trainer.data.keyed import keyed_generator, stable_hash
from trainer.data.layout import Stream
from trainer.data.open_stream import CutOptions
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.data.mixing import StreamMixingDataset

VERSION = 3
State = Mapping[str, Any]


def fingerprint(streams: Sequence[Stream], options: ReadOptions, cut: CutOptions, **settings: object) -> dict[str, Any]:
    """Everything that must match for a state to fit: how files are read and cut, and the list of streams."""
    paths = [part for stream in streams for part in (stream.relative_path, stream.modality)]
    tokenizer = options.tokenizer
    return {
        **asdict(cut),
        **settings,
        "dtype": options.dtype,
        "eod": options.eod,
        "text_split": options.text_split,
        "tokenizer": f"{tokenizer.name} ({tokenizer.vocab_size} ids)",
        "streams": f"{len(streams)} streams, hash {stable_hash(*paths):016x}",
    }


def check_states(states: Sequence[State], own: State) -> None:
    """Raise UserError, naming the differences, unless a dataset like the `own` saved the states.

    `states` are those of one world, in rank order; `own` has at least this dataset's fingerprint.
    """
    expected = own["fingerprint"]
    name = str(expected["namespace"])
    fix = "give the states of all ranks of one checkpoint, in rank order"
    if not states or any(not isinstance(state, Mapping) or state.get("version") != VERSION for state in states):
        raise UserError(name, "no data state of a stream mixing dataset of this version to resume from", fix)
    for rank, state in enumerate(states):
        saved = state["fingerprint"]
        differing = [key for key in expected if saved.get(key) != expected[key]]
        if differing:
            found = ", ".join(f"{key} was {saved.get(key)!r} and is {expected[key]!r}" for key in differing)
            problem = f"the saved state does not fit: {found}"
            raise UserError(name, problem, "restore the old value, or start without this state")
        if len(states) > 1 and (state["rank"] != rank or state["world_size"] != len(states)):
            problem = f"state {rank} of {len(states)} was saved by rank {state['rank']} of {state['world_size']}"
            raise UserError(name, problem, fix)


def is_same_layout(state: State, own: State) -> bool:
    """Whether a state's cursors are valid as they are: same world size, pool size and batch sizes."""
    keys = ("world_size", "num_streams_mixed", "batch_size", "batch_size_by_modality")
    return all(state[key] == own[key] for key in keys)


def points_of(state: State) -> dict[int, list[ReshardPoint]]:
    """The reshard points in a state, by epoch. Their key there is `chapters`."""
    return {epoch: list(points) for epoch, points in state["chapters"]}


def reshard(states: Sequence[State], num_streams: int, *, shared: bool) -> tuple[int, dict[int, list[ReshardPoint]]]:
    """End the world that saved `states`, so that another can continue.

    Ranks that pick alone may be in different epochs: the run continues in the earliest one. There, a rank that is ahead
    has read its whole part; in the later epochs, a rank that is behind has read nothing.

    Returns:
        The epoch to continue in, and the reshard points by epoch, including those of the world that ended.
    """
    kept = states[:1] * states[0]["world_size"] if shared else states
    # A rank without any cells never leaves its epoch: it does not tell where the run is.
    epochs = [state["epoch"] for state in kept if not state["is_barren"]]
    points: dict[int, list[ReshardPoint]] = {}
    for state in kept:
        points.update(points_of(state))
    points = {epoch: parts for epoch, parts in points.items() if epoch >= min(epochs)}
    size, by_modality = kept[0]["batch_size"], kept[0]["batch_size_by_modality"]
    for epoch in range(min(epochs), max(epochs) + 1):
        cursors = []
        for state in kept:
            is_now = state["epoch"] == epoch
            index = state["queue_index"] if is_now else num_streams if state["epoch"] > epoch else 0
            cursors.append([index, state["pool"] if is_now else []])
        points[epoch] = [
            *points.get(epoch, []),
            ReshardPoint(batch_size=size, batch_size_by_modality=by_modality, cursors=cursors),
        ]
    return min(epochs), points


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
        "chapters": [list(each) for each in rewritten.items()],
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
    past = points[-1]["cursors"]
    before = EpochOrder(old, epoch, points[:-1])
    waiting = [set(before.of_rank(rank)[index:]) for rank, (index, _) in enumerate(past)]
    active = [dict(pairs) for _, pairs in past]
    cursors: list[list[Any]] = []
    for rank in range(len(past)):
        begun: list[list[int]] = []
        unread: list[list[int]] = []
        for stream in order:
            known = old_ids[stream]
            if known is None:
                unread.append([stream, 0])
                continue
            # Which rank reads a slice depends on the stream's id: this rank continues what another one began.
            reader = (rank - new.turns[stream] + old.turns[known]) % len(past)
            if known in active[reader]:
                begun.append([stream, active[reader][known]])
            elif known in waiting[reader]:
                unread.append([stream, 0])
        cursors.append([len(old_ids), [*begun, *unread]])
    return {**points[-1], "cursors": cursors}
