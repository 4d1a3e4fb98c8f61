"""What `train ls` shows: every run below some directories, with its state and what the numbers so far say of it."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from trainer.diagnostics.diagnose import diagnose
from trainer.errors import UserError
from trainer.fitted_table import Column, fitted_table, needed_width
from trainer.runs.load import RunRecord, load_run

COLOURS = {"running": "cyan", "done": "green", "stopped": "yellow", "failed": "red", "died": "red", "unknown": "dim"}
VERDICT_COLOURS = {"healthy": "green"}
PLAIN_WIDTH = 130
SHOWN_REASON = 80
MINUTE, HOUR, DAY = 60, 3600, 86400


@dataclass(frozen=True)
class Entry:
    """One run.

    Args:
        state: as status.json says it; `died` where it says running and no process of this machine holds the directory.
        step, steps: the last logged step, and how many the run is to have; None where it is not known.
        loss, eval_loss: the last logged values.
        age_sec: since the run last wrote a number, or its state if it has none.
        verdict: what the rules of `train diagnose` say: `healthy`, or the names of the findings.
        reason: why the run ended, as status.json says it; None where it has none.
    """

    run: str
    state: str
    step: int | None
    steps: int | None
    loss: float | None
    eval_loss: float | None
    age_sec: float | None
    verdict: str | None
    reason: str | None = None


def list_runs(paths: Sequence[str], *, now: float, as_json: bool, diagnoses: bool) -> None:
    """Print the runs, the newest last.

    Raises:
        UserError: a path does not exist, or there is no run below any.
    """
    entries = sorted(
        (entry_of(path, now=now, diagnoses=diagnoses) for path in find_runs(paths)),
        key=lambda entry: -(entry.age_sec if entry.age_sec is not None else float("inf")),
    )
    if not entries:
        raise UserError(", ".join(paths), "holds no run", "train --config x.toml makes one in runs/")
    if as_json:
        typer.echo(json.dumps([asdict(entry) for entry in entries], indent=2))
        return
    columns = _columns(entries, diagnoses=diagnoses)
    # A name must be there in one piece, to be copied; a pipe is as wide as that takes.
    plain = max(PLAIN_WIDTH, needed_width(columns))
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else plain)
    console.print(fitted_table(columns, width=console.width, hint="; --json has all"))


def find_runs(paths: Sequence[str]) -> list[Path]:
    """The directories that are runs: the paths themselves, or what lies directly in them.

    Raises:
        UserError: a path does not exist.
    """
    found: list[Path] = []
    for given in map(Path, paths):
        if not given.is_dir():
            raise UserError(str(given), "is no directory", "name a directory of runs, such as runs/")
        inside = sorted(path for path in given.iterdir() if path.is_dir())
        found += [path for path in (given, *inside) if _is_run(path)]
    return list(dict.fromkeys(found))


def _is_run(path: Path) -> bool:
    return (path / "status.json").is_file() or (path / "metrics.jsonl").is_file()


def entry_of(path: Path, *, now: float, diagnoses: bool) -> Entry:
    """What the files of one run say. A run that has no number yet, or a damaged record, still has its entry."""
    status = _status(path)
    state = str(status.get("state", "unknown"))
    if state == "running" and not _is_held(path):
        state = "died"
    try:
        run = load_run(path)
    except UserError as error:
        verdict = (
            None if "has no rows" in error.message or "has no metrics.jsonl" in error.message else "record unreadable"
        )
        age = _age(path, now)
        return Entry(str(path), state, status.get("last_step"), None, None, None, age, verdict, _reason(status))
    steps = run.setting("train.steps")
    return Entry(
        run=str(path),
        state=state,
        step=run.steps[-1] if run.steps else None,
        steps=steps if isinstance(steps, int) else None,
        loss=_last(run, "loss"),
        eval_loss=_last(run, "eval_loss"),
        age_sec=max(now - (path / "metrics.jsonl").stat().st_mtime, 0.0),
        verdict=verdict_of(run) if diagnoses else None,
        reason=_reason(status),
    )


def _reason(status: dict[str, Any]) -> str | None:
    return str(status["reason"]) if status.get("reason") else None


def _age(path: Path, now: float) -> float | None:
    """Seconds since the state of a run without numbers was written, or else its empty record."""
    for name in ("status.json", "metrics.jsonl"):
        if (path / name).is_file():
            return max(now - (path / name).stat().st_mtime, 0.0)
    return None


def verdict_of(run: RunRecord) -> str:
    """`healthy`, or the names of what `train diagnose` finds."""
    diagnosis = diagnose(run)
    return "healthy" if diagnosis.is_healthy else ", ".join(ruling.rule.name for ruling in diagnosis.findings)


def _status(path: Path) -> dict[str, Any]:
    try:
        status = json.loads((path / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def _is_held(path: Path) -> bool:
    """Whether a process holds the run's lock. One on another machine is seen only where the file system shares locks."""
    try:
        descriptor = os.open(path / ".lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _last(run: RunRecord, key: str) -> float | None:
    values = run.column(key)[1]
    return values[-1] if values else None


def _columns(entries: Sequence[Entry], *, diagnoses: bool) -> list[Column]:
    states = [f"[{COLOURS.get(entry.state, 'dim')}]{escape(entry.state)}[/]" for entry in entries]
    columns = [
        Column("run", [escape(entry.run) for entry in entries]),
        Column("state", states),
        Column("step", [_steps(entry) for entry in entries], "right", leave_out=1),
        Column("loss", [_number(entry.loss) for entry in entries], "right", leave_out=2),
        Column("eval", [_number(entry.eval_loss) for entry in entries], "right", leave_out=4),
        Column("age", [age_text(entry.age_sec) for entry in entries], "right", leave_out=3),
    ]
    if diagnoses:
        columns.append(Column("verdict", [_verdict(entry) for entry in entries], leave_out=1, wraps=True))
    return columns


def _verdict(entry: Entry) -> str:
    verdict = entry.verdict or "-"
    if entry.state == "failed" and entry.reason is not None:  # why it failed says more than what was seen before
        shown = textwrap.shorten(entry.reason, SHOWN_REASON, placeholder=" ...")
        verdict = shown if entry.verdict is None else f"{entry.verdict}: {shown}"
    return f"[{VERDICT_COLOURS.get(verdict, 'yellow')}]{escape(verdict)}[/]"


def _steps(entry: Entry) -> str:
    if entry.step is None:
        return "-"
    return f"{entry.step:,}/{entry.steps:,}" if entry.steps is not None else f"{entry.step:,}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def age_text(seconds: float | None) -> str:
    """`45 s`, `12 min`, `3 h`, `4 d`; `-` where it is not known."""
    if seconds is None:
        return "-"
    for size, unit in ((DAY, "d"), (HOUR, "h"), (MINUTE, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
