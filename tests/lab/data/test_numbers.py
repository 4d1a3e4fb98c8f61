"""Sequences of numbers: examples/sensors, float targets with unknown values, against plain PyTorch."""

from __future__ import annotations

import importlib
import json
import re
import sys
from itertools import islice

import numpy as np
import pytest
import torch

from tests.support.in_process import train_here
from tests.support.runs import EXAMPLES, read_rows

SHORT = (
    'metrics={log_interval=1,stdout="off"}',
    "model.contract=false",
    "train.steps=8",
    "eval.every=4",
    "eval.depth=true",
    'scheduler.name="constant"',
    "train.clip_grad_norm=0",
)
CONFIG = EXAMPLES / "sensors" / "sensors.toml"


@pytest.fixture
def sensors(monkeypatch):
    """The module of the example, which its config names."""
    monkeypatch.setattr(sys, "path", [str(CONFIG.parent), *sys.path])
    monkeypatch.delitem(sys.modules, "sensors", raising=False)
    return importlib.import_module("sensors")


def squared_errors(model, features, targets, state=None):
    """The sum over known values, their number, and the state, in plain PyTorch."""
    output = model(torch.as_tensor(features, dtype=torch.float32), state)
    wanted = torch.as_tensor(targets, dtype=torch.float32)
    known = ~wanted.isnan()
    return (output.logits[known] - wanted[known]).square().sum(), int(known.sum()), output.state


def test_the_example_trains_to_exact_numbers_resumes_and_is_evaluated(sensors, tmp_path, verb):
    checked = verb("check", "--config", CONFIG)
    assert checked.returncode == 0, checked.stderr
    assert "held: forward, purity, soak, carry, causality, isolation, gradient" in checked.stdout
    train_here(CONFIG, tmp_path / "whole", *SHORT)
    train_here(CONFIG, tmp_path / "parts", *SHORT, "train.steps=5")
    train_here(CONFIG, tmp_path / "parts", *SHORT, 'checkpoint.resume="auto"')
    whole, parts = (read_rows(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    for step in range(1, 9):
        assert whole["train", step]["loss"] == parts["train", step]["loss"]
    first, last, evaluated = whole["train", 1], whole["train", 8], whole["eval", 8]
    assert not [key for key in {*last, *evaluated} if re.search("bits_per|accuracy|perplexity|token_type", key)]
    # The first step: both of its micro-batches begin series.
    torch.manual_seed(0)
    model = sensors.Model(vocab_size=257, dim=32, num_layers=4)
    batches = islice(sensors.Sensors(rank=0, world_size=1, seed=0, seq_len=16), 2)
    sums, counts, _ = zip(*(squared_errors(model, each["features"], each["targets"]) for each in batches), strict=True)
    loss = sum(sums) / sum(counts)
    loss.backward()
    norm = torch.cat([each.grad.flatten() for each in model.parameters()]).norm()
    assert first["tokens_in_step"] == sum(counts) < 2 * 4 * 16 * 4
    assert (first["loss"], first["grad_norm"]) == pytest.approx((float(loss), float(norm)), rel=2e-6)
    assert {"gns/tr_sigma", "eval/held/depth/beyond_cell/carry_gain"} <= {*last, *evaluated}
    assert last.get("gns/left_out", 0) == 0  # which consecutive cells of a series would be
    ended = verb("eval", tmp_path / "whole", "--trust-code", "--json")
    assert json.loads(ended.stdout)["metrics"] == evaluated
    # The evaluation: series by series, with the error of a ratio of sums over them.
    weights = importlib.import_module("trainer.tools.saved_model").read_checkpoint(tmp_path / "whole").weights
    model.load_state_dict(weights)
    units, states = {}, {}
    for each in sensors.Sensors(rank=0, world_size=1, seed=1, seq_len=16, batches=60):
        for row, group in enumerate(each["group_ids"]):
            features, targets = (each[key][row : row + 1] for key in ("features", "targets"))
            with torch.no_grad():
                total, count, states[group] = squared_errors(model, features, targets, states.get(group))
            units[group] = units.get(group, 0) + np.array([float(total), count])
    table = np.array([*units.values()])
    assert evaluated["eval/held/loss"] == pytest.approx(table[:, 0].sum() / table[:, 1].sum(), rel=2e-6)
    residuals = table[:, 0] - evaluated["eval/held/loss"] * table[:, 1]
    plain = np.sqrt((residuals**2).sum() * 40 / 39) / table[:, 1].sum()
    assert evaluated["eval/held/loss_se"] == pytest.approx(plain, rel=0.05)  # t of 39 for the normal


MISTAKES = """
import torch
from sensors import Model

class Looks(Model):
    def forward(self, features, state=None):
        return super().forward(features + features.mean(1, keepdim=True), state)

class Plain:
    def __call__(self, output, targets):
        return (output - targets).square()
"""


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("model.target='mistakes:Looks'", "mistakes:Looks: breaks causality: changing the tokens from position"),
        ("objective.target='mistakes:Plain'", "the gradient is not finite: compute with targets.nan_to_num()"),
        ("objective={}", "objective.target: is not set, and the targets are floats"),
    ],
)
def test_the_model_and_the_loss_are_judged_on_the_first_batch(sensors, tmp_path, monkeypatch, verb, setting, problem):
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    ended = verb("check", "--config", CONFIG, "--set", setting)
    assert (ended.returncode, problem in ended.stderr) == (2, True), ended.stderr
