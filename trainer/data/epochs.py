"""The saved state of a source: whether it fits, and how an epoch continues on other shards.

An epoch that runs on one number of shards from its beginning is a keyed permutation. When a run
continues on another one in the middle of an epoch, the cursors of the old shards are kept as a point
of it, and the rest is dealt anew. Points are dropped at the end of the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainer.data.documents import ReadOptions
from trainer.data.groups import CutOptions
from trainer.data.layout import Stream
from trainer.errors import UserError
from trainer.hashing import stable_hash

Cursor = list[Any]
"""Of a shard in an epoch: `[parts taken from the queue, [[stream, how far it was read...], ...]]`."""
Point = list[Cursor]  # of all shards, when their number changed in the middle of an epoch
State = Mapping[str, Any]


def fingerprint(streams: Sequence[Stream], options: ReadOptions, cut: CutOptions, **settings: object) -> dict[str, Any]:
    """Everything that must match for a state to fit: how files are read and cut, and which."""
    paths = [part for stream in streams for part in (stream.relative_path, stream.modality)]
    tokenizer = options.tokenizer
    # A column or an end that is not set stands in no state of earlier versions.
    unset = (("column", None), ("text_eod", None))
    read = {key: value for key, value in vars(options).items() if (key, value) not in unset}
    return {
        **asdict(cut),
        **settings,
        **read,
        "tokenizer": f"{tokenizer.name} ({tokenizer.vocab_size} ids)",
        "streams": f"{len(streams)} streams, hash {stable_hash(*paths):016x}",
    }


def check_states(states: Sequence[State], own: State) -> None:
    """Raise UserError unless a dataset like the `own` saved the states, in rank order."""
    expected = own["fingerprint"]
    name = str(expected["namespace"])
    version, known = own["version"], [state for state in states if isinstance(state, Mapping)]
    known = [state for state in known if state.get("version") == version]
    ranks = [(state["rank"], state["world_size"]) for state in known]
    all_ranks = [(rank, len(states)) for rank in range(len(states))]
    # One state alone may be that of any rank.
    if not ranks or (ranks != all_ranks and len(states) > 1):
        problem = "these are not the states that all ranks of a dataset of this version saved, "
        raise UserError(name, f"{problem}in rank order", "load those of one checkpoint")
    for saved in (state["fingerprint"] for state in states):
        found = []
        for key, value in expected.items():
            if saved.get(key) != value:
                found.append(f"{key} was {saved.get(key)!r} and is {value!r}")
        if found:
            problem = f"the saved state does not fit: {', '.join(found)}"
            raise UserError(name, problem, "restore the old value, or start without this state")


def resharded(states: Sequence[State], num_parts: Callable[[int, int], int]) -> tuple[int, dict[int, list[Point]]]:
    """The epoch to continue in, the earliest of any shard, and the points of it and later ones.

    `num_parts`: of an epoch, for a shard. There, a shard that is ahead has taken its whole part, one that is behind nothing.
    """
    # A shard without any group stays in its first epoch: it does not tell where the run is.
    epochs = [state["epoch"] for state in states if state["pool"] or not state["is_ended"]]
    first, last = min(epochs, default=states[0]["epoch"]), max(epochs, default=states[0]["epoch"])
    points: dict[int, list[Point]] = {}
    for state in states:
        points |= {epoch: list(parts) for epoch, parts in state["points"] if epoch >= first}
    for epoch in range(first, last + 1):
        cursors: Point = []
        for shard, state in enumerate(states):
            if state["epoch"] == epoch:
                cursors.append([state["index"], state["pool"]])
            elif state["epoch"] > epoch:
                cursors.append([num_parts(epoch, shard), []])
            else:
                cursors.append([0, []])
        points[epoch] = [*points.get(epoch, []), cursors]
    return first, points
