"""Skipped steps and recurrent state: nothing is behind, what is lost is counted, and `diagnose` names the cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.in_process import program
from tests.support.runs import read_rows, train, write_tiny_config
from trainer.training.checkpointing.tensor_files import read_rank

# In step 5, one micro-batch of rank 1 gives NaN: in its logits, or in the states as well.
SPOILED = """
import os
import torch
from torch import nn
from trainer.model import build as build_ours
from trainer.model.protocol import ModelOutput

class Spoiled(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls, self.state_width = inner, 0, inner.state_width
    def forward(self, tokens, state=None):
        self.calls += self.training
        output = self.inner(tokens, state=state)
        if self.calls not in (9, 10) or os.environ["RANK"] != "1" or os.environ["SPOIL"] == "None":
            return output
        nan = float("nan")
        return ModelOutput(output.logits * nan, output.state * nan if os.environ["SPOIL"] == "states" else output.state)

def build(vocab_size, dim, num_layers):
    return Spoiled(build_ours(vocab_size, dim=dim, num_layers=num_layers))
"""
# Weights that stay as they are, so that states depend on the data alone.
FROZEN = ("optimizer.lr=1e-30", "optimizer.weight_decay=0.0")


def trained(directory: Path, spoil: str | None) -> tuple[dict[int, dict[str, float]], list[dict[str, torch.Tensor]]]:
    """The rows of 12 steps on two ranks, and the ledgers of both ranks at their end."""
    (directory / "spoiled.py").write_text(SPOILED)
    run_dir = directory / f"run-{spoil}"
    sets = ("model.target=spoiled:build", "model.contract=false", "train.on_non_finite=skip", "train.steps=12", *FROZEN)
    train(write_tiny_config(directory), run_dir, *sets, nproc=2, cwd=directory, extra={"SPOIL": str(spoil)})
    rows = {step: row for (_, step), row in read_rows(run_dir / "metrics.jsonl").items()}
    return rows, [read_rank(run_dir / "checkpoints" / "latest", rank)["ledger"] for rank in range(2)]


def findings(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Rule -> the key that it advises to change."""
    found = json.loads(program(["diagnose", run_dir, "--json"], capsys).stdout)["rules"]
    return {each["rule"]: str((each["knob"] or {}).get("key")) for each in found if each["verdict"] == "finding"}


@pytest.mark.distributed
def test_states_after_a_skipped_step_are_those_of_a_run_that_skipped_none(tmp_path, capsys):
    whole, expected = trained(tmp_path, None)
    rows, ledgers = trained(tmp_path, "logits")
    assert [step for step, row in rows.items() if row["non_finite_steps"]] == [5]
    assert not any(row["non_finite_steps"] for row in whole.values())
    for ledger, other in zip(ledgers, expected, strict=True):
        assert torch.equal(ledger["groups"], other["groups"])
        assert torch.equal(ledger["last_step"], other["last_step"])
        torch.testing.assert_close(ledger["rows"], other["rows"])
    assert [row["ledger/cold_starts"] for row in rows.values()] == [0.0] * 12
    assert findings(tmp_path / "run-logits", capsys).keys() & {"cold_starts", "refused_rows", "non_finite"} == {
        "non_finite"
    }


@pytest.mark.distributed
def test_states_that_are_not_finite_are_counted_and_no_capacity_is_advised(tmp_path, capsys):
    rows, ledgers = trained(tmp_path, "states")
    assert rows[5]["ledger/refused_rows"] > 0
    lost = sum(row["ledger/cold_starts"] for row in rows.values())
    assert 0 < lost <= sum(row["ledger/refused_rows"] for row in rows.values())
    assert all(ledger["rows"].isfinite().all() for ledger in ledgers)
    found = findings(tmp_path / "run-states", capsys)
    assert {"non_finite", "refused_rows"} <= found.keys()
    assert "ledger.capacity" not in found.values()
