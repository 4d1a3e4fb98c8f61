"""The noise scale beside the branches is that of the checkpoint's rows."""

from __future__ import annotations

from pathlib import Path

from trainer.branching.noise import NoiseScale, noise_scale_at
from trainer.runs.load import RunRecord
from trainer.runs.table import RowTable


def record(rows):
    table = RowTable(merge_same_step=False)
    for step, values in rows.items():
        table.add(step, 0, tuple(values), values.values())
    return RunRecord(Path("run"), table, RowTable(merge_same_step=True))


def test_it_is_the_last_row_by_then():
    run = record(
        {n: {"gns/b_simple": float(n), "gns/b_simple_low": n / 2, "gns/b_simple_high": 2.0 * n} for n in (5, 10, 15)}
    )
    assert noise_scale_at(run, 12) == NoiseScale("gns/b_simple", 10, 10.0, 5.0, 20.0)


def test_a_lower_bound_alone_is_told_without_a_value_of_an_earlier_row():
    run = record({5: {"gns/b_simple": 4.0, "gns/b_simple_low": 3.0}, 10: {"gns/b_simple_low": 6.0}})
    assert noise_scale_at(run, 10) == NoiseScale("gns/b_simple", 10, None, 6.0, None)


def test_the_estimate_for_the_moment_is_preferred():
    run = record({5: {"gns/b_simple": 4.0, "gns/b_now": 9.0, "gns/b_now_low": 7.0}})
    assert noise_scale_at(run, 5) == NoiseScale("gns/b_now", 5, 9.0, 7.0, None)


def test_without_rows_by_then_there_is_none():
    assert noise_scale_at(record({5: {"gns/b_simple": 4.0}}), 4) is None
    assert noise_scale_at(record({5: {"loss": 4.0}}), 5) is None
