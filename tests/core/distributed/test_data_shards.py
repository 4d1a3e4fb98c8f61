"""`distributed.shards`: what a run computes depends on the number of data shards, and not on that of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.checkpoints import weights
from tests.support.fault_runs import MEASURED, row_differences
from tests.support.runs import evaluating, losses, read_rows, run, train, write_tiny_config

pytestmark = pytest.mark.distributed

EXTRA = evaluating(4, saves=4)
SETS = (
    "train.steps=8",
    "distributed.shards=4",
    "data.mixing.batch_size=2",
    "model.target=tests.support.models:Float64",
    "model.num_layers=1",
    "model.contract=false",
    "metrics.per_layer=true",
    "metrics.per_source=true",
)
# Times; and what tells the pairs of micro-batches within a rank from the others.
OF_RANKS = (*MEASURED, "gns/consistency")
CASES: Mapping[str, tuple[str, ...]] = {
    "ddp": (),
    "fsdp": ("distributed.strategy=fsdp", "train.micro_batches=1"),
    "own pools": ("data.mixing.batching_mode=device_per_stream",),
    "swept": ("ledger.wipe_mode=periodic_stale", "ledger.stale_threshold=2"),
    "growing": ("train.micro_batches={schedule='step', points={0=1, 4=2}}",),
    "exhausted": (
        *("data.mixing.repeat=false", "data.mixing.pick_mode=round_robin", "train.steps=400"),
        *("data.mixing.batch_size=8", "data.mixing.batch_size_by_modality={}"),  # so that it is soon at the end
        *("eval.every=0", "checkpoint.every=0"),
    ),
}
EXACT = ("loss", "grad_norm", "gns/tr_sigma", "gns/grad_sq", "eval_loss")


def within(key: str) -> tuple[float, float]:
    """The errors of means are differences of sums that are nearly equal."""
    return (1e-12, 1e-12) if key in EXACT else (1e-9, 1e-9)


def weight_difference(a: Path, b: Path) -> float:
    first, second = (weights(sorted((run / "checkpoints").glob("step_*"))[-1]) for run in (a, b))
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return write_tiny_config(tmp_path_factory.mktemp("shards"), EXTRA)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_two_and_four_ranks_compute_the_same_as_one(config, tmp_path, case, num_ranks):
    for ranks in (num_ranks, 1):
        train(config, tmp_path / str(ranks), *SETS, *CASES[case], nproc=ranks)
    assert row_differences(tmp_path / str(num_ranks), tmp_path / "1", within, but=OF_RANKS) == []
    assert weight_difference(tmp_path / str(num_ranks), tmp_path / "1") < 1e-12


def resumed(config: Path, run_dir: Path, origin: Path, step: int, *sets: str, ranks: int) -> str:
    checkpoint = origin / "checkpoints" / f"step_{step:08d}"
    return train(config, run_dir, *sets, more=("--resume", checkpoint), nproc=ranks)


def test_a_run_goes_on_with_any_number_of_ranks(config, tmp_path):
    """4 -> 2 -> 1 -> 4 ranks in the middle of an epoch, between two logged steps, each compared with the run that went on."""
    sets = (*SETS, "metrics.log_interval=3", "checkpoint.every=2", "checkpoint.keep_last=9")
    runs = [tmp_path / str(number) for number in range(4)]
    train(config, runs[0], *sets, nproc=4)
    for number, ranks in ((1, 2), (2, 1), (3, 4)):
        said = resumed(config, runs[number], runs[number - 1], 2 * number, *sets, ranks=ranks)
        assert "saved with" not in said
        assert row_differences(runs[0], runs[number], within, but=OF_RANKS, after=2 * number) == []
        assert weight_difference(runs[0], runs[number]) < 1e-12
        assert all(row.get("ledger/cold_starts", 0) == 0 for row in read_rows(runs[number] / "metrics.jsonl").values())


def test_dropout_is_of_the_micro_batch_and_not_of_what_came_before(config, tmp_path):
    sets = ("train.steps=8", "model.target=tests.support.models:DropoutModel", "gns.enabled=false", "eval.every=0")
    train(config, tmp_path / "whole", *sets)
    resumed(config, tmp_path / "resumed", tmp_path / "whole", 4, *sets, ranks=1)
    assert weight_difference(tmp_path / "whole", tmp_path / "resumed") == 0
    train(config, tmp_path / "other", *sets, "distributed.shards=2")
    first = [read_rows(tmp_path / name / "metrics.jsonl")["train", 1]["loss"] for name in ("whole", "other")]
    assert first[0] != first[1]


def test_a_model_that_is_gathered_as_a_whole_trains_on_after_an_evaluation(config, tmp_path):
    sets = ("model.target=tests.support.models:Childless", "model.contract=false", "train.steps=6", "gns.enabled=false")
    sharded = ("distributed.strategy=fsdp", "train.micro_batches=1", "distributed.timeout_sec=20")
    train(config, tmp_path / "fsdp", *sets, *sharded, "eval.every=2", nproc=2)
    train(config, tmp_path / "ddp", *sets, "train.micro_batches=1", "eval.every=2", nproc=2)
    resumed(config, tmp_path / "again", tmp_path / "fsdp", 4, *sets, *sharded, "eval.every=2", ranks=2)
    again = losses(tmp_path / "again" / "metrics.jsonl")
    assert again == {step: loss for step, loss in losses(tmp_path / "fsdp" / "metrics.jsonl").items() if step in again}
    assert losses(tmp_path / "fsdp" / "metrics.jsonl") == pytest.approx(
        losses(tmp_path / "ddp" / "metrics.jsonl"), rel=1e-5
    )


def test_a_number_that_the_ranks_do_not_divide_is_refused(config, tmp_path):
    said = train(config, tmp_path / "run", "distributed.shards=3", nproc=2, code=2)
    assert "distributed.shards: 3 data shards cannot be divided among 2 ranks" in said
    checked = run("check", "--config", config, "--nproc", 2, "--set", "distributed.shards=4").stdout
    assert "data_shards = 4: each rank runs 2, in 4 forward passes a step instead of 2 of 2 times the rows" in checked


def test_another_number_of_shards_is_said(config, tmp_path):
    sets = ("train.steps=8", "eval.every=0", "model.family=gru")
    train(config, tmp_path / "two", *sets, "distributed.shards=2")
    said = resumed(config, tmp_path / "one", tmp_path / "two", 4, *sets, ranks=1)
    assert "saved with 2 data shards, resumed with 1" in said
