"""Every switch of the config trains, and those that must not change the numbers do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.runs import losses, read_rows, write_tiny_config
from trainer.config.load import load_config
from trainer.metrics.payload_contract import validate_stream
from trainer.training.main import train
from trainer.training.setup.open_run import Launch

EXTRA = """
stdout = "off"

[eval]
every = 4
batches = 2
holdout_fraction = 0.2

[checkpoint]
every = 3
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("switches")
    return write_tiny_config(directory, EXTRA)


def train_once(config_path: Path, run_dir: Path, *overrides: str) -> dict[int, float]:
    config = load_config(config_path, ["train.steps=10", *overrides])
    assert train(config, Launch(config_path=config_path, run_dir=str(run_dir))) == 0
    assert not list(validate_stream((run_dir / "metrics.jsonl").read_bytes().splitlines()))
    return losses(run_dir / "metrics.jsonl")


@pytest.fixture(scope="module")
def baseline(corpus, tmp_path_factory):
    return train_once(corpus, tmp_path_factory.mktemp("baseline") / "run")


@pytest.mark.parametrize(
    "override",
    [
        "gns.enabled=false",
        "ledger.ownership=exchange",
        "ledger.wipe_mode=none",
        "data.prefetch=0",
        "checkpoint.background=true",
        "checkpoint.every=0",
        "train.on_non_finite=skip",
        "metrics.per_source=true",
        "metrics.log_interval=3",
        "eval.every=0",
        "objective.token_types=true",
    ],
)
def test_a_switch_that_only_watches_or_stores_changes_no_loss(corpus, baseline, tmp_path, override):
    measured = train_once(corpus, tmp_path / "run", override)
    assert measured
    assert measured == {step: baseline[step] for step in measured}


@pytest.mark.parametrize(
    "override",
    [
        "train.precision=bf16",
        "train.micro_batches=1",
        "train.clip_grad_norm=0",
        "data.mixing.pick_mode=uniform",
        "data.mixing.pick_mode=round_robin",
        "data.mixing.batching_mode=device_per_stream",
        "data.pack=true",
        "data.mixing.repeat=false",
        "data.seq_len=7",
        "scheduler.name=constant",
        "scheduler.name=linear",
        "scheduler.name=wsd",
        "objective.z_loss=1e-3",
        "objective.coord={first_token=97, num_bins=20, sigma=1.5}",
        "ledger.wipe_mode=full",
        "ledger.wipe_mode=periodic_stale",
        "model.args={tie_embeddings=true}",
        "optimizer.name=muon",
        "optimizer={name='sgd', lr=0.3}",
        "optimizer.target=torch.optim:RMSprop",
        "optimizer.group=[{match='embedding.*', lr_scale=2.0}]",
    ],
)
def test_every_switch_trains(corpus, tmp_path, override):
    knobs = ["ledger.wipe_every=3", "ledger.stale_threshold=4"]
    measured = train_once(corpus, tmp_path / "run", override, *knobs)
    assert measured[10] < 0.97 * measured[1]


def test_a_full_wipe_is_counted_and_makes_cold_starts(corpus, tmp_path):
    train_once(corpus, tmp_path / "run", "ledger.wipe_mode=full", "ledger.wipe_every=3", "data.seq_len=4")
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [rows["train", step]["ledger_wipe_count"] for step in range(1, 11)] == [0, 0, 1, 0, 0, 1, 0, 0, 1, 0]
    assert sum(rows["train", step]["ledger/cold_starts"] for step in range(1, 11)) > 0
    assert all(rows["train", step]["ledger/false_evictions/lru"] == 0 for step in range(1, 11))


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
    "optimizer", ["{name='muon', lr=0.01}", "{name='sgd', lr=0.1}", "{target='torch.optim:RMSprop', lr=0.01}"]
)
def test_a_resumed_optimizer_goes_on_as_if_it_had_never_stopped(corpus, tmp_path, optimizer):
    sets = [f"optimizer={optimizer}", "scheduler.name=constant"]
    whole = train_once(corpus, tmp_path / "whole", *sets)
    train_once(corpus, tmp_path / "broken", *sets, "train.steps=5")
    assert train_once(corpus, tmp_path / "broken", *sets, "checkpoint.resume=auto") == whole


def test_counters_between_logged_steps_are_not_lost(corpus, tmp_path):
    small = ["data.seq_len=64", "data.max_group_cells=1", "data.mixing.batch_size=16", "ledger.capacity=64"]
    wipes = ["ledger.wipe_mode=full", "ledger.wipe_every=3", *small, "data.mixing.batch_size_by_modality={}"]
    train_once(corpus, tmp_path / "each", *wipes)
    train_once(corpus, tmp_path / "some", *wipes, "metrics.log_interval=4")
    each, some = read_rows(tmp_path / "each" / "metrics.jsonl"), read_rows(tmp_path / "some" / "metrics.jsonl")
    for key in ("ledger_wipe_count", "stream_mixing/refill/exhaust_events"):
        counted = {step: row[key] for (mode, step), row in some.items() if mode == "train"}
        window = {step: each["train", step][key] for step in range(1, 11)}
        assert sum(window.values()) > 2, key
        assert counted == {
            1: window[1],
            4: sum(window[s] for s in (2, 3, 4)),
            8: sum(window[s] for s in (5, 6, 7, 8)),
            10: window[9] + window[10],
        }, key


def test_evaluation_carries_state_so_that_its_loss_does_not_depend_on_the_cells(corpus, tmp_path):
    """The same held-out documents in cells of 8 and of 64 tokens, with weights that do not move."""
    found = []
    for length in (8, 64):
        still = [f"data.seq_len={length}", "optimizer.lr=1e-12", "train.steps=2", "eval.every=2", "eval.batches=9999"]
        run_dir = tmp_path / str(length)
        train_once(corpus, run_dir, *still, "data.max_group_cells=9999")
        found.append(read_rows(run_dir / "metrics.jsonl")["eval", 2]["eval_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_resumed_model_draws_the_random_numbers_of_an_unbroken_run(corpus, tmp_path):
    model = ["model.target=tests.support.models:dropout", "scheduler.name=constant", "checkpoint.every=5"]
    whole = train_once(corpus, tmp_path / "whole", *model)
    train_once(corpus, tmp_path / "broken", *model, "train.steps=5")
    resumed = train_once(corpus, tmp_path / "broken", *model, "checkpoint.resume=auto")
    assert resumed == whole


def test_evaluation_never_changes_training(corpus, baseline, tmp_path):
    without = train_once(corpus, tmp_path / "without", "eval.every=0")
    often = train_once(corpus, tmp_path / "often", "eval.every=1")
    assert without == often == baseline


def test_a_step_with_a_bad_number_is_skipped_and_training_goes_on(corpus, tmp_path, monkeypatch):
    """A gradient that is infinite once: the weights of that step stay, the next step trains."""
    from trainer.training.step.step import TrainStep

    original, seen = TrainStep.launch, []

    def poison(self, **votes):
        seen.append([p.detach().clone() for p in self._parameters])
        if len(seen) == 4:
            self._parameters[0].grad[0] = float("inf")
        return original(self, **votes)

    monkeypatch.setattr(TrainStep, "launch", poison)
    measured = train_once(corpus, tmp_path / "run", "train.on_non_finite=skip")
    assert all(torch.equal(a, b) for a, b in zip(seen[3], seen[4], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(seen[4], seen[5], strict=True))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [rows["train", step]["non_finite_steps"] for step in (3, 4, 5)] == [0, 1, 0]
    assert '"event":"non_finite"' in (tmp_path / "run" / "events.jsonl").read_text()
    assert measured[10] < measured[1]


def test_too_many_bad_steps_in_a_row_end_the_run(corpus, tmp_path, monkeypatch):
    from trainer.training.step.step import TrainStep

    original = TrainStep.launch

    def poison(self, **votes):
        self._parameters[0].grad[0] = float("nan")
        return original(self, **votes)

    monkeypatch.setattr(TrainStep, "launch", poison)
    config = load_config(corpus, ["train.steps=10", "train.on_non_finite=skip", "train.max_skips=3"])
    assert train(config, Launch(config_path=corpus, run_dir=str(tmp_path / "run"))) == 1
    assert "4 steps in a row were skipped" in (tmp_path / "run" / "status.json").read_text()
