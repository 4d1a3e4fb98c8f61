"""Verbs that train again: `train cbs`, `train replay` and `train bisect`."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from typer import Argument, Option

from trainer.cli.terminal import echo, refuse, uncollected
from trainer.tools.verbs import shared
from trainer.tools.verbs.shared import coloured, output, print_json, print_table, require_run, writing
from trainer.wording import counted

if TYPE_CHECKING:
    from trainer.tools.branching.replay import Origin, Replay, Values
    from trainer.tools.branching.study import Study

EXIT_FAILED, EXIT_DIFFERENT = 1, 3
SHOWN_ROWS = 8
# Settings that change how sums are rounded, and not what a step computes.
ROUNDING = frozenset({"env.world_size", "distributed.strategy"})
ROUNDED = "sums are rounded otherwise: relative difference up to {:.1e}"
UNASKED_RANKS = 8  # that a machine with fewer CPUs starts too, if the record says so
REASONS = {
    "batch": "they read other data",
    "states": "the same batch continued from other states",
    "gradient": "the same batch and states gave another gradient: the model computes otherwise, or code changed weights",
    "weights": "the same gradient led to other weights: learning rate, optimizer, or code that changes weights",
}
# Columns of the table of rows, with the priority of leaving them out.
SHOWN = ("source", "stream", "documents", "cell", "tokens", "state", "loss")
GRID_HELP = "Learning rates, as multiples of the scaled one; the best counts."
FACTORS_HELP = "Batches, as multiples of today's; default: 1/4,1/2,1,2,4, as far as whole micro-batches."
TOKENS_HELP = "Tokens of a branch; default: 20 % of those trained so far."


@contextmanager
def _stoppable(said: str) -> Iterator[Callable[[], bool]]:
    """Whether a signal has asked this process to stop, which waits for one that trains."""
    from trainer.training.signals import StopRequest

    stop = StopRequest(lambda name: echo(f"{name}: {said}", err=True))
    stop.install()
    stop.is_watched = True
    try:
        yield lambda: stop.requested
    finally:
        stop.uninstall()


def cbs(
    run_dir: shared.RunDirArgument,
    at: Annotated[int | None, Option(help="Step of the checkpoint; default: the latest.", min=1)] = None,
    factors: Annotated[str | None, Option(help=FACTORS_HELP)] = None,
    lr_grid: Annotated[str, Option(help=GRID_HELP)] = "0.5,1,2",
    seeds: Annotated[int, Option(min=1, help="Orders of the data per batch and rate.")] = 3,
    tokens: Annotated[int | None, Option(min=1, help=TOKENS_HELP)] = None,
    tolerance: Annotated[float, Option(min=0, help="Relative loss above the best that still counts.")] = 0.01,
    trust_code: shared.TrustOption = False,
) -> None:
    """Measure the critical batch size: train short branches from a checkpoint at several batches, to equal tokens."""
    run = require_run(run_dir)
    with uncollected():
        from trainer.files import write_json
        from trainer.tools.branching.answer import make_answer, print_answer
        from trainer.tools.branching.study import ANSWER_FILE, make_study, open_origin, parse_numbers, reserved
        from trainer.tools.trained.saved_model import find_checkpoint
    path = find_checkpoint(run, at, option="--at")
    with writing(str(run / "cbs")), reserved(run):
        origin = open_origin(run, path, trust_code=trust_code)
        study = make_study(
            origin,
            run / "cbs" / str(origin.step),
            factors=None if factors is None else parse_numbers("--factors", factors),
            lr_grid=parse_numbers("--lr-grid", lr_grid),
            num_seeds=seeds,
            tokens=tokens,
        )
        _run(study)
        answer = make_answer(study, study.results(), tolerance=tolerance)
        write_json(study.directory / ANSWER_FILE, answer)
        print_answer(answer, output())
        echo(f"wrote {study.directory / ANSWER_FILE}", err=True)


def _run(study: Study) -> None:
    """Run the branches that are left. Raises typer.Exit: a stop was requested, or one failed."""
    from trainer.tools.branching.answer import cost_line
    from trainer.tools.branching.study import BranchFailed, run_branch

    done, total = study.results(), len(study.branches)
    echo(cost_line(study, len(done)), err=True)
    with _stoppable("stopping the branch at its next step") as should_stop:
        for branch in (each for each in study.branches if each not in done):
            try:
                if should_stop() or not run_branch(study, branch, should_stop):
                    said = f"stopped: {len(study.results())} of {total} branches are done"
                    echo(f"{said}; the same command continues", err=True)
                    raise typer.Exit(0)
            except (BranchFailed, OSError) as error:
                echo(str(error), err=True)
                raise typer.Exit(EXIT_FAILED) from None
            results = study.results()
            echo(f"{len(results)} of {total}: {branch.name}: loss {results[branch]}", err=True)


def replay(
    run_dir: shared.RunDirArgument,
    step: Annotated[int, Option(min=1, help="The optimizer step.")],
    nproc: Annotated[int | None, Option(min=1, help="Ranks; default: the run's, for equal bits.")] = None,
    text: shared.TextOption = False,
    trust_code: shared.TrustOption = False,
    as_json: shared.JsonOption = False,
) -> None:
    """Repeat a step of a run from the checkpoint before it: its rows, their losses, and whether they equal the record."""
    origin = open_origin(require_run(run_dir), step, trust_code=trust_code)
    shards = origin.plan.facts.data_shards
    if shards % (nproc or 1):
        refuse(f"--nproc {nproc}: the run's data are in {counted(shards, 'shard')}; choose a divisor")
    from trainer.tools.branching.replay import NUMBERS, UNROUNDED, differing, recorded, rows_of

    found, record = _replay(origin, step, num_ranks=nproc), recorded(origin.run)
    compared, differences = [], []
    for at, values in found.values.items():
        then = record.get(at, {})
        names = differing(values, then)
        if not found.is_exact:
            names = [name for name in names if name in UNROUNDED]
        elif values.keys() & then.keys():
            compared.append(at)
        if names:
            differences.append([at, names])
    # Digests are of no use without the record's, and most of them follow from sums over ranks.
    then, now = record.get(step, {}), found.values.get(step, {})
    comparable = set(then)
    if not found.is_exact:
        comparable.intersection_update(UNROUNDED)
    shown = [name for name in now if name in NUMBERS or name in comparable]
    is_equal = not differences if compared or differences else None
    content: dict[str, Any] = {"run": run_dir, "step": step, "from_step": origin.step, "ranks": found.num_ranks}
    content |= {"note": origin.note, "is_equal": is_equal, "compared_steps": compared}
    content |= {"first_different": next(iter(differences), None), "failure": found.failure}
    content["values"] = {name: [now[name], then.get(name)] for name in shown}
    content["rows"] = rows_of(origin, found.micros, with_text=text)
    if as_json:
        print_json(_plain(content))
    else:
        title = f"Step {step} of {run_dir}, repeated from step {origin.step} on {counted(found.num_ranks, 'rank')}"
        print_rows(content["rows"], title, origin.note)
        for line in _outcome(content):
            output().print(line, highlight=False)
    if differences:
        raise typer.Exit(EXIT_DIFFERENT)


def open_origin(run: Path, step: int, *, trust_code: bool, before: int | None = None) -> Origin:
    """`find_origin`, without what a run says as it starts."""
    logging.disable(logging.INFO)
    with uncollected():
        from trainer.tools.branching.replay import find_origin
    return find_origin(run, step, before=before or step, trust_code=trust_code)


def _replay(origin: Origin, step: int, *, num_ranks: int | None = None, logs_all: bool = False) -> Replay:
    """`branching.replay.replay`, said and, if it fails, refused."""
    from trainer.tools.branching.replay import replay as repeat
    from trainer.tools.branching.study import BranchFailed

    name, ranks = origin.run.path, counted(origin.num_ranks, "rank")
    if num_ranks is None and origin.num_ranks > max(UNASKED_RANKS, os.cpu_count() or 1):
        refuse(f"{name}: its record says that it ran on {ranks}; --nproc {origin.num_ranks} starts them")
    echo(f"{name}: repeating steps {origin.step + 1:,} to {step:,}", err=True)
    with _stoppable("stopping") as should_stop:
        try:
            return repeat(origin, step, num_ranks=num_ranks, logs_all=logs_all, should_stop=should_stop)
        except BranchFailed as error:
            echo(f"{name}: cannot be repeated to step {step}: {error}", err=True)
            raise typer.Exit(EXIT_FAILED) from None


def _plain(value: Any) -> Any:
    """The value with words for numbers that are not finite, which JSON lacks."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(_plain, value))
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _outcome(content: Mapping[str, Any]) -> list[str]:
    """The numbers of the step, and how they compare with the record."""
    lines = []
    for name, (now, then) in content["values"].items():
        said = f"recorded: {then}"
        if then is None:
            said = "not recorded"
        elif repr(now) == repr(then):
            said = "as recorded"
        lines.append(f"{name} {now} ({said})")
    what, bad = "loss", [row for row in content["rows"] if not math.isfinite(row.get("loss") or 0.0)]
    if not bad:
        what, bad = "gradient", [row for row in content["rows"] if "gradient" in row]
        # The gradient is that of the sum so far: once it is not finite it stays so.
        first = min((row["micro_batch"] for row in bad), default=0)
        bad = [row for row in bad if row["micro_batch"] == first]
    if bad:
        rows = f"{counted(len(bad), 'row')}, {', '.join(map(_place, bad[:SHOWN_ROWS]))}"
        lines.append(coloured("error", f"not finite: the {what} of {rows}"))
    if content["failure"]:
        lines.append(coloured("error", f"the step ended with: {content['failure']}"))
    return [*lines, _comparison(content)]


def _comparison(content: Mapping[str, Any]) -> str:
    from trainer.tools.branching.replay import relative_difference

    values, compared = content["values"], content["compared_steps"]
    if content["first_different"]:
        step, names = content["first_different"]
        return coloured("error", f"differs from the record, first at step {step}: {', '.join(names)}")
    if compared:
        steps = f"{counted(len(compared), 'logged step')} up to step {compared[-1]}"
        return coloured("healthy", f"equal to the record, bit for bit, in {steps}")
    if all(then is None for _, then in values.values()):
        return f"nothing to compare: step {content['step']} was not logged"
    now, then = ({name: pair[at] for name, pair in values.items()} for at in (0, 1))
    said = f"step {content['step']} was not logged, so losses do not compare"
    if then.get("loss") is not None:
        said = "on another number of ranks " + ROUNDED.format(relative_difference(now, then))
    if "batch" in values:
        said = f"the same batches; {said}"
    return said


def _place(row: Mapping[str, Any]) -> str:
    return f"{row['shard']}.{row['micro_batch']}.{row['row']}"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(f"{each['document']} ({each['start']}:{each['stop']})" for each in value)
    if value is None:
        return ""
    if not isinstance(value, float):
        return escape(str(value))
    return f"{value:.6f}" if math.isfinite(value) else coloured("error", str(value))


def print_rows(rows: Sequence[Mapping[str, Any]], title: str, note: str) -> None:
    """The rows of a step as a table, and their text where it was asked for."""
    columns = {"shard.micro.row": list(map(_place, rows))}
    for key in SHOWN:
        values = [row.get(key) for row in rows]
        if any(value is not None for value in values):
            columns[key] = list(map(_cell, values))
    print_table(columns, title=title)
    for row in rows:
        for each in row["documents"] or []:
            if "text" in each:
                echo(f"{_place(row)} document {each['document']}: {each['text']!r}")
    if note:
        echo(note)


def bisect(
    first: shared.RunDirArgument,
    second: Annotated[str, Argument(help="Another one.", metavar="RUN_DIR")],
    replays: Annotated[bool, Option("--replay/--no-replay", help="Repeat the steps between logged ones.")] = True,
    trust_code: shared.TrustOption = False,
    as_json: shared.JsonOption = False,
) -> None:
    """Find the first step at which two runs differ, and in what: data, states, gradient or weights; exit code 3 if they do."""
    paths = [require_run(first), require_run(second)]
    with uncollected():
        from trainer.tools.branching.replay import differing, recorded, relative_difference
        from trainer.tools.report.run_summary import config_differences
        from trainer.tools.runs.load import load_run
    runs = list(map(load_run, paths))
    config = [{"key": key, "values": values} for key, values in config_differences(runs)]
    keys = {each["key"] for each in config}
    rounds = not ROUNDING.isdisjoint(keys)
    marks, note = [recorded(run) for run in runs], ""
    common = [at for at in marks[0] if at in marks[1]]
    if not common:
        refuse(f"{first}, {second}: have logged no step in common; repeat the steps of one with train replay")
    has_digests = all("weights" in mark[at] for mark in marks for at in common)
    equal, step, kinds = _first_difference(*marks, rounds=rounds)
    is_exact = step is not None and has_digests and equal == step - 1
    # Runs log every n-th step: repeated with every step logged, they show the first that differs.
    if replays and step is not None and not is_exact:
        origins = [open_origin(path, step, before=equal + 1, trust_code=trust_code) for path in paths]
        found = [_replay(origin, step, logs_all=True).values for origin in origins]
        for path, mark, own in zip(paths, marks, found, strict=True):
            if step not in own or differing(own[step], mark[step]):
                note = f"{path}: repeated here, step {step} is not as recorded: machine, versions or data differ"
        if not note:
            before, step, kinds = _first_difference(*found, rounds=rounds)
            assert step is not None
            equal = before or min(equal, step - 1)
            is_exact = equal == step - 1 and (equal == before or has_digests)
    content: dict[str, Any] = {
        "runs": [first, second],
        "data": _data_difference(paths),
        "is_exact": is_exact,
        "relative_difference": max(relative_difference(marks[0][at], marks[1][at]) for at in common),
        "config": config,
        "note": note,
        "initial_weights": "run.seed" in keys and not all(run.setting("model.weights") for run in runs),
        "last_equal_step": equal or None,
        "first_different_step": step,
    }
    content["differs_in"] = [*(name for name in ("config", "data", "initial_weights") if content[name]), *kinds]
    if as_json:
        print_json(_plain(content))
    else:
        steps = f"equal in {counted(len(common), 'logged step')}"
        if not has_digests:
            steps += ", by loss and norm"
        if step is not None:
            steps = _where(equal, step, kinds, is_exact=is_exact)
            if rounds and {*kinds} <= {"loss", "grad_norm"}:
                steps += "\nbatches and learning rates are equal; " + ROUNDED.format(content["relative_difference"])
        echo("\n".join(filter(None, [*_around(content), steps, note])))
    if step is not None:
        raise typer.Exit(EXIT_DIFFERENT)


def _around(content: Mapping[str, Any]) -> list[str]:
    """Differences of two runs outside their steps, in lines: settings, data and initial weights."""
    lines = [f"{each['key']}: {each['values'][0]!r}, {each['values'][1]!r}" for each in content["config"]]
    data = content["data"]
    if data is None:
        data = "not known: a run has no checkpoint"
    lines.append(f"data: {data or 'the same'}")
    if content["initial_weights"]:
        lines.append("initial weights: they differ, as run.seed does")
    return lines


def _where(equal: int, step: int, kinds: Sequence[str], *, is_exact: bool) -> str:
    """The first different step, its kinds, and what the first of them means."""
    where = f"step {step}" if is_exact else f"a step from {equal + 1} to {step}"
    text = f"the first difference is in {where}: {', '.join(kinds)}"
    if is_exact and kinds[0] in REASONS:
        text += f"\n{REASONS[kinds[0]]}"
    return text


def _first_difference(first: Values, second: Values, *, rounds: bool) -> tuple[int, int | None, list[str]]:
    """The last equal step (0: none), the first different one (None: none), and in what it differs.
    Where `rounds`, digests of what follows from sums over ranks do not compare."""
    from trainer.tools.branching.replay import differing

    equal = 0
    for step in first:
        if step not in second:
            continue
        kinds = differing(first[step], second[step])
        if rounds:
            kinds = [kind for kind in kinds if kind not in ("states", "gradient", "weights")]
        if kinds:
            return equal, step, kinds
        equal = step
    return equal, None, []


def _data_difference(paths: Sequence[Path]) -> str | None:
    """How the data of the runs' newest checkpoints differ; None if one has none."""
    from trainer.data.fingerprint import FINGERPRINT_KEY, Fingerprint, compare
    from trainer.training.checkpointing import checkpoint

    marks = []
    for run in paths:
        for path in checkpoint.complete_checkpoints(run / checkpoint.CHECKPOINTS)[:1]:
            state = checkpoint.named(str(path), checkpoint.read_state)
            marks.append(Fingerprint.from_state(state[FINGERPRINT_KEY]))
    if len(marks) < len(paths):
        return None
    return str(compare(*marks))
