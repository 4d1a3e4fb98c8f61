"""Families of `[model]` on two ranks: they train and resume bit for bit."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.models import pretrained
from tests.support.ranks import checkpoint_differences
from tests.support.runs import FULL_ROWS, read_rows, train, write_tiny_config

pytestmark = pytest.mark.distributed
needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="extra hf")
SIZES = {"gated_delta": "{heads=2}", "transformer": "{heads=2, kv_heads=1}", "gru": "{}", "lstm": "{dropout=0.1}"}


def start(tmp_path, name, family, *sets, more=()):
    args = SIZES.get(family) or f'{{from="{pretrained(family, tmp_path / "read", 257)}"}}'
    options = (f"model.family={family}", f"model.args={args}", "checkpoint.every=3", *sets)
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


def test_a_checkpoint_of_states_in_another_nest_is_refused(tmp_path):
    config = write_tiny_config(tmp_path)
    (tmp_path / "nests.py").write_text(NESTS)
    sets, extra = (
        ("checkpoint.every=3", "model.contract=false", "model.target=nests:Nest"),
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
    def __init__(self, vocab_size, dim, num_layers):
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(vocab_size, dim), nn.LSTM(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab_size)
    def forward(self, tokens, state=None):
        given = None if state is None else tuple(part[None].contiguous() for part in state.values())
        x, end = self.rnn(self.embedding(tokens), given)
        end = [part[0] for part in end]
        return ModelOutput(self.head(x), {'h': end[0], 'c': end[1]})
"""
