"""`[objective] chunk_tokens` and `activation_checkpointing = "block"` in real runs: every number as without them."""

from __future__ import annotations

import pytest

from tests.support.ranks import checkpoint_differences
from tests.support.runs import read_rows, run, write_tiny_config

pytestmark = pytest.mark.distributed
MORE = """
[eval]
every = 6
batches = 1000
holdout_fraction = 0.2

[checkpoint]
every = 3
"""
STEPS = 6
CHUNKED = "objective.chunk_tokens=20"
BLOCKS = "train.activation_checkpointing=block"


def train(directory, name, *sets, nproc=None, steps=STEPS, more=()):
    config = write_tiny_config(directory, MORE)
    settings = ('scheduler.name="constant"', "objective.z_loss=0.001", "train.micro_batches=2", *sets)
    options = [part for each in settings for part in ("--set", each)]
    done = run("--config", config, "--run-dir", directory / name, "--steps", steps, *options, *more, nproc=nproc)
    assert done.returncode == 0, done.stderr
    return directory / name


@pytest.mark.parametrize(
    ("nproc", "sets", "more"),
    [
        (2, ("ledger.probe_every=2",), (CHUNKED, BLOCKS)),
        (
            None,
            ("train.tbptt_cells=2", "ledger.burn_in=3", "data.pack=true"),
            (CHUNKED, "train.activation_checkpointing=cell"),
        ),
        pytest.param(None, ("model.family=gru",), (CHUNKED,), marks=pytest.mark.slow),
        pytest.param(None, ("model.family=transformer", "data.pack=true"), (CHUNKED, BLOCKS), marks=pytest.mark.slow),
        pytest.param(2, ("model.family=gated_delta",), (CHUNKED, BLOCKS), marks=pytest.mark.slow),
        pytest.param(2, ("distributed.find_unused_parameters=true",), (BLOCKS,), marks=pytest.mark.slow),
    ],
)
def test_every_number_is_that_of_a_run_without(tmp_path, nproc, sets, more):
    plain = read_rows(train(tmp_path, "plain", *sets, nproc=nproc) / "metrics.jsonl")
    found = read_rows(train(tmp_path, "with", *sets, *more, nproc=nproc) / "metrics.jsonl")
    assert found.keys() == plain.keys()
    for key, row in plain.items():
        assert found[key].keys() == row.keys()
        for name, value in row.items():
            if "sec" in name or "time" in name or name.startswith("mfu"):
                continue
            if isinstance(value, float):
                tolerance = 1e-3 if name.startswith("gns/") else 1e-5
                assert found[key][name] == pytest.approx(value, rel=tolerance, abs=1e-7), (key, name)
    keys = plain["train", STEPS].keys()
    assert {"loss", "grad_norm", "objective/z_loss"} <= keys
    assert any(key.startswith("gns/") for key in keys)


def test_a_run_with_both_resumes_bit_for_bit(tmp_path):
    whole = train(tmp_path, "whole", CHUNKED, BLOCKS, nproc=2)
    train(tmp_path, "cut", CHUNKED, BLOCKS, nproc=2, steps=3)
    cut = train(tmp_path, "cut", CHUNKED, BLOCKS, nproc=2, more=("--resume", "auto"))
    assert not checkpoint_differences(whole / "checkpoints" / "latest", cut / "checkpoints" / "latest")


@pytest.mark.parametrize("verb", [(), ("check",)])
@pytest.mark.parametrize(
    ("sets", "text"),
    [
        (
            (CHUNKED, "model.target=tests.support.models:no_head"),
            "objective.chunk_tokens: the model's output layer is not",
        ),
        ((CHUNKED, "distributed.find_unused_parameters=true"), "objective.chunk_tokens: does not go with"),
        ((BLOCKS, "model.family=gru"), 'train.activation_checkpointing: is "block", but TorchRnn has no nn.ModuleList'),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, verb, sets, text):
    options = [part for pair in sets for part in ("--set", pair)]
    done = run(*verb, "--config", write_tiny_config(tmp_path), *options)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
