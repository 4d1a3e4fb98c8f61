"""`train.tokens`: a run ends within two steps of it, decays by it, and resumes bit for bit, whatever is read early."""

from __future__ import annotations

import itertools

import pytest

from tests.support.ranks import checkpoint_differences
from tests.support.runs import read_rows, run, write_tiny_config

pytestmark = pytest.mark.distributed


def train(tmp_path, name, *sets, nproc=2, more=()):
    config = write_tiny_config(tmp_path, "\n[checkpoint]\nevery = 3\nkeep_last = 100\n")
    text = config.read_text().replace("steps = 6", "tokens = 3000")
    assert "tokens = 3000" in text
    config.write_text(text)
    options = [word for each in sets for word in ("--set", each)]
    done = run("--config", config, "--run-dir", tmp_path / name, *options, *more, nproc=nproc, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / name / "metrics.jsonl")
    return tmp_path / name, {step: row for (mode, step), row in rows.items() if mode == "train"}, done.stderr


LINEAR = (
    'scheduler.name="linear"',
    "scheduler.min_lr_ratio=0.0",
    "scheduler.warmup_tokens=600",
    "scheduler.warmup_steps=0",
)


def test_it_ends_within_two_steps_and_the_rate_follows_the_tokens(tmp_path):
    _, rows, _ = train(tmp_path, "run", *LINEAR, "optimizer.lr=0.01")
    last = max(rows)
    seen = [0, 0, *(rows[step]["tokens_seen"] for step in range(1, last + 1))]
    full = 2 * 2 * 4 * 16  # ranks, micro-batches, rows, tokens
    assert 3000 - 2 * full <= seen[-1] < 3000 + full
    assert any(after - before < full for before, after in itertools.pairwise(seen[1:])), "all batches are full"
    for step, row in rows.items():
        reached = min(seen[step - 1] + min(step, 2) * full, 3000)
        expected = reached / 600 if reached <= 600 else (3000 - reached) / 2400
        assert row["lr"] == pytest.approx(0.01 * expected, abs=1e-12), step


def test_a_resumed_run_and_one_that_logs_seldom_end_at_the_same_weights(tmp_path):
    whole, rows, _ = train(tmp_path, "whole", *LINEAR)
    middle = (max(rows) // 6) * 3
    start = whole / "checkpoints" / f"step_{middle:08d}"
    resumed, again, _ = train(tmp_path, "resumed", *LINEAR, more=("--resume", start))
    assert max(again) == max(rows)
    assert {step: row["loss"] for step, row in again.items()} == {
        step: row["loss"] for step, row in rows.items() if step > middle
    }
    assert not checkpoint_differences(whole / "checkpoints" / "latest", resumed / "checkpoints" / "latest")
    seldom, few, _ = train(tmp_path, "seldom", *LINEAR, "metrics.log_interval=7", "checkpoint.every=0")
    assert max(few) == max(rows)
    assert few[max(few)]["loss"] == rows[max(rows)]["loss"]
    assert not checkpoint_differences(whole / "checkpoints" / "latest", seldom / "checkpoints" / "latest")
    # Nothing is left to do; with more tokens it goes on, and on one rank too.
    _, _, said = train(tmp_path, "whole", *LINEAR, more=("--resume", "auto"))
    assert "train.tokens = 3000: nothing is left to do" in said
    _, more, _ = train(tmp_path, "whole", *LINEAR, "train.tokens=4000", nproc=None, more=("--resume", "auto"))
    assert 4000 - 256 <= more[max(more)]["tokens_seen"] < 4000 + 128


@pytest.mark.parametrize(
    ("sets", "text"),
    [
        (("train.steps=0",), "how long is the run? set steps, or tokens"),
        (("train.tokens=100000",), "train.steps: 6 beside train.tokens = 100,000: both say how long the run is"),
        (("scheduler.warmup_tokens=60", "scheduler.warmup_steps=0"), "needs a run whose length is in tokens"),
        (
            ("scheduler.warmup_tokens=60", "train.tokens=500", "train.steps=0"),
            "warmup_steps and warmup_tokens say the same",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path, sets, text):
    options = [part for pair in sets for part in ("--set", pair)]
    done = run("check", "--config", write_tiny_config(tmp_path), *options)
    assert done.returncode == 2
    assert text in done.stderr


def test_check_and_preview_say_the_least_number_of_steps(tmp_path):
    config = write_tiny_config(tmp_path)
    sets = ("--set", "train.tokens=6400", "--set", "train.steps=0")
    found = run("check", "--config", config, *sets, "--nproc", "2")
    assert "#   steps = 25" in found.stdout, found.stdout + found.stderr
    assert run("preview", "--config", config, *sets).returncode == 0


# Some micro-batches, whichever rank reads them and whenever, make the model give NaN.
SPOILED = """
import torch
from torch import nn
from trainer.model.protocol import ModelOutput

class Bigram(nn.Module):
    state_width = 0
    def __init__(self, vocab_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)
    def forward(self, tokens, state=None):
        return ModelOutput(self.table(tokens) * torch.where(tokens.sum() % 9 == 0, float("nan"), 1.0), None)

def model(vocab_size, dim, num_layers):
    return Bigram(vocab_size)
"""


def test_the_tokens_of_skipped_steps_do_not_count_and_a_resume_between_them_is_the_whole_run(tmp_path):
    (tmp_path / "spoiled.py").write_text(SPOILED)
    own = ("model.target=spoiled:model", "model.contract=false", "train.on_non_finite=skip", *LINEAR)
    whole, rows, _ = train(tmp_path, "whole", *own)
    bad = [step for step, row in rows.items() if row["non_finite_steps"]]
    assert {6, 7, 11, 12}.issubset(bad), "on both sides of the checkpoints below"
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
    for after in (6, 12):
        start = whole / "checkpoints" / f"step_{after:08d}"
        resumed, again, _ = train(tmp_path, f"resumed {after}", *own, more=("--resume", start))
        for step, row in again.items():
            assert (row["tokens_seen"], row["lr"]) == (rows[step]["tokens_seen"], rows[step]["lr"])
        assert not checkpoint_differences(whole / "checkpoints" / "latest", resumed / "checkpoints" / "latest"), after
    seldom, few, _ = train(tmp_path, "seldom", *own, "metrics.log_interval=7", "checkpoint.every=0")
    assert few[max(few)]["tokens_seen"] == rows[max(rows)]["tokens_seen"]
    assert not checkpoint_differences(whole / "checkpoints" / "latest", seldom / "checkpoints" / "latest")
