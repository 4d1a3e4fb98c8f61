"""The verb that trains again: `train cbs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from trainer.cli.terminal import echo, uncollected
from trainer.tools.verbs import shared
from trainer.tools.verbs.shared import output, require_run, writing

if TYPE_CHECKING:
    from trainer.tools.branching.study import Study

EXIT_FAILED = 1
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
