"""The verbs that read the records of runs: `train ls`, `diagnose`, `report` and `compare`."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from typer import Argument, Option

from trainer.cli.terminal import echo, refuse
from trainer.errors import UserError
from trainer.tools.verbs import shared
from trainer.tools.verbs.shared import coloured, output, print_json, print_table, put_text, refuse_existing
from trainer.wording import decimals_text, few

if TYPE_CHECKING:
    from trainer.tools.diagnostics.diagnose import Diagnosis, Ruling

SHOWN_REASON = 80
EXIT_FINDINGS = 3


@dataclass(frozen=True)
class RunEntry:
    """One run."""

    run: str
    # As in status.json; `died` if nobody holds the lock of a running one.
    state: str
    step: int | None  # the last one, which may be later than the last logged one
    steps: int | None  # the configured number, unless train.tokens decides
    loss: float | None  # the last logged value, as the one below
    eval_loss: float | None
    age_sec: float  # since the run last logged, or wrote its state without a log
    verdict: str | None  # of `train diagnose`, in a few words; of a run without rows, the first note
    reason: str | None  # why the run ended, if status.json says it


def ls(
    paths: Annotated[list[str] | None, Argument(help="Directories of runs, or runs [runs].", metavar="DIR...")] = None,
    as_json: shared.JsonOption = False,
) -> None:
    """List runs, the newest last: state, step, loss, age and verdict."""
    given, now = paths or ["runs"], time.time()
    entries = [entry_of(path, now=now) for path in find_runs(given)]
    entries.sort(key=lambda entry: -entry.age_sec)
    if not entries:
        raise UserError(", ".join(given), "holds no run", "start one in runs/ with: train --config x.toml")
    if as_json:
        print_json([asdict(entry) for entry in entries])
    else:
        columns = {
            "run": [escape(entry.run) for entry in entries],
            "state": [coloured(entry.state, otherwise="dim") for entry in entries],
            "step": [_steps(entry) for entry in entries],
            "loss": [_loss(entry.loss) for entry in entries],
            "eval": [_loss(entry.eval_loss) for entry in entries],
            "age": [_age(entry.age_sec) for entry in entries],
            "verdict": [_verdict_cell(entry) for entry in entries],
        }
        print_table(columns, right=("step", "loss", "eval", "age"))


def find_runs(paths: Sequence[str]) -> list[Path]:
    """The runs among the paths and what is in them. Raises UserError: one is missing."""
    found: dict[Path, None] = {}  # a set in order
    for given in map(Path, paths):
        try:
            inside = sorted(given.iterdir())
        except OSError as error:
            problem = f"is not a directory that can be read: {error.strerror}"
            raise UserError(str(given), problem, "name a directory of runs, such as runs/") from None
        for path in (given, *inside):
            if any(map(os.path.isfile, (path / "status.json", path / "metrics.jsonl"))):
                found[path] = None
    return list(found)


def _diagnosed(path: Path | str, label: str = "", **how: bool) -> Diagnosis:
    """The diagnosis of a run; `how`: see `load_run`."""
    from trainer.tools.diagnostics.diagnose import diagnose as apply_rules
    from trainer.tools.runs.load import load_run

    return apply_rules(replace(load_run(path, **how), label=label))


def _each_diagnosed(paths: Sequence[str]) -> list[Diagnosis]:
    """The diagnoses of runs, each once however it is named; several have their paths as labels."""
    named = {os.path.realpath(path).removesuffix("/metrics.jsonl"): path for path in paths}
    many = len(named) > 1
    return [_diagnosed(path, path * many, is_one_of_many=many) for path in named.values()]


def entry_of(path: Path, *, now: float) -> RunEntry:
    """The entry of one run; one without numbers, or with a damaged record, has an entry too."""
    diagnosis = _diagnosed(path, is_one_of_many=True)
    run = diagnosis.run
    step, steps, verdict = run.status.get("last_step"), run.setting("train.steps"), next(iter(run.notes), None)
    if type(steps) is not int or run.setting("train.tokens"):  # edited by hand, or of full batches alone
        steps = None
    # A run that has logged nothing yet has written its state.
    files = [file for file in (path / "metrics.jsonl", path / "status.json") if file.is_file()]
    written = [*(file for file in files if file.stat().st_size), path][0].stat().st_mtime
    if run.keys:
        verdict = diagnosis.brief
    return RunEntry(
        run=str(path),
        state=str(run.status.get("state", "unknown")),
        step=max([*run.steps[-1:], *filter(None, [step])], default=step),  # rows are some steps apart
        steps=steps,
        loss=next(reversed(run.column("loss")[1]), None),
        eval_loss=next(reversed(run.column("eval_loss")[1]), None),
        age_sec=max(now - written, 0.0),
        verdict=verdict,
        reason=run.status.get("reason") or None,
    )


def _loss(value: float | None) -> str:
    return "-" if value is None else decimals_text(value)


def _age(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h`, `4 d`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _verdict_cell(entry: RunEntry) -> str:
    verdict = entry.verdict or "-"
    # Why a run ended matters more than earlier findings.
    if entry.state in ("failed", "died") and entry.reason is not None:
        reason = textwrap.shorten(entry.reason, SHOWN_REASON, placeholder=" ...")
        verdict = ": ".join(filter(None, (entry.verdict, reason)))
    if verdict.startswith("nothing wrong"):
        return coloured("unknown", verdict)
    return coloured("healthy" if verdict == "healthy" else "warning", verdict)


def _steps(entry: RunEntry) -> str:
    if entry.step is None:
        return "-"
    if entry.steps is None:
        return f"{entry.step:,}"
    return f"{entry.step:,}/{entry.steps:,}"


def diagnose(run_dir: shared.RunArgument, as_json: shared.JsonOption = False) -> None:
    """Look for faults in a run's logged metrics. Exit code 0: none in what could be judged, 2: nothing
    to judge yet, 3: findings."""
    diagnosis = _diagnosed(run_dir)
    if as_json:
        print_json(diagnosis.to_json())
    elif diagnosis.verdict is not None or diagnosis.advice:
        _print_diagnosis(diagnosis)
    if diagnosis.verdict is None:
        state, problem = diagnosis.run.status.get("state", "running"), "has no training rows to diagnose"
        problem += f": the run is {state}" * (state != "running")
        problem = "; ".join([problem, *diagnosis.run.notes])
        fix = "wait for the first logged step" * (state == "running")
        # Not raised: with --json, `main` would print a second document.
        refuse(UserError(run_dir, problem, fix).message)
    if diagnosis.findings:
        raise typer.Exit(EXIT_FINDINGS)


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    """Findings first, then one line per rule, those that could not judge last."""
    from trainer.tools.report.run_summary import rows_text

    console = output()
    lines = [f"{escape(str(diagnosis.run.path))}: {rows_text(diagnosis.run.steps)}"]
    lines += [f"note: {escape(note)}" for note in diagnosis.run.notes]
    for ruling in [*diagnosis.findings, *diagnosis.advice]:
        lines += _finding_lines(ruling)
    console.print("\n".join(lines), highlight=False)
    rulings = sorted(diagnosis.rulings, key=lambda ruling: not ruling.is_judged)
    columns = {
        "rule": [ruling.rule.name for ruling in rulings],
        "verdict": [coloured(ruling.result, otherwise="none") for ruling in rulings],
        "observation": [escape(ruling.outcome.sentence) for ruling in rulings],
    }
    print_table(columns, box=None, pad_edge=False)
    brief = coloured(str(diagnosis.verdict), diagnosis.brief, otherwise="none")
    console.print(f"{brief}; {diagnosis.coverage}", highlight=False)


def _finding_lines(ruling: Ruling) -> list[str]:
    from trainer.tools.runs.readings import number_text

    head = f"{coloured(str(ruling.severity))} [bold]{ruling.rule.name}[/]"
    lines = [f"{head}: {escape(ruling.outcome.sentence)}"]
    for evidence in ruling.outcome.evidence:
        pairs = zip(evidence.steps, evidence.values, strict=True)
        shown = few([f"step {step}: {number_text(value)}" for step, value in pairs])
        lines.append(f"    {escape(evidence.key)}: {escape(shown)}")
    if ruling.fix:
        lines.append(f"    {escape(ruling.fix)}")
    return lines


def report(
    runs: shared.RunsArgument,
    out: Annotated[str, Option(help="HTML file to write.", metavar="X.HTML")] = "report.html",
    force: shared.ForceOption = False,
) -> None:
    """Write one self-contained HTML page about a run, or about several overlaid."""
    try:
        from trainer.tools.report.page import render_page
    except ModuleNotFoundError as error:
        raise UserError(str(error.name), "is needed and not installed", "run: pip install '.[report]'") from None
    diagnoses = _each_diagnosed(runs)
    refuse_existing(out, force=force)
    put_text(render_page(diagnoses), out)


def compare(paths: shared.RunsArgument, as_json: shared.JsonOption = False) -> None:
    """Compare the settings, results and verdicts of runs side by side."""
    from trainer.tools.report.run_summary import config_differences, over_seeds, summaries, value_text

    diagnoses = _each_diagnosed(paths)
    if len(diagnoses) < 2:
        raise UserError("train compare", "needs at least two runs, got one", "train compare RUN_DIR RUN_DIR")
    runs = [each.run for each in diagnoses]
    differing, results, seeds = config_differences(runs), summaries(runs), over_seeds(runs)
    if as_json:
        judged, kept = [each.to_json() for each in diagnoses], ("verdict", "findings", "notes")
        found = [{"path": each["run"]} | {key: each[key] for key in kept} for each in judged]
        config = [{"key": key, "values": values} for key, values in differing]
        outcome = []
        for rows in results:
            columns = {f"{name}s": [getattr(row, name) for row in rows] for name in ("value", "error", "note")}
            outcome.append({"label": rows[0].label, "unit": rows[0].unit, **columns})
        print_json({"runs": found, "config": config, "outcome": outcome, "seeds": seeds})
        return
    heads = [escape(f"{rows[0].label} {rows[0].unit}") for rows in results]
    columns = {"": [*(escape(key) for key, _ in differing), *heads, "Verdict"]}
    for number, each in enumerate(diagnoses):
        cells = [value_text(values[number]) for _, values in differing]
        cells += [f"{rows[number].text}\n{rows[number].note}".strip() for rows in results]
        columns[escape(each.run.name)] = [*map(escape, cells), coloured(str(each.verdict), each.brief)]
    print_table(columns, box=SIMPLE_HEAD, pad_edge=False)
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    for line in [*(each["text"] for each in seeds), *notes]:
        echo(line)
