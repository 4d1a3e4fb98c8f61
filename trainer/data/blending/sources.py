"""Sources that a blend has no longer, or not now: their parts of its state."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

ALL_RANKS: Final = "states of all ranks"
"""The key of a source's part that holds those of every rank of the world that saved them."""


class UnreadSource:
    """A source of weight 0: nothing of it is opened, and its part of the state is kept for when it has a weight again."""

    def __init__(self) -> None:
        self._state: Any = None

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def state_dict(self) -> Any:
        """What was loaded."""
        return self._state

    def load_state_dict(self, state: Any) -> None:
        """Keep this rank's state; or those of all ranks, from a world of another size."""
        self._state = {ALL_RANKS: list(state)} if isinstance(state, list) else state


def parts_of(states: Sequence[Mapping[str, Any]], index: int) -> list[Any]:
    """A source's parts of the blend's states of all ranks."""
    parts = [state["sources"][index] for state in states]
    first = parts[0]
    return list(first[ALL_RANKS]) if isinstance(first, Mapping) and ALL_RANKS in first else parts


def without_sources(state: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A blend's state without some of its sources; the others continue where they are."""
    kept = [index for index, name in enumerate(state["names"]) if name not in names]
    lists = ("names", "ended", "counts", "expected", "sources")
    return {**state, **{key: [state[key][index] for index in kept] for key in lists}}
