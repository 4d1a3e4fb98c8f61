"""`tbptt_cells` in real runs: k cells of T tokens train as one cell of k T tokens does, and resume bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import weights
from tests.support.ranks import checkpoint_differences
from tests.support.runs import losses, read_rows, run, write_tiny_config

pytestmark = pytest.mark.distributed
HELD_OUT = """
[eval]
every = 12
batches = 1000
holdout_fraction = 0.2

[checkpoint]
every = 6
"""
CELLS = ("data.seq_len=16", "data.max_group_cells=8", "train.tbptt_cells=2")
ROWS = ("data.seq_len=32", "data.max_group_cells=4")


def train(directory: Path, name: str, *sets: str, nproc: int | None = None, steps: int = 12, more: tuple = ()) -> Path:
    """A run's directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = write_tiny_config(directory, HELD_OUT)
    options = [part for pair in ("optimizer.lr=5e-3", 'scheduler.name="constant"', *sets) for part in ("--set", pair)]
    run_dir = directory / name
    done = run(
        "--config", config, "--run-dir", run_dir, "--steps", steps, "--stdout", "off", *options, *more, nproc=nproc
    )
    assert done.returncode == 0, done.stderr
    return run_dir


@pytest.mark.parametrize(
    ("nproc", "sets"),
    [
        (None, ()),
        (None, ("data.pack=true",)),
        (None, ("train.activation_checkpointing=cell", "train.micro_batches=3", "data.pack=true")),
        (2, ("train.activation_checkpointing=cell",)),
        pytest.param(2, ('train.precision="bf16"', "train.micro_batches=1"), marks=pytest.mark.slow),
    ],
)
def test_cells_through_which_the_gradient_flows_train_as_one_long_cell(tmp_path, nproc, sets):
    rows = tuple(each for each in sets if "activation" not in each)
    short, long = (
        train(tmp_path, "short", *CELLS, *sets, nproc=nproc),
        train(tmp_path, "long", *ROWS, *rows, nproc=nproc),
    )
    tolerance = 2e-3 if any("bf16" in each for each in sets) else 1e-5
    first, second = read_rows(short / "metrics.jsonl"), read_rows(long / "metrics.jsonl")
    assert first.keys() == second.keys()
    for key, row in second.items():
        exact = {name: row[name] for name in row if name.startswith(("ledger/", "stream_mixing/")) or name == "tokens"}
        assert {name: first[key][name] for name in exact} == exact
        close = [name for name in row if name in ("loss", "grad_norm", "eval_loss")]
        if tolerance < 1e-4:
            close += [name for name in row if name == "accuracy" or name.startswith("gns/")]
        for name in close:
            assert first[key][name] == pytest.approx(row[name], rel=30 * tolerance if "gns" in name else tolerance), (
                name
            )
    assert {"loss", "grad_norm", "gns/b_simple"} <= second["train", 12].keys()
    assert second["eval", 12]["eval_loss"] > 0
    expected = weights(long)
    assert weights(short).keys() == expected.keys(), "checkpoints hold the model itself"
    if tolerance < 1e-4:
        for name, tensor in weights(short).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)


def test_truncation_is_felt(tmp_path):
    """The equality above is of the gradient through the cells, not of any gradient."""
    short = losses(train(tmp_path, "short", "data.seq_len=16", "data.max_group_cells=8") / "metrics.jsonl")
    long = losses(train(tmp_path, "long", *CELLS) / "metrics.jsonl")
    assert short[12] != pytest.approx(long[12], rel=1e-4)


@pytest.mark.parametrize("nproc", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_a_run_resumes_bit_for_bit(tmp_path, nproc):
    sets = (*CELLS, "train.activation_checkpointing=cell", "eval.every=0")
    whole = train(tmp_path, "whole", *sets, nproc=nproc)
    train(tmp_path, "cut", *sets, nproc=nproc, steps=6)
    # Checkpointed or not, the numbers are the same: it may change.
    sets = (*CELLS, "train.activation_checkpointing=off", "eval.every=0")
    cut = train(tmp_path, "cut", *sets, nproc=nproc, more=("--resume", "auto"))
    assert not checkpoint_differences(whole / "checkpoints" / "latest", cut / "checkpoints" / "latest")
    assert losses(whole / "metrics.jsonl") == losses(cut / "metrics.jsonl")


def test_another_k_is_refused_on_resume_and_takes_the_weights(tmp_path):
    before = train(tmp_path, "before", "data.max_group_cells=8", steps=6)
    config = write_tiny_config(tmp_path, HELD_OUT)
    done = run(
        "--config", config, "--run-dir", before, "--steps", 12, "--resume", "auto", "--set", "train.tbptt_cells=2"
    )
    assert done.returncode == 2
    assert "train.tbptt_cells: 1 -> 2" in done.stderr
    exported = tmp_path / "exported"
    assert run("export", before, "--format", "safetensors", "--out", exported).returncode == 0
    after = train(tmp_path, "after", *CELLS, f'model.weights="{exported}"', steps=6)
    assert losses(after / "metrics.jsonl")[1] < losses(before / "metrics.jsonl")[1]


@pytest.mark.parametrize("verb", [(), ("check",), ("preview",)])
@pytest.mark.parametrize(
    ("sets", "text"),
    [
        (("train.tbptt_cells=9",), "train.tbptt_cells: 9 is more cells than a group has"),
        (("train.activation_checkpointing=cell",), 'train.activation_checkpointing: is "cell", which saves nothing'),
        (
            ("train.tbptt_cells=2", "model.target=tests.support.models:dropout"),
            "train.tbptt_cells: the model has no state",
        ),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, verb, sets, text):
    options = [part for pair in sets for part in ("--set", pair)]
    done = run(*verb, "--config", write_tiny_config(tmp_path), *options)
    assert done.returncode == 2
    assert text in done.stderr


def test_check_says_what_it_costs(tmp_path):
    options = ("--set", "train.tbptt_cells=4", "--json")
    done = run("check", "--config", write_tiny_config(tmp_path), *options)
    facts = json.loads(done.stdout)["facts"]
    assert facts["tokens_per_step"] == 4 * 16 * 4 * 2
    assert "64 tokens" in facts["tbptt"]
