"""A run that diverged without a NaN is an error, and noise is not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from tests.support.records import record_of
from trainer.metrics.payload_contract import Restart
from trainer.tools.diagnostics.diagnose import RULES, diagnose
from trainer.tools.diagnostics.rule import Outcome
from trainer.tools.runs.load import RunRecord

RULE = next(rule for rule in RULES if rule.name == "loss_spikes")
BEGINNING = [5.65, 1149.66, 1065.48, 839.62, 660.03, 273.9, 250.46, 186.39, 219.65, 241.45, 205.26, 193.46]
DIVERGED = [*BEGINNING, 175.14, 213.38, 154.48, 188.93, 171.28, 174.89, 130.96, 171.62, 188.84]
"""A loop with a learning rate of 30, every fifth step."""
FEW_ROWS = [5.55, 29.51, 63.76, 47.86, 36.63, 22.07, 16.42]


def record(losses: Sequence[float], **fields: object) -> RunRecord:
    rows = {1 + 5 * row: {"loss": loss} for row, loss in enumerate(losses)}
    return record_of(rows, config={"optimizer": {"lr": 0.05}}, **fields)


def judged(losses: Sequence[float]) -> Outcome:
    return RULE.apply(record(losses))


@pytest.mark.parametrize(
    ("losses", "end"),
    [(DIVERGED, "171.6"), (DIVERGED[:5], "839.6"), (FEW_ROWS, "22.07"), ([0.7, 0.6, 0.5, 2.0, 2.1, 2.2], "2.1")],
)
def test_a_run_that_ends_above_its_first_loss_diverged(losses: list[float], end: str) -> None:
    found = diagnose(record(losses))
    ruling = next(each for each in found.findings if each.rule.name == "loss_spikes")
    assert ruling.severity == "error"
    assert f"and is {end} +- " in ruling.outcome.sentence
    assert {1, 5 * len(losses) - 4} <= set(ruling.steps)
    assert ruling.fix == "try optimizer.lr = 0.025 (now 0.05)"


def test_a_divergence_late_in_a_long_run_is_an_error_once_the_last_rows_are_high() -> None:
    fallen = [5.5 / (1 + row / 20) for row in range(400)]
    assert judged([*fallen, *[11.5 + 0.1 * math.sin(row) for row in range(16)]]).severity == "error"


def test_losses_of_zero_or_less_have_no_multiples() -> None:
    for first in (0.0, -1.0):
        assert judged([first, *[first + 2.0] * 30]).severity != "error"
    assert judged(FEW_ROWS[:4]).is_early, "fewer than five rows"


CURVES: dict[str, Callable[[float, random.Random], float]] = {
    "_pretraining": lambda x, _: 1.5 + 4.0 * (1 + 40 * x) ** -0.9,
    "_bump_in_the_warm_up": lambda x, _: (
        (2.5 + 3.0 * math.exp(-4 * x)) * (1 + 0.2 * math.exp(-(((x - 0.1) / 0.05) ** 2)))
    ),
    "_fine_tuning": lambda x, _: 0.4 * (1 + 0.1 * math.exp(-(((x - 0.3) / 0.2) ** 2)) - 0.05 * x),
    "_mix_with_a_schedule": lambda x, _: 1.5 * (1 + 0.12 * x),
    "_blend_of_micro_batches": lambda _, rng: sum(1.0 if rng.random() < 0.5 else 2.5 for _ in range(8)) / 8,
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("count", [5, 8, 17, 60, 300])
def test_noise_bumps_of_some_percent_and_drifts_are_healthy(curve: str, count: int) -> None:
    """40 runs each; the deviation of a row is 2 to 10 %, with tails heavier than a normal distribution's."""
    for seed in range(40):
        rng = random.Random(f"{curve} {count} {seed}")
        spread = rng.choice((0.02, 0.05, 0.1))
        losses = []
        for row in range(count):
            level = CURVES[curve](row / count, rng)
            losses.append(level * math.exp(spread * rng.gauss(0, 1) * rng.choice((1, 1, 1, 1.5))))
        outcome = judged(losses)
        assert outcome.severity is None, (seed, outcome.sentence)  # a spike's is the rule's own


def test_a_restart_is_no_divergence_and_the_first_row_is_that_of_the_record() -> None:
    """A run that was resumed at step 101 begins there: its first loss is already low, and its optimizer starts again."""
    again = [*[5.5 / (1 + row / 5) for row in range(20)], *[1.3 + 0.05 * math.sin(row * row) for row in range(20)]]
    assert RULE.apply(record(again, restarts=[Restart(80)])).verdict == "healthy"
