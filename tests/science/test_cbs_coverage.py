"""How often the error bars of `train cbs` hold, and how often its answer is wrong without saying so.

Simulated studies with a noise of 0.4 % of the loss per branch, and the random walk of the data that branches of a seed share.
The interval is that of a batch's excess over the batch that happened to be best, for its excess over the truly best one.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from tests.tools.branching.conftest import make_study  # noqa: F401 - a fixture
from trainer.tools.branching.answer import make_answer

FACTORS = [Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(2), Fraction(4)]
BATCHES = np.array(FACTORS, dtype=float)
NOISE, TOLERANCE, STUDIES = 0.004, 0.01, 400
EXCESSES = {  # true excess of each batch's loss at its best rate
    "all equal": np.zeros(5),
    "a tenth of a noise scale": 0.0025 * BATCHES,
    "a rise at the tolerance": np.array([0.0, 0.0, 0.0, 0.008, 0.03]),
    "a rise above it": np.array([0.0, 0.0, 0.0, 0.012, 0.03]),
    "far apart": np.array([0.0, 0.02, 0.05, 0.1, 0.2]),
}
RATES = {0.5: 0.01, 1.0: 0.0, 2.0: 0.006}  # what a learning rate costs


def simulate(study, excess, rng):
    """An answer of one study."""
    walk = 0.01 * rng.standard_normal(study.num_seeds)
    true = dict(zip(FACTORS, excess, strict=True))

    def loss(branch):
        return 2.0 * (
            1.0 + true[branch.factor] + RATES[branch.lr_scale] + walk[branch.seed] + NOISE * rng.standard_normal()
        )

    return make_answer(study, {branch: loss(branch) for branch in study.branches}, tolerance=TOLERANCE)


def critical(excess):
    """Of the true losses."""
    outside = excess - excess.min() > TOLERANCE * (1 + excess.min())  # no case has a batch outside below the best
    return FACTORS[int(outside.argmax()) - 1 if outside.any() else -1]


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("case", EXCESSES)
def test_error_bars_hold_and_a_wrong_answer_says_what_is_open(make_study, case, seeds):  # noqa: F811
    rng, count, excess = np.random.default_rng([seeds, len(case)]), Counter(), EXCESSES[case]
    study, right = make_study(factors=FACTORS, num_seeds=seeds), critical(excess)
    for _ in range(STUDIES):
        answer = simulate(study, excess, rng)
        for row, true in zip(answer["batches"], 2.0 * (excess - excess.min()), strict=True):
            if row["error_bar"] is not None:
                count["held"] += abs(row["excess"] - true) <= row["error_bar"]
        found = answer["critical"]
        is_wrong, is_said = Fraction(found["factor"]) != right, "the error bars leave" in answer["sentence"]
        count["silent"] += is_wrong and not is_said
        count["in range"] += Fraction(found["lowest"]) <= right <= Fraction(found["highest"])
    assert 0.915 < count["held"] / (4 * STUDIES) < 0.98
    assert count["silent"] <= 0.05 * STUDIES
    assert count["in range"] >= 0.95 * STUDIES
