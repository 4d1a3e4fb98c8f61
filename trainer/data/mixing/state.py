"""The saved state of a mixing dataset: what must match, and how the states of another world are continued.

Saved states keep their key names from version to version: `chapters` holds the reshard points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainer.data.formats.documents import ReadOptions
from trainer.data.keyed import stable_hash
from trainer.data.mixing.epochs import BatchSizes, RankCursor, ReshardPoint
from trainer.data.streams.layout import Stream
from trainer.data.streams.open_stream import CutOptions
from trainer.errors import UserError

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
    if not states:
        raise UserError(name, "no data state to resume from", "give the states of all ranks, in rank order")
    for rank, state in enumerate(states):
        if not isinstance(state, Mapping) or state.get("version") != VERSION:
            problem = "the saved state is not one of a stream mixing dataset of this version"
            raise UserError(name, problem, "resume with the version that saved it")
        saved = state["fingerprint"]
        differing = [key for key in expected if saved.get(key) != expected[key]]
        if differing:
            found = ", ".join(f"{key} was {saved.get(key)!r} and is {expected[key]!r}" for key in differing)
            problem = f"the saved state does not fit: {found}"
            raise UserError(name, problem, "restore the old value, or start without this state")
        if len(states) > 1 and (state["rank"] != rank or state["world_size"] != len(states)):
            problem = f"state {rank} of {len(states)} was saved by rank {state['rank']} of {state['world_size']}"
            raise UserError(name, problem, "give the states of all ranks of one checkpoint, in rank order")


def _cursor(state: State) -> RankCursor:
    return RankCursor(state["queue_index"], tuple((stream, picks) for stream, picks in state["pool"]))


def _sizes(state: State) -> BatchSizes:
    return BatchSizes(state["batch_size"], state["batch_size_by_modality"])


def is_same_layout(state: State, own: State) -> bool:
    """Whether a state's cursors are valid as they are: same world size, pool size and batch sizes."""
    keys = ("world_size", "num_streams_mixed", "batch_size", "batch_size_by_modality")
    return all(state[key] == own[key] for key in keys)


def points_from_state(state: State) -> dict[int, list[ReshardPoint]]:
    """The reshard points in a state, by epoch."""
    return {epoch: [ReshardPoint.from_state(each) for each in points] for epoch, points in state["chapters"]}


def points_to_state(points: Mapping[int, Sequence[ReshardPoint]]) -> list[list[Any]]:
    """The inverse of `points_from_state`, as plain Python."""
    return [[epoch, [each.to_state() for each in parts]] for epoch, parts in points.items()]


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
        points.update(points_from_state(state))
    points = {epoch: parts for epoch, parts in points.items() if epoch >= min(epochs)}
    for epoch in range(min(epochs), max(epochs) + 1):
        cursors = []
        for state in kept:
            if state["epoch"] == epoch:
                cursors.append(_cursor(state))
            else:
                cursors.append(RankCursor(num_streams if state["epoch"] > epoch else 0, ()))
        points[epoch] = [*points.get(epoch, []), ReshardPoint(_sizes(states[0]), tuple(cursors))]
    return min(epochs), points
