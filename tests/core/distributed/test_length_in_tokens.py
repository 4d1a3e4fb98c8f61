"""`train.tokens`: a run ends within two steps of it, decays by it, and resumes bit for bit, whatever is read early."""

from __future__ import annotations

import itertools

import pytest

from tests.support.ranks import checkpoint_differences
from tests.support.runs import read_rows, train, write_tiny_config

pytestmark = pytest.mark.distributed


LINEAR = (
    'scheduler.name="linear"',
    "scheduler.min_lr_ratio=0.0",
    "scheduler.warmup_tokens=600",
    "scheduler.warmup_steps=0",
)
EXTRA = "\n[checkpoint]\nevery = 3\nkeep_last = 100\n"


def start(tmp_path, name, *sets, nproc=2, more=()):
    """The run's directory, and its rows."""
    own = ("train.steps=0", "train.tokens=3000", *LINEAR, *sets)
    train(write_tiny_config(tmp_path, EXTRA), tmp_path / name, *own, nproc=nproc, more=more, cwd=tmp_path)
    rows = read_rows(tmp_path / name / "metrics.jsonl")
    return tmp_path / name, {step: row for (mode, step), row in rows.items() if mode == "train"}


def test_it_ends_within_two_steps_and_goes_on_with_more_tokens_on_another_number_of_ranks(tmp_path):
    whole, rows = start(tmp_path, "whole")
    seen = [0, *(row["tokens_seen"] for row in rows.values())]
    full = 2 * 2 * 4 * 16  # ranks, micro-batches, rows, tokens
    assert 3000 - 2 * full <= seen[-1] < 3000 + full
    assert any(after - before < full for before, after in itertools.pairwise(seen)), "all batches are full"
    said = train(whole / "config.resolved.toml", whole, nproc=2, more=("--resume", "auto"), cwd=tmp_path)
    assert "train.tokens = 3000: nothing is left to do" in said
    train(whole / "config.resolved.toml", whole, "train.tokens=4000", more=("--resume", "auto"), cwd=tmp_path)
    more = read_rows(whole / "metrics.jsonl")
    assert 4000 - 256 <= more[max(more)]["tokens_seen"] < 4000 + 128


# Some micro-batches, whichever rank reads them and whenever, make the model give NaN.
SPOILED = """
import torch
from torch import nn
from trainer.model.protocol import ModelOutput

class Bigram(nn.Module):
    state_width = 0
    def __init__(self, vocab_size, dim, num_layers):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)
    def forward(self, tokens, state=None):
        return ModelOutput(self.table(tokens) * torch.where(tokens.sum() % 9 == 0, float("nan"), 1.0), None)
"""


def test_the_tokens_of_skipped_steps_do_not_count_and_a_resume_between_them_is_the_whole_run(tmp_path):
    (tmp_path / "spoiled.py").write_text(SPOILED)
    own = ("model.target=spoiled:Bigram", "model.contract=false", "train.on_non_finite=skip")
    whole, rows = start(tmp_path, "whole", *own)
    bad = [step for step, row in rows.items() if row["non_finite_steps"]]
    assert {6, 7}.issubset(bad), "on both sides of the checkpoint below"
    trained = {step: 0 if step in bad else row["tokens_in_step"] for step, row in rows.items()}
    seen = [0, 0]
    for step, row in rows.items():
        seen.append(row["tokens_seen"])
        assert row["tokens_seen"] == sum(trained[each] for each in range(1, step + 1)), step
        assert row["tokens_in_step"] > 0
        reached = min(seen[step - 1] + min(step, 2) * 256, 3000)
        expected = reached / 600 if reached <= 600 else (3000 - reached) / 2400
        assert row["lr"] == pytest.approx(1e-3 * expected, abs=1e-12), step
    assert 3000 - 2 * 256 <= seen[-1] < 3000 + 256
    middle = whole / "checkpoints" / "step_00000006"
    resumed, again = start(tmp_path, "resumed", *own, more=("--resume", middle))
    for step, row in again.items():
        assert (row["tokens_seen"], row["lr"]) == (rows[step]["tokens_seen"], rows[step]["lr"])
    seldom, few = start(tmp_path, "seldom", *own, "metrics.log_interval=7", "checkpoint.every=0")
    assert few[max(few)]["tokens_seen"] == rows[max(rows)]["tokens_seen"]
    for other in (resumed, seldom):
        assert not checkpoint_differences(whole / "checkpoints" / "latest", other / "checkpoints" / "latest")
