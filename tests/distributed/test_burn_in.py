"""`burn_in` in real runs: weights that stand still show no difference, runs resume bit for bit, mistakes are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.ranks import checkpoint_differences
from tests.support.runs import losses, read_rows, run, write_tiny_config

pytestmark = pytest.mark.distributed
EXTRA = """
[eval]
every = 12
batches = 4
holdout_fraction = 0.2

[checkpoint]
every = 6
"""
STILL = "optimizer.lr=1e-30"
MOVING = "optimizer.lr=5e-3"


def arguments(directory: Path, *sets: str) -> list[object]:
    directory.mkdir(parents=True, exist_ok=True)
    options = [part for pair in ('scheduler.name="constant"', *sets) for part in ("--set", pair)]
    return ["--config", write_tiny_config(directory, EXTRA), "--stdout", "off", *options]


def train(directory: Path, name: str, *sets: str, nproc: int | None = None, steps: int = 12, more: tuple = ()) -> Path:
    """A run's directory."""
    run_dir = directory / name
    done = run(*arguments(directory, *sets), "--run-dir", run_dir, "--steps", steps, *more, nproc=nproc)
    assert done.returncode == 0, done.stderr
    return run_dir


@pytest.mark.parametrize(
    ("nproc", "sets"),
    [
        (None, ()),
        (None, ("data.pack=true", "ledger.burn_in=15")),
        (2, ()),
        pytest.param(2, ("data.mixing.repeat=false", "train.steps=400"), marks=pytest.mark.slow),
        (None, ("train.tbptt_cells=2", "train.activation_checkpointing=cell")),
    ],
)
def test_with_weights_that_stand_still_nothing_changes(tmp_path, nproc, sets):
    without = [each for each in sets if "burn_in" not in each]
    plain = train(tmp_path, "plain", STILL, *without, nproc=nproc)
    burnt = train(tmp_path, "burnt", STILL, "ledger.burn_in=5", *sets, nproc=nproc)
    rows, expected = read_rows(burnt / "metrics.jsonl"), read_rows(plain / "metrics.jsonl")
    assert rows.keys() == expected.keys()
    for key, row in expected.items():
        for name, value in row.items():
            if name.startswith(("ledger", "stream_mixing/", "blend/")) or name == "tokens":
                assert rows[key][name] == value, name
            elif name in ("loss", "eval_loss", "grad_norm", "accuracy") or name.startswith("gns/"):
                # The gradient inside a cell is the same one; what the noise scale divides by may be near zero.
                assert rows[key][name] == pytest.approx(value, rel=1e-2 if "gns" in name else 2e-5), (key, name)
    assert "gns/b_simple" in expected["train", 12]


def test_with_weights_that_move_the_cells_start_from_other_states(tmp_path):
    plain, burnt = (
        losses(train(tmp_path, name, MOVING, f"ledger.burn_in={r}") / "metrics.jsonl")
        for name, r in (("plain", 0), ("burnt", 5))
    )
    assert burnt[1] == pytest.approx(plain[1], rel=1e-6)
    assert burnt[12] != pytest.approx(plain[12], rel=1e-5)


@pytest.mark.parametrize("nproc", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_a_run_resumes_bit_for_bit(tmp_path, nproc):
    sets = (MOVING, "ledger.burn_in=5", "train.tbptt_cells=2", "eval.every=0")
    whole = train(tmp_path, "whole", *sets, nproc=nproc)
    train(tmp_path, "cut", *sets, nproc=nproc, steps=6)
    cut = train(tmp_path, "cut", *sets, nproc=nproc, more=("--resume", "auto"))
    assert not checkpoint_differences(whole / "checkpoints" / "latest", cut / "checkpoints" / "latest")
    assert losses(whole / "metrics.jsonl") == losses(cut / "metrics.jsonl")


def test_a_resume_with_another_burn_in_is_refused(tmp_path):
    before = train(tmp_path, "run", MOVING, "ledger.burn_in=5", steps=6)
    for given in ("ledger.burn_in=6", "ledger.burn_in=0"):
        done = run(*arguments(tmp_path, MOVING, given), "--run-dir", before, "--steps", 12, "--resume", "auto")
        assert done.returncode == 2
        assert f"ledger.burn_in: 5 -> {given[-1]}" in done.stderr


@pytest.mark.parametrize("verb", [(), ("check",), ("preview",)])
@pytest.mark.parametrize(
    ("sets", "text"),
    [
        (("ledger.burn_in=16",), "ledger.burn_in: 16 tokens must be less than a cell"),
        (
            ("ledger.burn_in=4", "model.target=tests.support.models:dropout"),
            "ledger.burn_in: the model has no state that could be stale",
        ),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, verb, sets, text):
    options = [part for pair in sets for part in ("--set", pair)]
    done = run(*verb, "--config", write_tiny_config(tmp_path), *options)
    assert done.returncode == 2
    assert text in done.stderr


def test_check_says_what_it_costs(tmp_path):
    options = ("--config", write_tiny_config(tmp_path), "--set", "ledger.burn_in=8", "--json")
    facts = json.loads(run("check", *options).stdout)["facts"]
    assert facts["burn_in"] == "8 of every 16 tokens are read twice, for about 16.7% more time"


OWN = """
import numpy as np

def batches(rank, world_size, seed, seq_len, before):
    rng = np.random.default_rng(seed + rank)
    history = np.zeros((2, before), dtype=np.int64)
    for cell in range(100):
        tokens = rng.integers(97, 110, (2, seq_len))
        batch = {"tokens": tokens, "targets": tokens, "group_ids": np.array([0, 1]) + 10 * rank,
                 "cell_index": np.full(2, cell), "is_last": np.zeros(2, dtype=bool)}
        if before:
            batch["tokens_before"] = history
            history = np.concatenate([history, tokens], axis=1)[:, -before:]
        yield batch
"""
TARGET = """
[train]
steps = 4
device = "cpu"

[data]
seq_len = 16

[[data.source]]
name = "own"
target = "own_data:batches"
args = {{ before = {before} }}

[ledger]
burn_in = 6

[model]
dim = 16
num_layers = 2
"""


@pytest.mark.parametrize("nproc", [None, 2])
def test_a_data_set_of_ones_own_gives_the_tokens_or_is_refused_in_one_line(tmp_path, nproc):
    (tmp_path / "own_data.py").write_text(OWN)
    codes = {}
    for before in (0, 4, 6, 40):
        config = tmp_path / f"own{before}.toml"
        config.write_text(TARGET.format(before=before))
        done = run("--config", config, "--run-dir", tmp_path / f"run{before}", cwd=tmp_path, nproc=nproc)
        codes[before] = min(done.returncode, 1)
        if before < 6:
            words = "a micro-batch has no tokens_before" if before == 0 else "6 tokens before a row are needed"
            assert [line for line in done.stderr.splitlines() if words in line and "ERROR" not in line]
            assert "Traceback" not in done.stderr
    assert codes == {0: 1, 4: 1, 6: 0, 40: 0}


@pytest.mark.parametrize(
    "sets", [("ledger.burn_in=5",), ("train.tbptt_cells=2",), ("ledger.burn_in=5", "train.tbptt_cells=2")]
)
def test_probes_read_rows_as_the_step_does(tmp_path, sets):
    """Weights that stand still leave no drift; with others burn-in starts cells closer to the states of today."""
    probe = ("ledger.probe_every=1", "ledger.probe_cells=8", "scheduler.warmup_steps=0")
    still = read_rows(train(tmp_path, "still", STILL, *probe, *sets) / "metrics.jsonl")
    drifts = [row["ledger/state_drift"] for row in still.values() if "ledger/state_drift" in row]
    assert len(drifts) > 5
    assert set(drifts) == {0.0}
    assert {row["ledger/stale_gap"] for row in still.values() if "ledger/stale_gap" in row} == {0.0}
    moving = read_rows(train(tmp_path, "moving", MOVING, *probe, *sets) / "metrics.jsonl")
    assert max(row.get("ledger/state_drift", 0.0) for row in moving.values()) > 0.01
