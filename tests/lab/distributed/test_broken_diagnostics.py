"""A diagnostic that fails costs its own metrics and one warning; the run computes what it would have."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_process import train_here
from tests.support.runs import losses, read_rows, train, write_tiny_config
from trainer.training.step import TrainStep

EXTRA = """
per_source = true
per_layer = true
tensorboard = true

[objective]
token_types = true

[eval]
every = 3
batches = 2
holdout_fraction = 0.2
depth = true

[sample]
every = 3
tokens = 4
"""
# A function -> the guard that it fails in, and the metrics that are absent from the last row.
CASES = {
    "trainer.ledger.ledger:Ledger.drain_metrics": ("ledger metrics", ("ledger/", "ledger_")),
    "trainer.metrics.gradient_noise:GradientNoiseScale._measure": ("gns", ("gns/",)),
    "trainer.lab.extensions:LayerNumbers.gradient_ready": ("per_layer", ("layer/",)),
    "trainer.training.core_extensions:StepDetails._add_token_types": ("token_type", ("token_type/",)),
    "trainer.training.core_extensions:StepDetails._add_labels": ("per_source", ("source/", "modality/")),
    "trainer.lab.samples:Samples.at_boundary": ("sample", ()),
    "trainer.lab.depth:depths": ("eval.depth", ()),
    "trainer.lab.extensions:LossSpikes.update": ("spikes", ("loss_spike",)),
    "trainer.lab.tensorboard:TensorboardSink.log": ("tensorboard", ()),
    "trainer.tools.summary:ended": ("summary", ()),
}
NEEDED = ("trainer.ledger.ledger:Ledger.lookup", "trainer.metrics.sinks:JsonlSink.log")


def make_config(directory: Path) -> Path:
    config = write_tiny_config(directory, EXTRA)
    config.write_text(config.read_text().replace("[train]", "[train]\nspike_sigma = 6"))
    return config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_config(tmp_path_factory.mktemp("broken"))


@pytest.fixture(scope="module")
def whole(config: Path) -> Path:
    train_here(config, config.parent / "whole")
    return config.parent / "whole"


def run_with_broken(config: Path, run_dir: Path, name: str, patch: pytest.MonkeyPatch, *, code: int = 0) -> None:
    """A run in which a function raises from the first step on."""
    begun: list[int] = []
    accumulate = TrainStep.accumulate

    def begin(*args: Any, **options: Any) -> None:
        begun.append(1)
        accumulate(*args, **options)

    module, _, names = name.partition(":")
    *holders, attribute = names.split(".")
    place = importlib.import_module(module)
    for each in holders:
        place = getattr(place, each)
    original = getattr(place, attribute)

    def broken(*args: Any, **options: Any) -> Any:
        if begun:
            raise ArithmeticError("broken on purpose")
        return original(*args, **options)

    patch.setattr(TrainStep, "accumulate", begin)
    patch.setattr(place, attribute, broken)
    train_here(config, run_dir, code=code)


def last_row(run_dir: Path) -> dict[str, float]:
    rows = read_rows(run_dir / "metrics.jsonl")
    return rows["train", max(step for mode, step in rows if mode == "train")]


@pytest.mark.parametrize("name", CASES)
def test_a_failure_costs_its_own_metrics_and_is_said_once(config, whole, tmp_path, monkeypatch, name):
    run_with_broken(config, tmp_path / "run", name, monkeypatch)
    guard, absent = CASES[name]
    events = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    assert [event["name"] for event in events if event["event"] == "diagnostic_disabled"] == [guard]
    assert losses(tmp_path / "run" / "metrics.jsonl") == losses(whole / "metrics.jsonl")
    expected = last_row(whole)
    missing = {key for key in expected if key.startswith(absent)} if absent else set()
    assert len(missing) >= len(absent)
    assert last_row(tmp_path / "run").keys() == expected.keys() - missing


@pytest.mark.parametrize("name", NEEDED)
def test_what_is_no_diagnostic_ends_the_run(config, tmp_path, monkeypatch, name):
    run_with_broken(config, tmp_path / "run", name, monkeypatch, code=1)


ON_RANK_1 = """
import os
from trainer.metrics.gradient_noise import GradientNoiseScale
from trainer.model.encoder import build

measure = GradientNoiseScale._measure

def _measure(self, *args, **options):
    if os.environ.get("RANK") == "1":
        raise ArithmeticError("broken on purpose")
    return measure(self, *args, **options)

GradientNoiseScale._measure = _measure
"""


@pytest.mark.distributed
def test_a_noise_scale_that_fails_on_one_rank_is_absent_on_all(tmp_path):
    (tmp_path / "broken_on_one.py").write_text(ON_RANK_1)
    sets = ("model.target=broken_on_one:build", "model.contract=false")
    options: Any = {"nproc": 2, "extra": {"PYTHONPATH": str(tmp_path)}, "is_alone": True}
    said = train(make_config(tmp_path), tmp_path / "run", *sets, **options)
    assert said.count("gns failed and is off from now on") == 1
    assert not any(key.startswith("gns/") for key in last_row(tmp_path / "run"))
