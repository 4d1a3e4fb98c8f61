"""Which batches a branch can have, and how many steps it takes."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.tools.branching.study import (
    STEPS_UNIT,
    BranchBatch,
    base_steps_for,
    fit_batch,
)

QUARTER, HALF = Fraction(1, 4), Fraction(1, 2)


@pytest.mark.parametrize(
    ("factor", "today", "sizes", "expected"),
    [
        (Fraction(2), 2, [8], (4, 1)),
        (HALF, 2, [8], (1, 1)),
        (QUARTER, 2, [8, 4], (1, HALF)),
        (QUARTER, 1, [8], (1, QUARTER)),
        (HALF, 3, [8], (2, Fraction(3, 4))),
        (HALF, 3, [6], (3, HALF)),  # 3/4 of 6 rows are no rows, 1/2 of them are
        (Fraction(3, 2), 1, [8], (2, Fraction(3, 4))),
        (HALF, 1, [1], None),
        (QUARTER, 1, [2], None),
        (QUARTER, 1, [8, 6], None),  # a modality whose rows cannot be divided
        (QUARTER, 2, [], None),  # batches of a source's own
        (HALF, 2, [], (1, 1)),
    ],
)
def test_a_factor_is_made_of_micro_batches_or_else_of_fewer_rows(factor, today, sizes, expected):
    found = fit_batch(factor, Fraction(today), sizes)
    assert found == (None if expected is None else BranchBatch(factor, *expected))


@given(
    factor=st.fractions(Fraction(1, 16), 16, max_denominator=16),
    today=st.fractions(HALF, 16, max_denominator=2),
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=3),
)
def test_a_batch_has_exactly_the_rows_that_were_asked_for(factor, today, sizes):
    found = fit_batch(factor, today, sizes)
    if found is None:
        return
    assert found.micro_batches * found.row_share == factor * today
    assert found.row_share <= 1
    assert all((size * found.row_share).denominator == 1 and size * found.row_share >= 1 for size in sizes)


@given(
    factors=st.lists(st.fractions(QUARTER, 8, max_denominator=6), min_size=1, max_size=5),
    tokens=st.integers(1, 10**7),
    per_step=st.floats(1, 1e4),
)
def test_every_factor_trains_the_same_tokens_in_whole_steps(factors, tokens, per_step):
    base = base_steps_for(tokens, per_step, factors)
    assert base * per_step >= tokens * (1 - 1e-9)
    for factor in factors:
        steps = BranchBatch(factor, 1).steps(base)
        assert steps * factor == base
        assert steps % STEPS_UNIT == 0
