"""The one noise scale that report and diagnosis speak of."""

from __future__ import annotations

import pytest

from tests.support.records import record_of
from trainer.tools.runs.noise_scale import NoiseScale, noise_scale_of, why_unknown


def record(rows):
    return record_of({step: {"gns/b_big": 16.0, **row} for step, row in rows.items()})


def test_it_is_that_of_the_last_row_or_of_the_last_by_a_step():
    rows = {n: {"gns/b_now": 1.0 * n, "gns/b_now_low": n / 2, "gns/b_now_high": 2.0 * n} for n in (5, 10, 15)}
    run = record(rows)
    assert noise_scale_of(run, by=12) == NoiseScale("gns/b_now", 10, 16.0, 5.0, 10.0, 20.0, None)
    found = noise_scale_of(run)
    assert found is not None
    assert found.step == 15
    assert noise_scale_of(run, by=4) is None


@pytest.mark.parametrize(
    ("row", "number", "is_known"),
    [
        ({"gns/b_now_low": 0.0, "gns/b_now_steps": 8.0}, "not known yet", False),
        ({"gns/b_now_low": 0.5}, "at least 0.5", True),
        ({"gns/b_now_low": 0.0, "gns/b_now_high": 9.0}, "0 to 9", True),
        ({"gns/b_now_low": 0.0, "gns/b_now": 3.0, "gns/b_now_high": 9.0}, "3 (0 to 9)", True),
    ],
)
def test_a_lower_bound_of_0_alone_is_no_number_and_with_an_upper_one_it_is(row, number, is_known):
    found = noise_scale_of(record({5: row}))
    assert found is not None
    assert (found.number, found.is_known) == (number, is_known)
    why = "not known yet: neither a lower nor an upper bound"
    assert why_unknown(record({5: row})) == ("" if is_known else why)


@pytest.mark.parametrize(
    ("enabled", "micro_batches", "ranks", "words"),
    [
        (False, 2, 2, "not measured: gns.enabled = false"),
        (True, 1, 1, "not measured: one micro-batch per step on one rank has a single batch size"),
        (True, 1, 2, "not known yet: no row has it"),
        (True, {"schedule": "step", "points": {"0": 1, "9": 2}}, 1, "not known yet: no row has it"),
        (None, None, None, ""),
    ],
)
def test_a_run_without_one_says_why(enabled, micro_batches, ranks, words):
    config = {} if enabled is None else {"gns": {"enabled": enabled}, "train": {"micro_batches": micro_batches}}
    run = record_of({1: {"loss": 3.0}}, config=config, environment={"world_size": ranks} if config else {})
    assert noise_scale_of(run) is None
    assert why_unknown(run).startswith(words)
    assert bool(words) == bool(why_unknown(run))
