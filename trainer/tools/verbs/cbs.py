"""`train cbs`: the critical batch size at a checkpoint, measured by branches that differ in the batch alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trainer.cli.imports import uncollected
from trainer.cli.options import JsonOption, TrustOption, require_run
from trainer.cli.terminal import echo, output
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.tools.branching.results import BranchResult
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
    parallel: Annotated[int | None, typer.Option(min=1, help="Branches at once, without --devices.")] = None,
    out: Annotated[str | None, typer.Option(help="Picture, .html; default: cbs.html in RUN_DIR/cbs/STEP.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Start without asking.")] = False,
    trust_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the critical batch size: train short branches from a checkpoint at several batches, to equal tokens."""
    run = require_run(run_dir)
    with uncollected():
        import torch

        from trainer.tools.branching.origin import find_checkpoint, open_origin, reserved
        from trainer.tools.branching.results import read_common, refuse_mixing
        from trainer.tools.branching.runner import slots
        from trainer.tools.branching.study import make_study, parse_factors, parse_grid
        from trainer.tools.pictures import check_page
    if out is not None:
        check_page(out)
    path = find_checkpoint(run, at)
    with reserved(run):
        origin = open_origin(run, path, num_ranks=nproc, trust_code=trust_code)
        if at is None:
            echo(f"--at is not given: branching from the latest checkpoint, step {origin.step:,}", err=True)
        directory = run / "cbs" / str(origin.step)
        before = read_common(directory)
        study = make_study(
            origin,
            directory,
            factors=parse_factors(factors),
            lr_rule=lr_rule,
            lr_grid=parse_grid(lr_grid),
            num_seeds=seeds,
            tokens=tokens,
            base_steps=None if before is None else before.get("base_steps"),
        )
        environments = slots(origin.num_ranks, devices, parallel)
        if devices is not None and not torch.cuda.is_available():
            problem = "names CUDA devices, but torch finds none here"
            raise UserError("--devices", problem, "leave it out; --parallel runs several at once on the CPU")
        refuse_mixing(study)
        _run(study, environments, asks=not yes and sys.stdin.isatty())
        _tell(study, tolerance, out, as_json=as_json)


def _run(study: Study, environments: list[dict[str, str]], *, asks: bool) -> None:
    """Run the branches that are not done.

    Raises:
        typer.Exit: the user does not want to, a stop was requested, or a branch failed.
    """
    from trainer.tools.branching.answer import cost_lines
    from trainer.tools.branching.results import claim
    from trainer.tools.branching.runner import BranchFailed, missing, run_branches
    from trainer.training.signals import StopRequest

    todo, done = missing(study)
    for line in cost_lines(study, len(done), len(environments)):
        echo(line, err=True)
    if not todo:
        return
    if asks and not typer.confirm("Start?", err=True):
        raise typer.Exit(0)
    claim(study)
    stop = StopRequest(lambda name: echo(f"{name}: stopping the branches at their next step", err=True))
    stop.install()
    num_done = len(done)

    def on_result(branch: Branch, result: BranchResult) -> None:
        nonlocal num_done
        num_done += 1
        loss = "not finite" if result.loss is None else f"{result.loss:.4f}"
        what = f"batch {branch.batch.factor} x, learning rate {branch.lr:.3g}, seed {branch.seed}"
        echo(f"{num_done} of {len(study.branches)}: {what}: loss {loss} ({result.seconds:.0f} s)", err=True)

    try:
        is_complete = run_branches(
            study, todo, environments=environments, should_stop=lambda: stop.requested, on_result=on_result
        )
    except BranchFailed as error:
        echo(str(error), err=True)
        raise typer.Exit(EXIT_FAILED) from None
    if not is_complete:
        how = "the same command continues"
        echo(f"stopped: {num_done} of {len(study.branches)} branches are done; {how}", err=True)
        raise typer.Exit(0)


def _tell(study: Study, tolerance: float, out: str | None, *, as_json: bool) -> None:
    """Write cbs.json and the picture; print the table, or the JSON."""
    from trainer.files import write_json
    from trainer.tools.branching.answer import make_answer, to_json
    from trainer.tools.branching.results import ANSWER_FILE
    from trainer.tools.branching.runner import missing
    from trainer.tools.branching.show import draw, print_answer

    answer = make_answer(study, missing(study)[1], tolerance=tolerance)
    found = to_json(answer)
    written = [study.directory / ANSWER_FILE]
    try:
        write_json(written[0], found)
    except OSError as error:
        raise UserError(str(written[0]), f"cannot be written: {error.strerror}", "check the disk") from None
    picture = study.directory / "cbs.html" if out is None else Path(out)
    try:
        draw(answer, picture)
        written.append(picture)
    except UserError as error:
        if out is not None:
            raise
        echo(f"no picture: {error}", err=True)
    if as_json:
        echo(json.dumps(found, indent=2, allow_nan=False))
    else:
        print_answer(answer, output())
    echo(f"wrote {', '.join(map(str, written))}", err=True)
