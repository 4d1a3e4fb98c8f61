"""`train cbs`: the critical batch size, by branches that differ in the batch alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from trainer.cli.terminal import echo, uncollected
from trainer.tools.verbs.shared import JsonOption, RunDirArgument, TrustOption, output, print_json, require_run, writing

if TYPE_CHECKING:
    from trainer.tools.branching.run_branches import BranchResult
    from trainer.tools.branching.study import Branch, Study

EXIT_FAILED = 1
GRID_HELP = "Learning rates, as multiples of the scaled one; the best counts."
TOKENS_HELP = "Tokens of a branch; default: 20 % of those trained so far."


def cbs(
    run_dir: RunDirArgument,
    at: Annotated[int | None, Option(help="Step of the checkpoint; default: the latest.", min=1)] = None,
    factors: Annotated[str, Option(help="Batches, as multiples of today's.")] = "1/4,1/2,1,2,4",
    lr_grid: Annotated[str, Option(help=GRID_HELP)] = "0.5,1,2",
    seeds: Annotated[int, Option(min=1, help="Orders of the data per batch and rate.")] = 3,
    tokens: Annotated[int | None, Option(min=1, help=TOKENS_HELP)] = None,
    tolerance: Annotated[float, Option(min=0, help="Relative loss above the best that still counts.")] = 0.01,
    trust_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the critical batch size: train short branches from a checkpoint at several batches, to equal tokens."""
    run = require_run(run_dir)
    with uncollected():
        from trainer.tools.branching.run_branches import STUDY_FILE, read_kept
        from trainer.tools.branching.study import make_study, open_origin, parse_numbers, reserved
        from trainer.tools.trained.saved_model import find_checkpoint
    path = find_checkpoint(run, at, option="--at")
    with writing(str(run / "cbs")), reserved(run):
        origin = open_origin(run, path, trust_code=trust_code)
        directory = run / "cbs" / str(origin.step)
        study = make_study(
            origin,
            directory,
            factors=parse_numbers("--factors", factors),
            lr_grid=parse_numbers("--lr-grid", lr_grid),
            num_seeds=seeds,
            tokens=tokens,
            before=read_kept(directory / STUDY_FILE),
        )
        _run(study)
        _print(study, tolerance, as_json=as_json)


def _run(study: Study) -> None:
    """Run the branches that are left. Raises typer.Exit: a stop was requested, or one failed."""
    from trainer.tools.branching.answer import cost_lines
    from trainer.tools.branching.run_branches import BranchFailed, results_of, run_branches
    from trainer.training.signals import StopRequest

    done, total = results_of(study), len(study.branches)
    todo = [branch for branch in study.branches if branch not in done]
    for line in cost_lines(study, len(done)):
        echo(line, err=True)
    if not todo:
        return
    stop = StopRequest(lambda name: echo(f"{name}: stopping the branches at their next step", err=True))
    stop.install()
    stop.is_watched = True  # the branches may take long to their next step, and this process waits for them

    def on_result(branch: Branch, result: BranchResult) -> None:
        done[branch] = result
        loss = "not finite"
        if result.loss is not None:
            loss = f"{result.loss:.4f}"
        what = f"batch {branch.factor} x, learning rate {branch.lr:.3g}, seed {branch.seed}"
        echo(f"{len(done)} of {total}: {what}: loss {loss} ({result.seconds:.0f} s)", err=True)

    try:
        run_branches(study, todo, should_stop=lambda: stop.requested, on_result=on_result)
    except (BranchFailed, OSError) as error:
        echo(str(error), err=True)
        raise typer.Exit(EXIT_FAILED) from None
    # What is done stays: each branch writes its result when it ends.
    if len(done) < total:
        echo(f"stopped: {len(done)} of {total} branches are done; the same command continues", err=True)
        raise typer.Exit(0)


def _print(study: Study, tolerance: float, *, as_json: bool) -> None:
    """Write cbs.json; print the table, or the JSON."""
    from trainer.files import write_json
    from trainer.tools.branching.answer import make_answer, print_answer
    from trainer.tools.branching.run_branches import ANSWER_FILE, results_of

    answer = make_answer(study, results_of(study), tolerance=tolerance)
    write_json(study.directory / ANSWER_FILE, answer)
    if as_json:
        print_json(answer)
    else:
        print_answer(answer, output())
    echo(f"wrote {study.directory / ANSWER_FILE}", err=True)
