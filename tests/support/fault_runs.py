"""The run that the fault tests break: two ranks on a small text corpus, with evaluation and checkpoints; and the record of
what was injected and lost, for the table in docs/reliability.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.ranks import FAULTY, Ranks, checkpoint_differences
from tests.support.runs import ROOT, evaluating, overrides, read_rows, write_tiny_config

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


def row_differences(one: Path, other: Path) -> list[str]:
    """Numbers of the records of two run directories that are not the same; times apart."""
    first, second = (read_rows(path / "metrics.jsonl") for path in (one, other))
    if first.keys() != second.keys():
        return [str(sorted(first.keys() ^ second.keys()))]
    return [
        f"{key} {name}: {value} and {second[key].get(name)}"
        for key, row in first.items()
        for name, value in row.items()
        if not name.startswith(MEASURED) and second[key].get(name) != value
    ]


def keep(promise: int, what: str, *, lost: str = "0", times: int = 1) -> None:
    """Write down a fault that a test has injected, once it has seen the promise of docs/reliability.md kept. `lost`: what a
    resume does not give back."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    row = {"promise": promise, "what": what, "times": times, "lost": lost}
    name = hashlib.sha256(what.encode()).hexdigest()[:16]
    (RECORDS / f"{name}.json").write_text(json.dumps(row, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
