"""Families of `[model]` on two ranks: they train, resume bit for bit, and leave in the format of their own world."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from tests.support.grouped import run, train
from tests.support.ranks import checkpoint_differences
from tests.support.runs import FULL_ROWS, read_rows, write_tiny_config
from trainer.tools.trained.saved_model import load_model

pytestmark = pytest.mark.distributed
SEQ_LEN = 16  # of write_tiny_config
needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="extra hf")
SIZES = {
    "gated_delta": "{heads=2}",
    "transformer": "{heads=2, kv_heads=1}",
    "gru": "{}",
    "lstm": "{dropout=0.1}",
    "mamba2": "{num_heads=2, head_dim=16, state_size=8, chunk_size=8}",
}


def start(tmp_path, name, family, *sets, more=()):
    options = (f"model.family={family}", f"model.args={SIZES[family]}", "checkpoint.every=3", *sets)
    train(write_tiny_config(tmp_path), tmp_path / name, *options, nproc=2, more=more)
    return tmp_path / name


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        ("gated_delta", FULL_ROWS),
        ("transformer", FULL_ROWS),
        pytest.param("gated_delta", "data.mixing.repeat=true", marks=pytest.mark.slow),
        pytest.param("gru", "data.mixing.repeat=true", marks=pytest.mark.slow),
        pytest.param("lstm", "data.mixing.repeat=true", marks=pytest.mark.slow),
        pytest.param("mamba2", FULL_ROWS, marks=[pytest.mark.slow, needs_transformers]),
    ],
)
def test_a_run_resumes_bit_for_bit(tmp_path, family, rows):
    sets = (rows, "eval.every=3", "eval.holdout_fraction=0.2", 'scheduler.name="constant"')
    whole = start(tmp_path, "whole", family, *sets)
    middle = whole / "checkpoints" / "step_00000003"
    resumed = start(tmp_path, "resumed", family, *sets, more=("--resume", middle))
    assert checkpoint_differences(whole / "checkpoints" / "latest", resumed / "checkpoints" / "latest") == []
    keys = read_rows(whole / "metrics.jsonl")["train", 6].keys()
    assert ("ledger/cold_starts" in keys) == (family != "transformer")


@needs_transformers
@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba2", "gated_delta", "transformer"])
def test_an_exported_model_gives_the_same_logits_in_a_process_of_its_own(tmp_path, family):
    run_dir = start(tmp_path, "run", family)
    exported = run("export", run_dir, "--format", "hf", "--out", tmp_path / "hf")
    assert exported.returncode == 0, exported.stderr
    script = (
        "import sys, torch\n"
        "sys.modules['fla'] = None  # whose kernels transformers would call on the CPU too\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()\n"
        "torch.save(model(input_ids=torch.arange(40).reshape(2, 20)).logits.detach(), sys.argv[2])\n"
    )
    words = [sys.executable, "-c", script, str(tmp_path / "hf"), str(tmp_path / "logits.pt")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    own = load_model(run_dir, step=None, device=torch.device("cpu")).model
    with torch.no_grad():
        expected = own(tokens=torch.arange(40).reshape(2, 20)).logits
    card = (tmp_path / "hf" / "README.md").read_text()
    assert f"| `{family}`, dim 16, 2 layers |" in card
    assert "Every document began with the id 256," in card
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected, rtol=1e-5, atol=1e-5)
    positions = json.loads((tmp_path / "hf" / "config.json").read_text()).get("max_position_embeddings")
    assert (positions == SEQ_LEN) == (family == "transformer")
    if family != "mamba2":
        return
    again = tmp_path / "again"
    words = ["--set", "model.family=mamba2", "--set", f'model.args={{from="{tmp_path / "hf"}"}}']
    result = run("--config", write_tiny_config(tmp_path), "--run-dir", again, "--steps", 2, *words)
    assert result.returncode == 0, result.stderr
    assert run("export", again, "--format", "hf", "--out", tmp_path / "hf2").returncode == 0
    card = (tmp_path / "hf2" / "README.md").read_text()
    assert f"| `mamba2`, {tmp_path / 'hf'} |" in card


def test_a_checkpoint_of_states_in_another_nest_is_refused(tmp_path):
    config = write_tiny_config(tmp_path)
    (tmp_path / "nests.py").write_text(NESTS)
    sets, extra = (
        ("checkpoint.every=3", "model.contract=false", "model.target=nests:build"),
        {"PYTHONPATH": str(tmp_path)},
    )
    train(config, tmp_path / "run", *sets, "train.steps=3", extra=extra)
    (tmp_path / "nests.py").write_text(NESTS.replace("{'h': end[0], 'c': end[1]}", "{ 'c': end[0], 'h': end[1] }"))
    said = train(config, tmp_path / "run", *sets, code=2, extra=extra, more=("--resume", "auto"))
    assert "holds states of" in said
    assert "the model's are" in said


NESTS = """
import torch
from torch import nn
from trainer.model.protocol import ModelOutput

class Nest(nn.Module):
    def __init__(self, vocab_size, dim):
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(vocab_size, dim), nn.LSTM(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab_size)
    def forward(self, tokens, state=None):
        given = None if state is None else tuple(part[None].contiguous() for part in state.values())
        x, end = self.rnn(self.embedding(tokens), given)
        end = [part[0] for part in end]
        return ModelOutput(self.head(x), {'h': end[0], 'c': end[1]})

def build(vocab_size, dim, num_layers):
    return Nest(vocab_size, dim)
"""
