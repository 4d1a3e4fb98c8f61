"""The settings of a run by step: a resume may change them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.tools.runs.load import RunRecord


def settings_by_step(run: RunRecord) -> dict[str, Any]:
    """For each setting that a restart names as changed, its value for the rows that count.

    A mapping from the first step of each value to it, or the value itself where these rows have only one: a launch that
    trained no step changed nothing.
    """
    changes = [_changes(restart.details.get("changed")) for restart in run.restarts]
    if not any(changes):
        return {}
    attempts = run.train.attempts
    last, reached = len(run.restarts), run.status.get("last_step")
    if last and isinstance(reached, int) and reached > run.restarts[-1].global_step:
        attempts[reached] = last  # steps that it has trained, but not logged
    found: dict[str, Any] = {}
    for key in sorted({key for change in changes for key in change}):
        values = _values_of_launches(run, [change.get(key) for change in changes])
        by_step: dict[int, Any] = {}
        before = 0
        for step, attempt in sorted(attempts.items()):
            since, value = values[attempt]
            if not by_step and since:  # it begins as the branch of another run
                by_step[1] = values[0][1]
            if not by_step or value != next(reversed(by_step.values())):
                by_step[max(before, since) + 1] = value
            before = step
        found[key] = by_step if len(by_step) > 1 else next(iter(by_step.values()), values[-1][1])
    return found


def _values_of_launches(run: RunRecord, changes: list[tuple[Any, Any] | None]) -> list[tuple[int, Any]]:
    """(the step after which it holds, value) of one setting in the first launch and after each restart.

    A change is that from the checkpoint resumed from, whose value is the one in force at its step.
    """
    first = next(change for change in changes if change is not None)
    history = [(0, first[0])]
    values = list(history)
    for restart, change in zip(run.restarts, changes, strict=True):
        history = [history[0], *(entry for entry in history[1:] if entry[0] < restart.global_step)]
        if change is not None:
            history.append((restart.global_step, change[1]))
        values.append(history[-1])
    return values


def _changes(recorded: Any) -> dict[str, tuple[Any, Any]]:
    """(before, after) by key; of a damaged record what can be read."""
    items = recorded.items() if isinstance(recorded, Mapping) else ()
    pairs = ((key, pair) for key, pair in items if isinstance(pair, Mapping) and {"before", "after"} <= pair.keys())
    return {key: (pair["before"], pair["after"]) for key, pair in pairs}
