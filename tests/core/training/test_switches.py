"""Every switch of the config trains, and those that must not change the numbers do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.in_process import train_here
from tests.support.runs import FULL_ROWS, evaluating, losses, read_rows, write_tiny_config
from trainer.metrics.payload_contract import validate_stream

EXTRA = '\nstdout = "off"\n' + evaluating(4, saves=3)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("switches")
    return write_tiny_config(directory, EXTRA)


def train_once(config_path: Path, run_dir: Path, *overrides: str) -> dict[int, float]:
    train_here(config_path, run_dir, "train.steps=10", *overrides)
    assert not list(validate_stream((run_dir / "metrics.jsonl").read_bytes().splitlines()))
    return losses(run_dir / "metrics.jsonl")


@pytest.fixture(scope="module")
def baseline(corpus, tmp_path_factory):
    return train_once(corpus, tmp_path_factory.mktemp("baseline") / "run")


@pytest.mark.parametrize(
    "overrides",
    [
        ("gns.enabled=false", "checkpoint.background=true", "metrics.per_source=true"),
        ("ledger.wipe_mode=none", "data.prefetch=0", "checkpoint.every=0", "objective.token_types=true"),
        ("train.on_non_finite=skip", "metrics.log_interval=3", "eval.every=0"),
    ],
)
def test_switches_that_only_watch_or_store_change_no_loss(corpus, baseline, tmp_path, overrides):
    measured = train_once(corpus, tmp_path / "run", *overrides)
    assert measured
    assert measured == {step: baseline[step] for step in measured}


# Of others the golden runs are made.
@pytest.mark.parametrize(
    "overrides",
    [
        ("train.precision=bf16", "train.clip_grad_norm=0", FULL_ROWS, "data.seq_len=7"),
        (
            "objective.coord={first_token=97, num_bins=20, sigma=1.5}",
            "model.args={tie_embeddings=true}",
            "optimizer.group=[{match='embedding.*', lr_scale=2.0}]",
        ),
    ],
)
def test_switches_train_together(corpus, tmp_path, overrides):
    measured = train_once(corpus, tmp_path / "run", *overrides, "ledger.wipe_every=3", "ledger.stale_threshold=4")
    assert measured[10] < 0.97 * measured[1]


def test_resumed_runs_count_what_an_unbroken_run_counts(corpus, tmp_path):
    """With evictions, false ones too, before and after each checkpoint."""
    stale = ["ledger.wipe_mode=periodic_stale", "ledger.stale_threshold=1"]
    knobs = [*stale, "data.seq_len=4", "data.max_group_cells=9", "scheduler.name=constant"]
    for stop in (3, 6, 10):
        train_once(corpus, tmp_path / "resumed", *knobs, "checkpoint.resume=auto", f"train.steps={stop}")
    train_once(corpus, tmp_path / "whole", *knobs)
    one, other = (
        {
            key: {n: v for n, v in row.items() if n.startswith("ledger") or n == "loss"}
            for key, row in rows.items()
            if "loss" in row
        }
        for rows in (read_rows(tmp_path / name / "metrics.jsonl") for name in ("whole", "resumed"))
    )
    assert one == other
    assert sum(row.get("ledger/evictions/stale", 0) for row in one.values()) > 10
    assert sum(row.get("ledger/false_evictions/stale", 0) for row in one.values()) > 0


@pytest.mark.parametrize(
    "own",
    [
        "optimizer={name='muon', lr=0.01}",
        "optimizer={target='torch.optim:RMSprop', lr=0.01}",
        "model.target=tests.support.models:dropout",
    ],
)
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(corpus, tmp_path, own):
    """Moments of the optimizer; random numbers that the model draws."""
    sets = [own, "scheduler.name=constant"]
    whole = train_once(corpus, tmp_path / "whole", *sets)
    train_once(corpus, tmp_path / "broken", *sets, "train.steps=5")
    assert train_once(corpus, tmp_path / "broken", *sets, "checkpoint.resume=auto") == whole


def test_evaluation_carries_state_so_that_its_loss_does_not_depend_on_the_cells(corpus, tmp_path):
    """The same held-out documents in cells of 8 and of 64 tokens, with weights that do not move."""
    found = []
    for length in (8, 64):
        still = [f"data.seq_len={length}", "optimizer.lr=1e-12", "train.steps=2", "eval.every=2", "eval.batches=9999"]
        run_dir = tmp_path / str(length)
        train_once(corpus, run_dir, *still, "data.max_group_cells=0")
        found.append(read_rows(run_dir / "metrics.jsonl")["eval", 2]["eval_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)
