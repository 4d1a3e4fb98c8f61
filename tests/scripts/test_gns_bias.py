"""The noise scale of rows that continue documents is that of independent rows; `scripts/gns_bias.py` has more settings."""

from __future__ import annotations

import pytest

from scripts.gns_bias import Setting, run

FEW = {"length": 16, "documents": 768, "files": 48, "trained": 10, "steps": 24}


@pytest.mark.cuda
@pytest.mark.parametrize(
    "setting",
    [
        Setting("carried", rows=4, m=4, sizes=(2.0, 4.3), spread=4, **FEW),
        Setting("aligned, 2 shards", rows=2, m=4, sizes=(0.6, 2.3), spread=8, shards=2, runs_on=False, **FEW),
    ],
    ids=lambda setting: setting.name,
)
def test_it_is_that_of_independent_rows_and_its_bounds_hold(setting, device):
    found = run(setting, str(device), seeds=6, num_rows=1200)
    assert found["spread"] == setting.spread
    away = abs(found["b"] - found["truth"])
    assert away < 0.15 * found["truth"] + 2 * (found["b_se"] ** 2 + found["truth_se"] ** 2) ** 0.5, found
    # Of 12 or so, in pairs of one run, against a truth that has an error itself.
    assert found["covered"] >= 0.6 * found["bounds"] > 4, found


def test_where_documents_are_too_few_there_is_no_value():
    found = run(Setting("few", rows=4, m=4, length=16, documents=32, files=8, steps=6), seeds=1, num_rows=40)
    assert found["groups"] < 4
    assert "b" not in found
    assert "rows of the same document" in found["reason"]
