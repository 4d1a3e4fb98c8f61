"""The saved state of a mixing dataset: what must not change, and how the states of another world are taken up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainer.data.formats.documents import ReadOptions
from trainer.data.keyed import stable_hash
from trainer.data.mixing.epochs import BatchSizes, Chapter, RankCursor
from trainer.data.streams.layout import Stream
from trainer.data.streams.opener import CutOptions
from trainer.errors import UserError

VERSION = 2
State = Mapping[str, Any]


def fingerprint(streams: Sequence[Stream], options: ReadOptions, cut: CutOptions, **settings: object) -> dict[str, Any]:
    """Everything that must be the same for a state to fit: how files are read and cut, and the list of streams."""
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


def fixed_state(
    fingerprint: dict[str, Any], rank: int, world_size: int, num_streams_mixed: int, sizes: BatchSizes
) -> dict[str, Any]:
    """The part of a state that stays the same all through a run."""
    return {
        "version": VERSION,
        "fingerprint": fingerprint,
        "rank": rank,
        "world_size": world_size,
        "num_streams_mixed": num_streams_mixed,
        "batch_size": sizes.default,
        "batch_size_by_modality": dict(sizes.by_modality),
    }


def check_states(states: Sequence[State], expected: Mapping[str, Any]) -> None:
    """Raise UserError, naming what differs, unless the states were saved by a dataset with this fingerprint.

    `states` are those of one world, in rank order.
    """
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
            raise UserError(name, f"the saved state does not fit: {found}", "set it back, or start without this state")
        if len(states) > 1 and (state["rank"] != rank or state["world_size"] != len(states)):
            raise UserError(
                name,
                f"state {rank} of {len(states)} was saved by rank {state['rank']} of {state['world_size']}",
                "give the states of all ranks of one checkpoint, in rank order",
            )


def _cursor(state: State) -> RankCursor:
    return RankCursor(state["queue_index"], tuple((stream, picks) for stream, picks in state["pool"]))


def _sizes(state: State) -> BatchSizes:
    return BatchSizes(state["batch_size"], state["batch_size_by_modality"])


def is_same_layout(state: State, world_size: int, num_streams_mixed: int, batch_sizes: BatchSizes) -> bool:
    """Whether a state's cursors hold as they are: same world size, pool size and batch sizes."""
    return (
        state["world_size"] == world_size
        and state["num_streams_mixed"] == num_streams_mixed
        and _sizes(state) == batch_sizes
    )


def chapters_from(state: State) -> dict[int, list[Chapter]]:
    """The chapters that a state carries, by epoch."""
    return {epoch: [Chapter.from_state(each) for each in chapters] for epoch, chapters in state["chapters"]}


def chapters_to(chapters: Mapping[int, Sequence[Chapter]]) -> list[list[Any]]:
    """The chapters as plain python, for a state."""
    return [[epoch, [part.to_state() for part in parts]] for epoch, parts in chapters.items()]


def next_chapters(states: Sequence[State], num_streams: int, *, shared: bool) -> tuple[int, dict[int, list[Chapter]]]:
    """Close the world that saved `states`.

    Ranks that pick alone may stand in different epochs: the run goes on in the earliest, where a rank that is ahead
    has read its whole part, and in the later ones a rank that is behind has read nothing.

    Returns:
        The epoch to go on in, and the chapters by epoch, the closed world's included.
    """
    kept = states[:1] * states[0]["world_size"] if shared else states
    # A rank to which no cell falls never leaves its epoch: it says nothing about where the run is.
    epochs = [state["epoch"] for state in kept if not state["is_barren"]]
    chapters: dict[int, list[Chapter]] = {}
    for state in kept:
        chapters.update(chapters_from(state))
    chapters = {epoch: parts for epoch, parts in chapters.items() if epoch >= min(epochs)}
    for epoch in range(min(epochs), max(epochs) + 1):
        cursors = []
        for state in kept:
            if state["epoch"] == epoch:
                cursors.append(_cursor(state))
            else:
                cursors.append(RankCursor(num_streams if state["epoch"] > epoch else 0, ()))
        chapters[epoch] = [*chapters.get(epoch, []), Chapter(_sizes(states[0]), tuple(cursors))]
    return min(epochs), chapters
