"""`train replay`: a step of a run again. `train bisect`: the first step at which two runs differ."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from trainer.cli.options import JsonOption, TextOption, TrustOption, require_run, uncollected
from trainer.cli.terminal import coloured, echo, output, print_json
from trainer.errors import UserError
from trainer.tools.fitted_table import Column, fitted_table, needed_width
from trainer.wording import counted

if TYPE_CHECKING:
    from trainer.tools.branching.replay import Origin, Replay, Values

EXIT_FAILED, EXIT_DIFFERENT = 1, 3
REASONS = {
    "batch": "they read other data: see train data at RUN {step} of both",
    "states": "the same batch continued from other states",
    "gradient": "the same batch and states gave another gradient: what the model computes differs (settings, dropout, threads, "
    "versions, devices), or weights were changed between two steps",
    "weights": "the same gradient led to other weights: the learning rate or the optimizer differs, or code changed weights",
}


def replay(
    run_dir: Annotated[str, typer.Argument(help="A run directory.", metavar="RUN_DIR")],
    step: Annotated[int, typer.Option(min=1, help="The optimizer step.")],
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks; default: the run's. On others sums are rounded otherwise.")
    ] = None,
    text: TextOption = False,
    trust_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Repeat a step of a run from the checkpoint before it: its rows, their losses, and whether they equal the record."""
    origin = open_origin(require_run(run_dir), step, trust_code=trust_code)
    from trainer.tools.branching.replay import NUMBERS, Documents, differing, recorded, rows_of

    found = _replay(origin, step, num_ranks=nproc)
    documents = Documents(next(origin.blends()), origin.plan.tokenizer.decode)
    rows = rows_of(found.micros, documents, with_text=text)
    record = recorded(origin.run)
    now, then = found.values.get(step, {}), record.get(step, {})
    # Digests are sums over ranks, and of no use without the record's.
    now = {name: value for name, value in now.items() if name in NUMBERS or (found.is_exact and name in then)}
    compared = [at for at in found.values if record.get(at, {}).keys() & found.values[at].keys()]
    differences = {at: names for at in compared if (names := differing(found.values[at], record[at]))}
    is_equal = None if not found.is_exact or not compared else not differences
    content = {
        "run": run_dir,
        "step": step,
        "from_step": origin.step,
        "ranks": found.num_ranks,
        "is_equal": is_equal,
        "compared_steps": compared if found.is_exact else [],
        "first_different": next(([at, names] for at, names in differences.items()), None) if found.is_exact else None,
        "values": {name: [value, then.get(name)] for name, value in now.items()},
        "parts": found.parts(),
        "failure": found.failure or None,
        "notes": origin.notes,
        "rows": rows,
    }
    if as_json:
        print_json(_plain(content))
    else:
        title = f"Step {step} of {run_dir}, repeated from step {origin.step} on {counted(found.num_ranks, 'rank')}"
        print_rows(rows, title, origin.notes)
        for line in _outcome(content):
            output().print(line, highlight=False)
    if is_equal is False:
        raise typer.Exit(EXIT_DIFFERENT)


def open_origin(run: Path, step: int, *, trust_code: bool, before: int | None = None) -> Origin:
    """`find_origin`, without what a run says as it starts."""
    logging.disable(logging.INFO)
    with uncollected():
        from trainer.tools.branching.replay import find_origin
    return find_origin(run, step, before=before, trust_code=trust_code)


def _replay(origin: Origin, step: int, **options: Any) -> Replay:
    """`branching.replay.replay`, said and, if it fails, refused."""
    from trainer.tools.branching.replay import replay as repeat
    from trainer.tools.branching.run_branches import BranchFailed

    echo(f"{origin.run.path}: repeating steps {origin.step + 1:,} to {step:,}", err=True)
    try:
        return repeat(origin, step, **options)
    except BranchFailed as error:
        echo(f"{origin.run.path}: cannot be repeated to step {step}: {error.reason or error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None


def _plain(value: Any) -> Any:
    """With numbers that are not finite, which JSON has not, as words."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(_plain, value))
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _outcome(content: Mapping[str, Any]) -> list[str]:
    """The numbers of the step, and how they compare with the record."""
    lines, worst = [], 0.0
    for name, (now, then) in content["values"].items():
        said = "not recorded" if then is None else "as recorded" if repr(now) == repr(then) else f"recorded: {then}"
        lines.append(f"{name} {now} ({said})")
        if isinstance(then, float) and math.isfinite(then - now):
            worst = max(worst, abs(then - now) / max(abs(then), 1e-300))
    if len(content["parts"]) > 1:
        lines.append("the loss is " + " + ".join(f"{name} {value:.6g}" for name, value in content["parts"].items()))
    if bad := [_place(row) for row in content["rows"] if not math.isfinite(row.get("loss") or 0.0)]:
        lines.append(coloured("error", f"not finite: the loss of {counted(len(bad), 'row')}, {', '.join(bad[:8])}"))
    if content["failure"]:
        lines.append(coloured("error", f"the step ended with: {content['failure']}"))
    steps, different = content["compared_steps"], content["first_different"]
    if different is not None:
        lines.append(
            coloured("error", f"differs from the record, first at step {different[0]}: {', '.join(different[1])}")
        )
    elif steps:
        lines.append(coloured("healthy", f"equal to the record, bit for bit, in {counted(len(steps), 'logged step')}"))
    elif content["is_equal"] is None and worst:
        lines.append(f"on another number of ranks sums are rounded otherwise: relative difference up to {worst:.1e}")
    if all(then is None for _, then in content["values"].values()):
        lines.append(f"the run did not log step {content['step']}")
    return lines


def _place(row: Mapping[str, Any]) -> str:
    return f"{row['shard']}.{row['micro_batch']}.{row['row']}"


def print_rows(rows: Sequence[Mapping[str, Any]], title: str, notes: Sequence[str]) -> None:
    """The rows of a step as a table, and their text where it was asked for."""

    def column(heading: str, key: str, **options: Any) -> Column:
        cells = ["" if row.get(key) is None else str(row[key]) for row in rows]
        return Column(heading, list(map(escape, cells)), **options)

    def ranges(row: Mapping[str, Any]) -> str:
        return ", ".join(f"{each['document']} ({each['start']}:{each['stop']})" for each in row["documents"] or [])

    losses = [row.get("loss") for row in rows]
    texts = [
        "" if loss is None else f"{loss:.6f}" if math.isfinite(loss) else coloured("error", str(loss))
        for loss in losses
    ]
    columns = [
        Column("shard.micro.row", list(map(_place, rows))),
        column("source", "source", leave_out=1),
        column("stream", "stream", wraps=True),
        Column("document (tokens)", list(map(ranges, rows)), wraps=True),
        column("cell", "cell", justify="right", leave_out=3),
        column("targets", "tokens", justify="right", leave_out=2),
        *([column("state", "state")] if any("state" in row for row in rows) else []),
        *([Column("loss", texts, "right")] if any("loss" in row for row in rows) else []),
    ]
    console = output(needed_width=needed_width(columns))
    table = fitted_table(columns, width=console.width, hint="; --json has all", title=title, title_justify="left")
    console.print(table, highlight=False)
    for row in rows:
        for each in row["documents"] or []:
            if "text" in each:
                echo(f"{_place(row)} document {each['document']}: {each['text']!r}")
    for note in notes:
        console.print(coloured("warning", note))


def bisect(
    first: Annotated[str, typer.Argument(help="A run directory.", metavar="RUN_DIR")],
    second: Annotated[str, typer.Argument(help="Another one.", metavar="RUN_DIR")],
    replays: Annotated[
        bool, typer.Option("--replay/--no-replay", help="Repeat the steps between logged ones, to find the very step.")
    ] = True,
    trust_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the first step at which two runs differ, and in what: data, states, gradient or weights; exit code 3 if they do."""
    paths = [require_run(first), require_run(second)]
    with uncollected():
        from trainer.tools.branching.replay import differing, recorded
        from trainer.tools.report.run_summary import config_differences
        from trainer.tools.runs.load import load_run
    runs = [load_run(path) for path in paths]
    marks = [recorded(run) for run in runs]
    equal, step, kinds = _first_difference(*marks)
    if not equal and step is None:
        raise UserError(
            "train bisect", "the runs have logged no step in common", "train replay repeats the steps of one"
        )
    notes: list[str] = []
    is_exact = step is not None and (step == 1 or ("weights" in marks[0][step] and equal == step - 1))
    if replays and step is not None and not (is_exact and "weights" in marks[0][step]):
        origins = [open_origin(path, step, before=equal + 1, trust_code=trust_code) for path in paths]
        found = [_replay(origin, step, logs_all=True).values for origin in origins]
        failed = [
            run.path
            for run, mark, own in zip(runs, marks, found, strict=True)
            if step not in own or differing(own[step], mark[step])
        ]
        text = "{}: repeated here, step {} is not as recorded: the machine, versions or data differ"
        notes += [text.format(path, step) for path in failed]
        if not failed:
            before, step, kinds = _first_difference(*found)
            assert step is not None
            is_exact, equal = step == 1 or before == step - 1, max(before, equal if equal < step else 0)
    config = [{"key": key, "values": values} for key, values in config_differences(runs)]
    data = _data_difference(paths)
    content = {
        "runs": [first, second],
        "config": config,
        "data": data,
        "first_different_step": step,
        "last_equal_step": equal or None,
        "is_exact": is_exact,
        "differs_in": [*["config"] * bool(config), *["data"] * bool(data), *kinds],
        "notes": notes,
    }
    if as_json:
        print_json(_plain(content))
    else:
        common = marks[0].keys() & marks[1].keys()
        has_digests = all("weights" in mark[at] for mark in marks for at in common)
        _print_bisected(content, len(common), has_digests=has_digests)
    if step is not None:
        raise typer.Exit(EXIT_DIFFERENT)


def _first_difference(first: Values, second: Values) -> tuple[int, int | None, list[str]]:
    """The last equal step (0: none), the first different one (None: none), and in what it differs."""
    from trainer.tools.branching.replay import differing

    equal = 0
    for step in first:
        if step in second:
            if kinds := differing(first[step], second[step]):
                return equal, step, kinds
            equal = step
    return equal, None, []


def _data_difference(paths: Sequence[Path]) -> str | None:
    """How the data of the runs' newest checkpoints differ; None if one has none."""
    from trainer.data.fingerprint import FINGERPRINT_KEY, Fingerprint, compare
    from trainer.training.checkpointing import checkpoint

    found = [checkpoint.complete_checkpoints(path / checkpoint.CHECKPOINTS)[:1] for path in paths]
    if not all(found):
        return None
    states = [checkpoint.named(str(path), checkpoint.read_state) for own in found for path in own]
    return str(compare(*(Fingerprint.from_state(state[FINGERPRINT_KEY]) for state in states)))


def _print_bisected(content: Mapping[str, Any], num_compared: int, *, has_digests: bool) -> None:
    from trainer.tools.report.run_summary import value_text

    lines = [f"setting {each['key']}: {', '.join(map(value_text, each['values']))}" for each in content["config"]]
    data, step = content["data"], content["first_different_step"]
    lines.append("data: " + ("not known, a run has no checkpoint" if data is None else data or "the same"))
    if step is None:
        lines.append(f"equal in {counted(num_compared, 'logged step')}")
        if not has_digests:
            lines.append(
                'by loss and gradient norm: metrics.digests = "write" records batch, states, gradient and weights too'
            )
    else:
        kinds = [kind for kind in content["differs_in"] if kind not in ("config", "data")]
        equal, where = content["last_equal_step"], f"step {step}"
        if not content["is_exact"]:
            where = f"a step from {(equal or 0) + 1} to {step}"
        after = f", after {equal} equal ones" if equal else ""
        lines.append(f"the first difference is in {where}{after}: {', '.join(kinds)}")
        lines += [text.format(step=step) for kind, text in REASONS.items() if kind == kinds[0] and content["is_exact"]]
    for line in [*lines, *content["notes"]]:
        echo(line)
