"""`train ls`: every run below some directories, with its state and what diagnosis says of its numbers so far."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from trainer.cli.options import JsonOption
from trainer.cli.terminal import coloured, echo, output
from trainer.errors import UserError
from trainer.files import did_you_mean
from trainer.wording import counted

if TYPE_CHECKING:
    from trainer.tools.fitted_table import Column
    from trainer.tools.runs.load import RunRecord

SHOWN_REASON = 80
MINUTE, HOUR, DAY = 60, 3600, 86400


@dataclass(frozen=True)
class RunEntry:
    """One run.

    Args:
        state: as in status.json; `died` where that says running but the process is gone, `unknown` if it is another machine's.
        step, steps: the last step, which may be later than the last logged one, and the configured number; None where unknown.
        loss, eval_loss: the last logged values.
        age_sec: since the run last logged, or wrote its state if it has logged nothing.
        verdict: of `train diagnose`: `healthy`, the names of the findings, or `no finding by 2 of 27 rules`.
        reason: why the run ended, from status.json; None if that has none.
        changed: the settings that a resume changed.
    """

    run: str
    state: str
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    age_sec: float | None = None
    verdict: str | None = None
    reason: str | None = None
    changed: list[str] = field(default_factory=list)


def ls(
    paths: Annotated[
        list[str] | None, typer.Argument(help="Directories of runs, or runs [runs].", metavar="DIR...")
    ] = None,
    diagnose: Annotated[bool, typer.Option(help="Show the verdict of train diagnose.")] = True,
    as_json: JsonOption = False,
) -> None:
    """List runs, the newest last: state, step, loss, age and verdict."""
    from trainer.tools.fitted_table import fitted_table, needed_width

    given = paths or ["runs"]
    now = time.time()
    entries = sorted(
        (entry_of(path, now=now, diagnoses=diagnose) for path in find_runs(given)),
        key=lambda entry: -(entry.age_sec if entry.age_sec is not None else float("inf")),
    )
    if not entries:
        raise UserError(", ".join(given), "holds no run", "start one in runs/ with: train --config x.toml")
    if as_json:
        echo(json.dumps([asdict(entry) for entry in entries], indent=2))
        return
    columns = _columns(entries, diagnoses=diagnose)
    # Names are there to be copied: a pipe gets all columns without a line break in them.
    console = output(needed_width=needed_width(columns))
    console.print(fitted_table(columns, width=console.width, hint="; --json has all"))


def find_runs(paths: Sequence[str]) -> list[Path]:
    """The directories that are runs: the paths themselves, or their subdirectories.

    Raises:
        UserError: a path does not exist.
    """
    found: list[Path] = []
    for given in map(Path, paths):
        if not given.is_dir():
            fix = did_you_mean(given) or "name a directory of runs, such as runs/"
            raise UserError(str(given), "is not a directory", fix)
        inside = sorted(path for path in given.iterdir() if path.is_dir())
        found += [path for path in (given, *inside) if _is_run(path)]
    return list(dict.fromkeys(found))


def _is_run(path: Path) -> bool:
    return (path / "status.json").is_file() or (path / "metrics.jsonl").is_file()


def entry_of(path: Path, *, now: float, diagnoses: bool) -> RunEntry:
    """The entry of one run; one without numbers, or with a damaged record, has an entry too."""
    from trainer.metrics.run_status import run_state
    from trainer.tools.runs.load import load_run
    from trainer.tools.runs.settings import settings_by_step
    from trainer.tools.verbs.diagnosis import verdict_text

    status = run_state(path)
    state = str(status.get("state", "unknown"))
    entry = RunEntry(str(path), state, reason=str(status["reason"]) if status.get("reason") else None)
    try:
        run = load_run(path)
    except UserError as error:
        is_empty = "has no rows" in error.message or "has no metrics.jsonl" in error.message
        verdict = None if is_empty else "record unreadable"
        age_sec = _age(path, now, "status.json", "metrics.jsonl")
        return replace(entry, step=_last_step(status), age_sec=age_sec, verdict=verdict)
    steps = run.setting("train.steps")
    return replace(
        entry,
        step=_last_step(status, *run.steps[-1:]),
        steps=steps if isinstance(steps, int) else None,
        loss=_last(run, "loss"),
        eval_loss=_last(run, "eval_loss"),
        age_sec=_age(path, now, "metrics.jsonl"),
        verdict=verdict_text(run) if diagnoses else None,
        changed=[key for key, value in settings_by_step(run).items() if isinstance(value, dict)],
    )


def _last_step(status: dict[str, Any], *logged: int) -> int | None:
    """The later of status.json's step and the logged ones; rows are some steps apart."""
    step = status.get("last_step")
    return max([*logged, *([step] if isinstance(step, int) else [])], default=None)


def _age(path: Path, now: float, *names: str) -> float | None:
    """Seconds since the first of these files that exists was written."""
    for name in names:
        if (path / name).is_file():
            return max(now - (path / name).stat().st_mtime, 0.0)
    return None


def _last(run: RunRecord, key: str) -> float | None:
    values = run.column(key)[1]
    return values[-1] if values else None


def _columns(entries: Sequence[RunEntry], *, diagnoses: bool) -> list[Column]:
    from trainer.tools.fitted_table import Column

    columns = [
        Column("run", [escape(entry.run) for entry in entries]),
        Column("state", [coloured(entry.state, otherwise="dim") for entry in entries]),
        Column("step", [_steps(entry) for entry in entries], "right", leave_out=1),
        Column("loss", [_number(entry.loss) for entry in entries], "right", leave_out=2),
        Column("eval", [_number(entry.eval_loss) for entry in entries], "right", leave_out=4),
        Column("age", [age_text(entry.age_sec) for entry in entries], "right", leave_out=3),
    ]
    if any(entry.changed for entry in entries):
        changed = [counted(len(entry.changed), "setting") if entry.changed else "" for entry in entries]
        columns.append(Column("changed", changed, leave_out=3))
    if diagnoses:
        columns.append(Column("verdict", [_verdict_cell(entry) for entry in entries], leave_out=1, wraps=True))
    return columns


def _verdict_cell(entry: RunEntry) -> str:
    from trainer.tools.diagnostics.diagnose import NO_FINDING

    verdict = entry.verdict or "-"
    if entry.state in ("failed", "died", "unknown") and entry.reason is not None:  # matters more than earlier findings
        shown = textwrap.shorten(entry.reason, SHOWN_REASON, placeholder=" ...")
        verdict = shown if entry.verdict is None else f"{entry.verdict}: {shown}"
    colour = "unknown" if verdict.startswith(NO_FINDING) else "warning"
    return coloured("healthy" if verdict == "healthy" else colour, verdict)


def _steps(entry: RunEntry) -> str:
    if entry.step is None:
        return "-"
    return f"{entry.step:,}/{entry.steps:,}" if entry.steps is not None else f"{entry.step:,}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def age_text(seconds: float | None) -> str:
    """`45 s`, `12 min`, `3 h`, `4 d`; `-` if unknown."""
    if seconds is None:
        return "-"
    for size, unit in ((DAY, "d"), (HOUR, "h"), (MINUTE, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
