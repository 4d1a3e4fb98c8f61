"""`train cbs`: the critical batch size at a checkpoint, measured by branches that differ in the batch alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trainer.cli.options import JsonOption, TrustOption, require_run, uncollected
from trainer.cli.terminal import echo, output, print_json, writing
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.tools.branching.run_branches import BranchResult
    from trainer.tools.branching.study import Branch, Study

EXIT_FAILED = 1


def cbs(
    run_dir: Annotated[str, typer.Argument(help="A run directory.", metavar="RUN_DIR")],
    at: Annotated[int | None, typer.Option(help="Step of the checkpoint; default: the latest.", min=1)] = None,
    factors: Annotated[str, typer.Option(help="Batches, as multiples of today's.")] = "1/4,1/2,1,2,4",
    lr_rule: Annotated[
        Literal["none", "sqrt", "linear"] | None,
        typer.Option(help="How the learning rate follows the batch; default: linear for sgd, otherwise sqrt."),
    ] = None,
    lr_grid: Annotated[
        str, typer.Option(help="Learning rates, as multiples of the rule's; the best counts.")
    ] = "0.5,1,2",
    seeds: Annotated[int, typer.Option(min=1, help="Orders of the data per batch and rate.")] = 2,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a branch; default: 20 % of those trained so far.")
    ] = None,
    tolerance: Annotated[float, typer.Option(min=0, help="Relative loss above the best that still counts.")] = 0.01,
    nproc: Annotated[int | None, typer.Option(min=1, help="Ranks of a branch; default: the run's.")] = None,
    devices: Annotated[
        str | None, typer.Option(help="CUDA devices; as many branches at once as there are groups of --nproc.")
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Branches at once, without --devices.")] = 1,
    out: Annotated[str | None, typer.Option(help="Picture, .html; default: cbs.html in RUN_DIR/cbs/STEP.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Start without asking.")] = False,
    trust_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the critical batch size: train short branches from a checkpoint at several batches, to equal tokens."""
    run = require_run(run_dir)
    with uncollected():
        from trainer.tools.branching.run_branches import STUDY_FILE, read_kept, slots
        from trainer.tools.branching.study import make_study, open_origin, parse_numbers, reserved
        from trainer.tools.pictures import check_page
        from trainer.tools.trained.saved_model import find_checkpoint
    if out is not None:
        check_page(out)
    path = find_checkpoint(run, at, option="--at")
    with writing(str(run / "cbs")), reserved(run):
        origin = open_origin(run, path, num_ranks=nproc, trust_code=trust_code)
        directory = run / "cbs" / str(origin.step)
        study = make_study(
            origin,
            directory,
            factors=parse_numbers("--factors", factors),
            lr_rule=lr_rule,
            lr_grid=parse_numbers("--lr-grid", lr_grid),
            num_seeds=seeds,
            tokens=tokens,
            before=read_kept(directory / STUDY_FILE),
        )
        environments = slots(origin.num_ranks, devices, parallel)
        _run(study, environments, asks=not yes and sys.stdin.isatty())
        _print(study, tolerance, out, as_json=as_json)


def _run(study: Study, environments: list[dict[str, str]], *, asks: bool) -> None:
    """Run the branches that are not done.

    Raises:
        typer.Exit: the user does not want to, a stop was requested, or a branch failed.
    """
    from trainer.tools.branching.answer import cost_lines
    from trainer.tools.branching.run_branches import BranchFailed, results_of, run_branches
    from trainer.training.signals import StopRequest

    done = results_of(study)
    todo = [branch for branch in study.branches if branch not in done]
    for line in cost_lines(study, len(done), len(environments)):
        echo(line, err=True)
    if not todo:
        return
    if asks and not typer.confirm("Start?", err=True):
        raise typer.Exit(0)
    stop = StopRequest(lambda name: echo(f"{name}: stopping the branches at their next step", err=True))
    stop.install()

    def on_result(branch: Branch, result: BranchResult) -> None:
        done[branch] = result
        loss = "not finite" if result.loss is None else f"{result.loss:.4f}"
        what = f"batch {branch.batch.factor} x, learning rate {branch.lr:.3g}, seed {branch.seed}"
        echo(f"{len(done)} of {len(study.branches)}: {what}: loss {loss} ({result.seconds:.0f} s)", err=True)

    try:
        run_branches(study, todo, environments=environments, should_stop=lambda: stop.requested, on_result=on_result)
    except (BranchFailed, OSError) as error:
        echo(str(error), err=True)
        raise typer.Exit(EXIT_FAILED) from None
    if len(done) < len(study.branches):
        echo(f"stopped: {len(done)} of {len(study.branches)} branches are done; the same command continues", err=True)
        raise typer.Exit(0)


def _print(study: Study, tolerance: float, out: str | None, *, as_json: bool) -> None:
    """Write cbs.json and the picture; print the table, or the JSON."""
    from trainer.files import write_json
    from trainer.tools.branching.answer import make_answer
    from trainer.tools.branching.run_branches import ANSWER_FILE, results_of
    from trainer.tools.branching.show import draw, print_answer

    answer = make_answer(study, results_of(study), tolerance=tolerance)
    found, written = answer.to_json(), [study.directory / ANSWER_FILE]
    write_json(written[0], found)
    picture = study.directory / "cbs.html" if out is None else Path(out)
    try:
        draw(answer, picture)
        written.append(picture)
    except UserError as error:
        if out is not None:
            raise
        echo(f"no picture: {error}", err=True)
    if as_json:
        print_json(found)
    else:
        print_answer(answer, output())
    echo(f"wrote {', '.join(map(str, written))}", err=True)
