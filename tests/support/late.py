"""Runs whose steps are read one step late, against the same run with every step logged, and so read at once."""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path
from typing import Any

from tests.support.fault_runs import MEASURED
from tests.support.ranks import checkpoint_differences
from tests.support.runs import read_rows
from trainer.metrics.catalog import is_known, lookup

# The first two are of the steps that are logged alone, by definition; the third is the worst rank's mean of all steps, which is
# not the mean of what the worst ranks had.
OWN = (*MEASURED, "gns/skipped", "stream_mixing/masked_share", "data/fill")


def said(run_dir: Path, name: str) -> str:
    """A file of a run, wherever that is."""
    return (run_dir / name).read_text(encoding="utf-8").replace(str(run_dir), "run")


def events(run_dir: Path) -> list[dict[str, Any]]:
    """events.jsonl without times."""
    lines = said(run_dir, "events.jsonl").splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "time"} for line in lines]


def combined(rows: list[dict[str, float]], key: str) -> float | None:
    """What the last of several rows would hold, had the others not been logged."""
    how = "last" if key.startswith(("tokens_in_step", "data/epochs/")) else lookup(key).window
    values = [row[key] for row in rows if key in row]
    return {"sum": sum, "max": max, "min": min}.get(how, itemgetter(-1))(values) if values else None


def row_differences_of_windows(every: Path, late: Path) -> list[str]:
    """Where the rows of `late` are not what the rows of `every`, which has all steps, come to."""
    rows, found = [read_rows(path / "metrics.jsonl") for path in (every, late)], []
    since = 0
    for (mode, step), row in rows[1].items():
        if mode == "eval":
            found += [f"eval {step}"] * (row != rows[0][mode, step])
            continue
        window = [rows[0]["train", at] for at in range(since + 1, step + 1)]
        since = step
        for key, value in row.items():
            base = key.removesuffix("_max")
            is_worst = base != key and is_known(base) and lookup(base).ranks == "sum_and_worst"
            if not key.startswith(OWN) and not is_worst and combined(window, key) != value:
                found.append(f"{step} {key}: {value}, not {combined(window, key)}")
    return found


def run_differences(every: Path, late: Path) -> list[str]:
    """Where a run that reads late differs from one that reads every step at once: rows, events, checkpoints, the end."""
    found = row_differences_of_windows(every, late)
    if events(every) != events(late):
        found.append(f"events: {events(every)} and {events(late)}")
    names = [sorted(path.name for path in (run / "checkpoints").glob("step_*")) for run in (every, late)]
    if names[0] != names[1]:
        return [*found, f"checkpoints: {names}"]
    for name in names[0]:
        found += checkpoint_differences(every / "checkpoints" / name, late / "checkpoints" / name)
    ends = [json.loads(said(run, "status.json")) for run in (every, late)]
    found += [f"status: {ends}" for key in ("state", "reason", "last_step") if ends[0][key] != ends[1][key]]
    # What was counted since the last logged step is in the checkpoint of the run that did not log it.
    unlogged = (".unlogged", "gns.gauges.drained", "tracker.epochs")
    return [line for line in found if not any(each in line for each in unlogged)]
