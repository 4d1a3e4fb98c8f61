"""Skipped steps and recurrent state: nothing is behind, and `diagnose` names the cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.in_process import program
from tests.support.runs import read_rows, train, write_tiny_config
from trainer.training.checkpointing.tensor_files import read_rank

# In step 5, the logits of one micro-batch of rank 1 are NaN.
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
        if self.calls not in (9, 10) or os.environ["RANK"] != "1" or os.environ["SPOIL"] == "False":
            return output
        return ModelOutput(output.logits * float("nan"), output.state)

def build(vocab_size, dim, num_layers):
    return Spoiled(build_ours(vocab_size, dim=dim, num_layers=num_layers))
"""
# Weights that stay as they are, so that states depend on the data alone.
FROZEN = ("optimizer.lr=1e-30", "optimizer.weight_decay=0.0")


def trained(directory: Path, spoil: bool) -> tuple[dict[int, dict[str, float]], list[dict[str, torch.Tensor]]]:
    """The rows of 12 steps on two ranks, and the ledgers of both ranks at their end."""
    (directory / "spoiled.py").write_text(SPOILED)
    run_dir = directory / f"run-{spoil}"
    sets = ("model.target=spoiled:build", "model.contract=false", "train.on_non_finite=skip", "train.steps=12", *FROZEN)
    train(write_tiny_config(directory), run_dir, *sets, nproc=2, cwd=directory, extra={"SPOIL": str(spoil)})
    rows = {step: row for (_, step), row in read_rows(run_dir / "metrics.jsonl").items()}
    return rows, [read_rank(run_dir / "checkpoints" / "latest", rank)["ledger"] for rank in range(2)]


@pytest.mark.distributed
def test_states_after_a_skipped_step_are_those_of_a_run_that_skipped_none(tmp_path, capsys):
    whole, expected = trained(tmp_path, spoil=False)
    rows, ledgers = trained(tmp_path, spoil=True)
    assert [step for step, row in rows.items() if row["non_finite_steps"]] == [5]
    assert not any(row["non_finite_steps"] for row in whole.values())
    for ledger, other in zip(ledgers, expected, strict=True):
        assert torch.equal(ledger["groups"], other["groups"])
        assert torch.equal(ledger["last_step"], other["last_step"])
        torch.testing.assert_close(ledger["rows"], other["rows"])
    assert [row["ledger/cold_starts"] for row in rows.values()] == [0.0] * 12
    found = json.loads(program(["diagnose", tmp_path / "run-True", "--json"], capsys).stdout)["findings"]
    assert {"cold_starts", "refused_rows", "non_finite"}.intersection(found) == {"non_finite"}
