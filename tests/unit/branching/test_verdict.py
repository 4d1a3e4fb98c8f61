"""Up to which batch the loss stays: closed cases."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.tools.branching.answer import Measured, decide

FACTORS = [Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(2), Fraction(4)]


def measured(*losses):
    """One batch per entry: a list of losses by seed, or one loss."""
    by_seed = [each if isinstance(each, list) else [each] for each in losses]
    return [Measured(factor, dict(enumerate(each))) for factor, each in zip(FACTORS, by_seed, strict=False)]


def test_the_largest_batch_within_the_tolerance_of_the_best_is_critical():
    verdict = decide(measured(2.0, 2.0, 2.01, 2.1, 2.4), tolerance=0.01)
    assert (verdict.reference, verdict.largest, verdict.next_larger) == (Fraction(1, 4), 1, 2)
    assert not verdict.is_unresolved
    assert [each.is_within for each in verdict.compared] == [True, True, True, False, False]
    assert verdict.compared[2].excess == pytest.approx(0.01)


def test_a_loss_that_falls_with_the_batch_leaves_it_open_above():
    verdict = decide(measured(2.4, 2.2, 2.1, 2.05, 2.0), tolerance=0.01)
    assert (verdict.reference, verdict.largest, verdict.next_larger) == (4, 4, None)
    assert not verdict.compared[0].is_within


def test_an_error_bar_wider_than_the_tolerance_decides_and_is_named():
    # Differences of 0.05 and 0.25: 0.15 on average, with a standard error of 0.1.
    noisy = measured([2.0, 2.0], [2.05, 2.25])
    verdict = decide(noisy, tolerance=0.01)
    assert verdict.compared[1].error == pytest.approx(0.1)
    assert verdict.compared[1].allowed == pytest.approx(0.2)
    assert verdict.largest == Fraction(1, 2)
    assert verdict.is_unresolved
    assert not decide(noisy, tolerance=0.11).is_unresolved


def test_what_seeds_have_in_common_is_no_error():
    """Branches of one seed read the same data: the spread between seeds cancels in their difference."""
    verdict = decide(measured([2.0, 2.5, 3.0], [2.1, 2.6, 3.1]), tolerance=0.01)
    assert verdict.compared[1].error == pytest.approx(0.0, abs=1e-12)
    assert verdict.largest == Fraction(1, 4)


def test_a_batch_without_a_loss_is_outside():
    verdict = decide(measured(2.0, 2.0, [], 2.0), tolerance=0.01)
    assert (verdict.largest, verdict.next_larger) == (Fraction(1, 2), 1)
    assert len(verdict.compared) == 3


def test_without_any_loss_there_is_no_verdict():
    assert decide(measured([], []), tolerance=0.01) is None
    assert decide([], tolerance=0.01) is None


@given(
    losses=st.lists(st.lists(st.floats(0.5, 5.0), min_size=2, max_size=2), min_size=5, max_size=5),
    tolerance=st.floats(0, 0.5),
)
def test_a_wider_tolerance_never_gives_a_smaller_batch(losses, tolerance):
    strict, wide = (decide(measured(*losses), tolerance=each) for each in (tolerance, 2 * tolerance))
    assert strict.reference <= strict.largest <= wide.largest
    assert strict.next_larger is None or strict.next_larger > strict.largest
