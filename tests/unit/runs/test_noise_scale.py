"""The one noise scale that report, diagnosis and `train cbs` speak of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainer.tools.runs.load import RunRecord
from trainer.tools.runs.noise_scale import NoiseScale, noise_scale_of, why_unknown
from trainer.tools.runs.table import RowTable


def record(rows: dict[int, dict[str, float]]) -> RunRecord:
    table = RowTable(merge_same_step=False)
    for step, values in rows.items():
        row = {"gns/b_big": 16.0, **values}
        table.add(step, 0, tuple(row), row.values())
    return RunRecord(Path("run"), table, RowTable(merge_same_step=True))


def test_it_is_that_of_the_last_row_or_of_the_last_by_a_step() -> None:
    rows = {n: {"gns/b_now": 1.0 * n, "gns/b_now_low": n / 2, "gns/b_now_high": 2.0 * n} for n in (5, 10, 15)}
    run = record(rows)
    assert noise_scale_of(run, by=12) == NoiseScale("gns/b_now", 10, 16.0, 5.0, 10.0, 20.0, None)
    found = noise_scale_of(run)
    assert found is not None
    assert found.step == 15
    assert noise_scale_of(run, by=4) is None


def test_a_lower_bound_of_0_alone_is_no_number_and_with_an_upper_one_it_is() -> None:
    run = record({5: {"gns/b_now_low": 0.0, "gns/b_now_steps": 8.0}})
    found = noise_scale_of(run)
    assert found is not None
    assert not found.is_known
    assert found.number == "not known yet"
    why = "not known yet: neither a lower nor an upper bound (gns/b_now at step 5, from the last 8 steps)"
    assert why_unknown(run) == why
    for row, number in (
        ({"gns/b_now_low": 0.5}, "at least 0.5"),
        ({"gns/b_now_low": 0.0, "gns/b_now_high": 9.0}, "0 to 9"),
        ({"gns/b_now_low": 0.0, "gns/b_now": 3.0, "gns/b_now_high": 9.0}, "3 (0 to 9)"),
    ):
        found = noise_scale_of(record({5: row}))
        assert found is not None
        assert found.is_known
        assert found.number == number
        assert why_unknown(record({5: row})) == ""


@pytest.mark.parametrize(
    ("enabled", "micro_batches", "ranks", "words"),
    [
        (False, 2, 2, "not measured: gns.enabled = false"),
        (True, 1, 1, "not measured: one micro-batch per step on one rank has a single batch size"),
        (True, 1, 2, "not known yet: no row has it"),
        (True, {"schedule": "auto", "start": 1}, 1, "not known yet: no row has it"),
        (None, None, None, ""),
    ],
)
def test_a_run_without_one_says_why(enabled: bool | None, micro_batches: Any, ranks: int | None, words: str) -> None:
    table = RowTable(merge_same_step=False)
    table.add(1, 0, ("loss",), (3.0,))
    run = RunRecord(Path("run"), table, RowTable(merge_same_step=True))
    if enabled is not None:
        config = {"gns": {"enabled": enabled}, "train": {"micro_batches": micro_batches}}
        run = replace(run, config=config, environment={"world_size": ranks})
    assert noise_scale_of(run) is None
    assert why_unknown(run).startswith(words)
    assert bool(words) == bool(why_unknown(run))
