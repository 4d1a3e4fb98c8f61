"""The one noise scale that report and diagnosis speak of."""

from __future__ import annotations

import pytest

from tests.support.records import record_of
from trainer.tools.runs.readings import NoiseScale, noise_scale_of


def record(**columns):
    rows = {"b_big": 16.0, "b_now_steps": 30.0, **columns}
    return record_of({f"gns/{key}": [value] for key, value in rows.items()})


def test_it_is_that_of_the_last_row_with_a_batch():
    ends = {"": 1, "_low": 0.5, "_high": 2, "_steps": 3}
    rows = {f"gns/b_now{end}": {5: 5.0 * n, 10: 10.0 * n} for end, n in ends.items()}
    run = record_of({"gns/b_big": {5: 16.0, 10: 16.0}, **rows})
    assert noise_scale_of(run) == NoiseScale(10, 16.0, 5.0, 10.0, 20.0, 30)
    assert noise_scale_of(record_of({"gns/b_big": {5: 16.0, 11: 16.0}, **rows})) is None


@pytest.mark.parametrize(
    ("row", "number", "is_known"),
    [
        ({"b_now_low": 0.0}, "at least 0", False),
        ({"b_now_low": 0.5}, "at least 0.5", True),
        ({"b_now_low": 0.0, "b_now": 3.0, "b_now_high": 9.0}, "3 (0 to 9)", True),
    ],
)
def test_a_lower_bound_of_0_alone_is_no_number_and_with_an_upper_one_it_is(row, number, is_known):
    found = noise_scale_of(record(**row))
    assert found is not None
    assert (found.number, found.is_known) == (number, is_known)
