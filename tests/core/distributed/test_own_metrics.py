"""Metrics of a user's own data sets, and a component of the loss: what is wrong with one, on several ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.runs import read_rows, train, write_tiny_config

pytestmark = pytest.mark.distributed

MODULE = """
import numpy as np

class Own:
    def __init__(self, rank, world_size, seed, seq_len):
        self.rank, self.seq_len, self.count = rank, seq_len, 0
    def __iter__(self):
        while True:
            self.count += 1
            tokens = (self.count + np.arange(self.seq_len))[None] % 50
            yield {"tokens": tokens, "targets": (tokens + 1) % 50}

class Names(Own):
    @property
    def metric_keys(self):
        own = ["my/first"] if self.rank == 0 else ["my/second", "my/third"]
        return [*own, "my/both", "", None, 7, ["x"], "gns/b_simple", "non_finite_steps", "lr", "eval_loss"]
    def drain_step_metrics(self):
        reserved = {key: -7.0 for key in self.metric_keys[-8:] if not isinstance(key, list)}
        return {**reserved, **{key: 1.0 + self.rank for key in self.metric_keys if str(key).startswith("my/")}}

class NoNames(Own):
    drain_step_metrics, metric_keys = dict, "my/text"

class Values(Own):
    metric_keys = ("my/both", "my/huge", "stream_mixing/refill/exhaust_events")
    def drain_step_metrics(self):
        huge = 10**400 if self.rank == 1 else 1.0
        return {"my/both": 1.0 + self.rank, "my/huge": huge, "stream_mixing/refill/exhaust_events": huge}

class Fails(Own):
    metric_keys = ("my/mean", "stream_mixing/active/steps_since_pick_max")
    def drain_step_metrics(self):
        if self.rank == 1 and self.count > 1:
            raise ValueError("no metrics")
        return dict.fromkeys(self.metric_keys, 1.0 + self.rank)
"""
READERS = ("stream_mixing/active/modalities/a", "stream_mixing/active/modalities/b")
SHARED = ("stream_mixing/refill/exhaust_events", "stream_mixing/active/steps_since_pick_max")


def trained(tmp_path, *kinds):
    """The rows of six steps on two ranks, with two data sets of one's own beside two of ours, and stderr."""
    (tmp_path / "own_metrics.py").write_text(MODULE)
    config = write_tiny_config(tmp_path)
    own = [f'[[data.source]]\nname = "{kind.lower()}"\ntarget = "own_metrics:{kind}"\n' for kind in kinds]
    config.write_text(config.read_text() + "\n" + "\n".join(own))
    said = train(config, tmp_path / "run", "train.micro_batches=6", nproc=2, extra={"PYTHONPATH": str(tmp_path)})
    rows = {step: row for (_, step), row in read_rows(tmp_path / "run" / "metrics.jsonl").items()}
    assert len(rows) == 6
    assert sum(rows[6][key] for key in READERS) == 8.0, "two readers of each of our sources on each rank"
    assert all(row["non_finite_steps"] == 0.0 for row in rows.values())
    return rows, said


def test_names_are_agreed_on_and_those_that_are_none_or_the_trainer_s_cost_one_warning_each(tmp_path):
    rows, said = trained(tmp_path, "Names", "NoNames")
    own = {"my/both": 1.5, "my/first": 1.0, "my/second": 2.0, "my/third": 2.0}
    assert {key: value for key, value in rows[6].items() if key.startswith("my/")} == own
    assert not any(value == -7.0 for row in rows.values() for value in row.values())
    lines = [line for line in said.splitlines() if "ranks report unlike metrics" in line]
    assert ["my/second, my/third" in line for line in lines] == [True, False]
    for key in ("gns/b_simple", "non_finite_steps", "lr", "eval_loss"):
        assert said.count(f"metric '{key}' is left out: the trainer reports a metric of this name itself") == 2  # ranks
    assert said.count("the name of a metric must be a text that is not empty") == 2 * 4
    assert (
        said.count("metrics of the source nonames failed and is off from now on: TypeError: metric_keys must be") == 2
    )
    assert said.count("metrics of the source nonames failed during the run; what it reports is missing") == 2
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (event,) = (event for event in events if event["event"] == "diagnostic_disabled")  # before the file was open
    assert event["name"] == "metrics of the source nonames"
    assert event["error"] == "TypeError: metric_keys must be a tuple of texts, got 'my/text'"
    assert "in _keys_of" in event["traceback"]


def test_a_bad_value_and_a_drain_that_raises_cost_their_own_keys_and_no_total_lies(tmp_path):
    rows, said = trained(tmp_path, "Values", "Fails")
    assert rows[6]["my/both"] == 1.5
    assert rows[6]["my/huge"] == rows[6]["my/mean"] == 1.0  # means, over the rank that has them
    assert not rows[6].keys() & set(SHARED)
    assert said.count("metric 'my/huge' is left out: must be a number, got 1000") == 1
    assert said.count(" failed and is off from now on") == 1
    assert said.count("metrics of the source fails failed and is off from now on: ValueError: no metrics") == 1


SPOILED = """
import os
import torch
from trainer.model.encoder import build
from trainer.model.protocol import ModelOutput

class Spoiled(torch.nn.Module):
    def __init__(self, vocab_size, dim, num_layers):
        super().__init__()
        self.inner, self.calls = build(vocab_size, dim, num_layers), 0
        self.state_width = self.inner.state_width
    def forward(self, tokens, state=None):
        output, self.calls = self.inner(tokens, state=state), self.calls + 1
        if self.calls == 4 and os.environ["RANK"] == "1":
            return ModelOutput(output.logits[:, 1:], output.state)
        return output
"""


def test_a_component_of_the_loss_that_fails_on_one_rank_stops_the_run_with_its_name_and_batch(tmp_path):
    (tmp_path / "spoiled.py").write_text(SPOILED)
    sets, extra = ("model.target=spoiled:Spoiled", "model.contract=false"), {"PYTHONPATH": str(tmp_path)}
    output = train(write_tiny_config(tmp_path), tmp_path / "run", *sets, nproc=2, code=1, extra=extra)
    output = [line for line in output.splitlines() if "ObjectiveError: objective component" in line]
    (said,) = [line for line in output if line.startswith("trainer.")]  # its own, with the traceback
    assert all("rank 1 failed" in line for line in output if line != said)
    shapes = re.search(r"objective component token_ce: logits \((\d), 15, 257\) do not fit targets \((\d), 16\)", said)
    assert shapes is not None, said
    assert shapes[1] == shapes[2]
    meta = json.loads(said.split("; batch: ", 1)[1])
    modality, stream = {"first": "a", "second": "b"}[meta["source"]], meta["stream"]
    assert list((tmp_path / "corpus" / modality).glob(Path(stream).name)), "the batch's stream is one that exists"
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert status["reason"].startswith("rank 1 failed: ObjectiveError: objective component token_ce")
