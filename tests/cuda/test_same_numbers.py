"""A run on the device reports what the same run reports on the CPU: every metric that is not a time, in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.on_device import train_here
from tests.support.runs import read_rows

pytestmark = pytest.mark.cuda
SETS = ("train.steps=6", "checkpoint.every=0", "eval.every=3", "eval.holdout_fraction=0.2", "metrics.per_depth=true")
TIMES = ("time/", "step_time", "smoothed/", "tokens_per_sec")
RUNS = {
    "layers": ("metrics.per_layer=true",),
    "head in chunks, states on the host": ("objective.chunk_tokens=16", 'ledger.placement="host"'),
    "packed, other starts": ("data.pack=true", "ledger.start=carried"),
    "delta rule, cells": ('model.family="gated_delta"', "train.tbptt_cells=2"),
    "probe, components": ("ledger.probe_every=3", "gns.components_every=3"),
}


@pytest.mark.parametrize("kind", RUNS)
def test_metrics_are_those_of_the_cpu(tmp_path: Path, chosen_device: torch.device, kind: str) -> None:
    places = {"cpu": torch.device("cpu"), "device": chosen_device}
    one, other = (
        read_rows(train_here(tmp_path / name, place, *SETS, *RUNS[kind]) / "metrics.jsonl")
        for name, place in places.items()
    )
    assert one.keys() == other.keys()
    off = {}
    for at, row in one.items():
        mine, its = ({name: v for name, v in each.items() if not name.startswith(TIMES)} for each in (row, other[at]))
        assert mine.keys() <= its.keys()  # a device has numbers of its own
        off |= {
            (at, name): (v, its[name]) for name, v in mine.items() if its[name] != pytest.approx(v, rel=1e-3, abs=1e-5)
        }
    assert off == {}
