"""The noise scale *now* covers the truth of a process that drifts, and both do if documents go on from step to step.

Windows are simulated as in `test_noise_scale_coverage`, all runs at once; B over the batch and |G|^2 depend on the step.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tests.support.noise_windows import Process, constant, constant_window, continued, covers, histories
from trainer.metrics.noise_scale import BLOCKS, Current, History, NoiseScaleAverage, Stretches

RUNS = 100
STEPS = (14, 40, 100, 215, 260, 400, 1000)

PROCESSES = {
    "constant 3": Process(constant(3.0), constant(1.0)),
    "constant 30": Process(constant(30.0), constant(1.0)),
    "square root": Process(lambda t: 0.3 * math.sqrt(t), lambda t: t**-0.5),
    "power law": Process(lambda t: 0.3 + 0.02 * t, lambda t: 1 / (t + 10)),
    "saturating": Process(lambda t: 6 - 5.5 * math.exp(-t / 100), lambda t: 0.1 + math.exp(-t / 60)),
    "exponential": Process(lambda t: 0.5 * math.exp(t / 150), lambda t: math.exp(-t / 150)),
    "a jump at step 200": Process(lambda t: 1.0 if t <= 200 else 4.0, constant(1.0)),
    "up and down": Process(lambda t: 3 + 2 * math.sin(t / 60), constant(1.0)),
}


def simulate(process: Process, dim: int, seed: int) -> dict[int, list[Current]]:
    """What each run shows at each of `STEPS`."""
    seen = {}
    for step, found in histories(process, STEPS, runs=RUNS, dim=dim, micros=4, seed=seed):
        seen[step] = [current for history in found if (current := history.current()) is not None]
        assert len(seen[step]) == RUNS
    return seen


@pytest.fixture(scope="module")
def everything() -> dict[tuple[str, int, int], list[Current]]:
    found = {}
    for (seed, (name, process)), dim in itertools.product(enumerate(PROCESSES.items()), (20, 1000)):
        if dim == 1000 or name in ("constant 3", "exponential", "saturating"):
            found |= {(name, dim, step): seen for step, seen in simulate(process, dim, seed).items()}
    return found


def test_the_interval_covers_the_current_value(everything: dict[tuple[str, int, int], list[Current]]) -> None:
    shares = {}
    for (name, dim, step), seen in everything.items():
        truth = PROCESSES[name].ratio(step)
        shares[name, dim, step] = float(np.mean([covers(one, truth) for one in seen]))
    # Above two of 2 percentage points, the standard error of a share of 95 % in 100 runs.
    assert not {what: s for what, s in shares.items() if s < 0.95 - 0.04}
    assert np.mean(list(shares.values())) >= 0.98


def test_the_window_grows_with_a_run_that_does_not_drift(everything: dict[tuple[str, int, int], list[Current]]) -> None:
    """The opposite error: a short window always covers."""
    for name, step, at_least, at_most in [
        ("constant 3", 1000, 300, 1000),
        ("constant 3", 400, 120, 400),
        ("exponential", 400, 20, 150),
        ("a jump at step 200", 260, 8, 60),
    ]:
        middle = np.median([one.steps for one in everything[name, 1000, step]])
        assert at_least <= middle <= at_most, (name, step, middle)
    bounds = [one.ratio[:2] for one in everything["constant 3", 1000, 1000]]
    low, high = np.median(np.array(bounds, dtype=np.float64), axis=0) / 3.0
    assert 0.75 < low < 0.85
    assert 1.2 < high < 1.4
    assert np.std([one.ratio.value for one in everything["constant 3", 1000, 1000]]) < 0.1 * 3.0


@pytest.mark.parametrize("spread", [1, 4])
def test_a_history_stays_small_and_loses_nothing(spread: int) -> None:
    stretches = Stretches(spread)
    history, pairs = History(stretches), np.random.default_rng(0).standard_normal((5000, 2)).tolist()
    for number, (x, y) in enumerate(pairs, 1):
        history.add(x, y, number % spread)
    phases = dict(history.state_dict()["phases"])
    levels = [np.array(level) for each in phases.values() for level in each]
    assert sum(map(len, levels)) <= BLOCKS * 9
    assert np.allclose(sum(level.sum(axis=0) for level in levels), [np.arange(1, 5001).sum(), *np.sum(pairs, axis=0)])
    assert all(sum(len(level) << k for k, level in enumerate(each)) == 5000 // spread for each in phases.values())
    for phase, (newest, *_) in phases.items():
        assert newest == [[k, *pairs[k - 1]] for k in range(1, 5001) if k % spread == phase][-len(newest) :]
    stretches.spread = 1  # by which some windows stay single for ever
    for _ in range(2 * BLOCKS):
        history.add(1.0, 1.0)
    assert not next(history._fits()).covariance.any()


def shares(spread: int, rows: int, *, are_known: bool) -> dict[str, float]:
    """Of runs: in how many both bounds hold, and there is an upper one; `are_known`: the spread and the rows."""
    averages = [NoiseScaleAverage(0.99) for _ in range(150)]
    for average in averages:
        average.stretches.spread = spread if are_known else 1
    for drawn in continued(spread, rows, steps=400, runs=len(averages), seed=5):
        for average, (tr_sigma, grad_sq, before) in zip(averages, drawn.T.tolist(), strict=True):
            average.update(constant_window(tr_sigma, grad_sq, rows_before=before if are_known else 0.0))
    metrics, found = [average.metrics() for average in averages], {}
    for key in ("gns/b_simple", "gns/b_now"):
        bounds = [(each.get(f"{key}_low", math.nan), each.get(f"{key}_high", math.inf)) for each in metrics]
        low, high = np.array(bounds).T
        found |= {key: np.mean((low <= 1.0) & (high >= 1.0)), f"{key}_high": np.mean(high < math.inf)}
    return found


@pytest.mark.parametrize(("spread", "rows", "bounded"), [(1, 6, 0.4), (1, 20, 0.0), (4, 20, 0.0), (16, 20, 0.6)])
def test_bounds_hold_the_truth_though_documents_go_on(spread: int, rows: int, bounded: float) -> None:
    found, blind = (shares(spread, rows, are_known=are_known) for are_known in (True, False))
    assert min(found["gns/b_simple"], found["gns/b_now"]) >= 0.9
    assert found["gns/b_simple_high"] >= 0.7
    assert found["gns/b_now_high"] >= bounded
    # The opposite error: windows that are taken for independent.
    assert blind["gns/b_simple"] < 0.85
    assert spread > 1 or blind["gns/b_now"] < 0.9


def test_too_few_steps_say_nothing() -> None:
    history = History()
    assert history.current() is None
    for _ in range(7):
        history.add(1.0, 1.0)
    assert history.current() is None
    history.add(1.0, 1.0)
    assert history.current() is not None
