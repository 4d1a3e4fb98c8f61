"""The run that the fault tests break: two ranks on a small text corpus, with evaluation and checkpoints; and the record of
what was injected and lost, for the table in docs/reliability.md.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from tests.support.ranks import FAULTY, Ranks, checkpoint_differences
from tests.support.runs import ROOT, evaluating, overrides, read_rows, write_tiny_config
from trainer.metrics.catalog import is_known, lookup

RECORDS = ROOT / "build" / "faults"
LOST = "steps since the last checkpoint"
STEPS = 120
EXTRA = evaluating(10, batches=3, saves=5, keep_last=3)
ARGUMENTS = ("--steps", STEPS, *overrides(*FAULTY))
# Times are no state.
MEASURED = ("time/", "smoothed/tokens", "smoothed/step", "step_time", "tokens_per_sec", "checkpoint/")


def rows_of(run_dir: Path) -> dict[int, dict[str, float]]:
    """Step -> what is not a time."""
    rows = read_rows(run_dir / "metrics.jsonl").items()
    return {step: {key: value for key, value in row.items() if not key.startswith(MEASURED)} for (_, step), row in rows}


def make_config(directory: Path, extra: str = EXTRA) -> Path:
    """The config, with its corpus beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    return write_tiny_config(directory, extra)


def whole_run(
    config: Path, run_dir: Path, *more: object, world_size: int = 2, fault: Mapping[str, Any] | None = None
) -> Path:
    """The uninterrupted run that the others are compared with; or, with a stop as its fault, its beginning."""
    arguments = ("--config", config, "--run-dir", run_dir, *ARGUMENTS, *more)
    end_with(0, arguments, run_dir.with_suffix(".logs"), world_size=world_size, fault=fault)
    return run_dir


def end_with(code: int, arguments: Sequence[object], logs: Path, **options: Any) -> str:
    """Ranks that must all end with that code; gives what they said."""
    with Ranks(arguments, logs=logs, **options) as ranks:
        codes = ranks.wait()
        assert codes == [code] * len(codes), ranks.said()
        return ranks.said()


def assert_same(whole: Path, run_dir: Path, last: int) -> None:
    """The run has the rows, and at its last step the checkpoint, of the one that nobody touched."""
    assert row_differences(whole, run_dir) == []
    name = f"checkpoints/step_{last:08d}"
    assert checkpoint_differences(whole / name, run_dir / name) == []


def exactly(key: str) -> tuple[float, float]:
    return 0.0, 0.0


def row_differences(
    one: Path,
    other: Path,
    within: Callable[[str], tuple[float, float]] = exactly,
    *,
    but: tuple[str, ...] = MEASURED,
    after: int = 0,
) -> list[str]:
    """Numbers in the records of two run directories, after a step, that are not the same; times apart. `within`: how far a
    metric may be off, relative and absolute."""
    first, second = (
        {place: row for place, row in read_rows(path / "metrics.jsonl").items() if place[1] > after}
        for path in (one, other)
    )
    if first.keys() != second.keys():
        return [str(sorted(first.keys() ^ second.keys()))]
    found = []
    for place, row in first.items():
        for key in sorted(key for key in row.keys() | second[place].keys() if not key.startswith(but)):
            pair, (relative, absolute) = (row.get(key, math.nan), second[place].get(key, math.nan)), within(key)
            if not math.isclose(*pair, rel_tol=relative, abs_tol=absolute):
                found.append(f"{place} {key}: {pair[0]} and {pair[1]}")
    return found


def keep(promise: int, what: str, *, lost: str = "0", times: int = 1) -> None:
    """Write down a fault that a test has injected, once it has seen the promise of docs/reliability.md kept. `lost`: what a
    resume does not give back."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    row = {"promise": promise, "what": what, "times": times, "lost": lost}
    name = hashlib.sha256(what.encode()).hexdigest()[:16]
    (RECORDS / f"{name}.json").write_text(json.dumps(row, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


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
    how = "last" if key == "tokens_in_step" else lookup(key).window
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
    unlogged = (".unlogged", "gns.gauges.drained")
    return [line for line in found if not any(each in line for each in unlogged)]
