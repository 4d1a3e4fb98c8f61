"""Loss spikes are found against a plain computation, and a new level becomes the normal one."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.lab.extensions import DECAY, WARMUP, LossSpikes, Spike


def make(threshold: float) -> LossSpikes:
    run = SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace(spike_sigma=threshold)))
    return LossSpikes(run)  # type: ignore[arg-type]


def noisy(count: int, mean: float = 3.0, sigma: float = 0.1) -> list[float]:
    return list(np.random.Generator(np.random.Philox(1)).normal(mean, sigma, count))


def test_a_loss_seven_sigma_above_is_a_spike_and_five_is_none():
    for distance, expected in ((5.0, False), (7.5, True), (-20.0, False)):
        detector = make(6.0)
        assert not any(detector.update(loss) for loss in noisy(200))
        state = detector.state_dict()
        found = detector.update(state["mean"] + distance * math.sqrt(state["variance"]))
        assert (found is not None) == expected


def test_nothing_is_a_spike_in_the_first_steps():
    detector = make(6.0)
    assert all(detector.update(loss) is None for loss in [1.0] * (WARMUP - 1) + [100.0])
    detector = make(6.0)
    assert all(detector.update(loss) is None for loss in [1.0] * WARMUP)
    assert detector.update(100.0) == Spike(loss=100.0, mean=1.0, sigma=0.0)  # the first loss that is judged


def test_a_spike_hides_no_second_one_and_a_lasting_level_becomes_normal():
    detector = make(6.0)
    for loss in noisy(200):
        detector.update(loss)
    found = [detector.update(loss) is not None for loss in [1000.0, 9.0, *noisy(500, mean=9.0)]]
    assert found[:2] == [True, True]
    assert not any(found[-200:])


def test_a_state_goes_on_exactly():
    one, other = make(6.0), make(6.0)
    for loss in noisy(70):
        one.update(loss)
    other.load_state_dict(one.state_dict())
    for loss in [*noisy(30), 8.0]:
        assert one.update(loss) == other.update(loss)
    assert one.state_dict() == other.state_dict()


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=120))
def test_mean_and_variance_are_those_of_the_weights_written_out(values):
    """With a limit that nothing reaches, the averages are weighted sums; the weights are multiplied out here."""
    detector = make(math.inf)
    for value in values:
        detector.update(value)
    weights = np.zeros(len(values))
    for index in range(len(values)):
        share = max(1 / (index + 1), 1 - DECAY)
        weights *= 1 - share
        weights[index] = share
    mean = float(weights @ np.array(values))
    variance = float(weights @ (np.array(values) - mean) ** 2)
    assert detector.state_dict()["mean"] == pytest.approx(mean)
    assert detector.state_dict()["variance"] == pytest.approx(variance, abs=1e-9)
