"""The saved state of a source: what must match for it to fit, and how an epoch continues on another number of shards.

An epoch that runs on one number of shards from its beginning is a keyed permutation. When a run continues on another one in
the middle of an epoch, the cursors of the old shards are kept as a point of it, and what they left is dealt anew. Points hold
cursors only, are dropped at the end of the epoch, and may follow one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainer.data.documents import ReadOptions
from trainer.data.groups import CutOptions
from trainer.data.layout import Stream
from trainer.errors import UserError
from trainer.hashing import stable_hash

Cursor = list[Any]
"""`[parts taken from the queue, [[stream, how far it was read...] of each active reader]]`, of one shard in one epoch."""
Point = list[Cursor]  # the cursors of all shards when their number changed in the middle of an epoch
State = Mapping[str, Any]


def fingerprint(streams: Sequence[Stream], options: ReadOptions, cut: CutOptions, **settings: object) -> dict[str, Any]:
    """Everything that must match for a state to fit: how files are read and cut, and the list of streams."""
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
    """Raise UserError unless a dataset like the `own` saved the states, those of one world in rank order."""
    expected = own["fingerprint"]
    name = str(expected["namespace"])
    are_known = bool(states) and all(
        isinstance(each, Mapping) and each.get("version") == own["version"] for each in states
    )
    ranks = [(state["rank"], state["world_size"]) for state in states] if are_known else []
    if not are_known or (len(states) > 1 and ranks != [(rank, len(states)) for rank in range(len(states))]):
        problem = "these are not the states that all ranks of a dataset of this version saved, in rank order"
        raise UserError(name, problem, "load those of one checkpoint")
    for saved in (state["fingerprint"] for state in states):
        if differing := [key for key in expected if saved.get(key) != expected[key]]:
            found = ", ".join(f"{key} was {saved.get(key)!r} and is {expected[key]!r}" for key in differing)
            problem = f"the saved state does not fit: {found}"
            raise UserError(name, problem, "restore the old value, or start without this state")


def resharded(states: Sequence[Mapping[str, Any]], num_parts: Sequence[int]) -> tuple[int, dict[int, list[Point]]]:
    """The epoch to continue in, the earliest of any shard, and the points of it and later ones.

    There, a shard that is ahead has taken its whole part; in later epochs, one that is behind has taken nothing.
    """
    # A shard without any group stays in its first epoch: it does not tell where the run is.
    going = [state["epoch"] for state in states if state["pool"] or not state["is_ended"]] or [states[0]["epoch"]]
    points: dict[int, list[Point]] = {}
    for state in states:
        points |= {epoch: list(parts) for epoch, parts in state["points"] if epoch >= min(going)}
    for epoch in range(min(going), max(going) + 1):
        cursors: Point = []
        for state, number in zip(states, num_parts, strict=True):
            if state["epoch"] == epoch:
                cursors.append([state["index"], state["pool"]])
            else:
                cursors.append([number if state["epoch"] > epoch else 0, []])
        points[epoch] = [*points.get(epoch, []), cursors]
    return min(going), points
