"""What the noise scale *now* says after |G|^2 or the noise has jumped by 2 or 4.

docs/gns_jumps.csv has the same cells by jump and B over the batch, before and after the bounds allowed for a jump.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from tests.support.noise_windows import Process, covers, histories
from trainer.metrics.noise_scale import Current

AT = 200  # the step of the jump
DELAYS = (3, 10, 20, 54, 100)
RATIOS = (0.25, 1.0, 2.0)  # B over the batch before
JUMPS = [(grad_sq, noise) for f in (2.0, 4.0) for grad_sq, noise in ((f, 1.0), (1 / f, 1.0), (1.0, f), (1.0, 1 / f))]
SHAPES = ((20, 4), (200, 2))  # dimensions, micro-batches
WRONG = 0.05
Cell = tuple[float, float, float, int]


def jump(ratio: float, grad_sq: float, noise: float, at: int = AT) -> Process:
    """B is `ratio` up to step `at`."""
    return Process(lambda t: ratio * noise / grad_sq if t > at else ratio, lambda t: grad_sq if t > at else 1.0)


def after_jumps(runs: int, seed: int) -> Iterator[tuple[Cell, int, float, list[Current]]]:
    """Of each cell (ratio, jump of |G|^2, of the noise, dimensions): the delay, B and what each run shows."""
    steps = [AT + delay for delay in DELAYS]
    for ratio, (grad_sq, noise), (dim, micros) in itertools.product(RATIOS, JUMPS, SHAPES):
        process = jump(ratio, grad_sq, noise)
        for step, found in histories(process, steps, runs=runs, dim=dim, micros=micros, seed=seed):
            shown = [current for history in found if (current := history.current()) is not None]
            yield (ratio, grad_sq, noise, dim), step - AT, process.ratio(step), shown


def test_at_most_one_bound_in_twenty_is_wrong_from_the_third_step_on() -> None:
    wrong = defaultdict(list)
    for (_, grad_sq, noise, _), delay, truth, shown in after_jumps(runs=20, seed=33):
        wrong[grad_sq, noise, delay] += [not covers(current, truth) for current in shown]
    assert not {cell: share for cell, each in wrong.items() if (share := np.mean(each)) > WRONG}
