"""DDP, FSDP2 and HSDP train the same model: equal numbers, and every checkpoint resumes under every strategy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import model_content, weights
from tests.support.fault_runs import MEASURED, row_differences
from tests.support.gloo import run_on_ranks
from tests.support.in_process import plan_of
from tests.support.ranks import FAULTY, Ranks, checkpoint_differences, status
from tests.support.runs import FULL_ROWS, ROOT, losses, overrides, read_rows, run, train, write_tiny_config
from trainer.distributed.env import RankInfo
from trainer.lab.weights import read_weights
from trainer.training import checkpoint
from trainer.training.build import make_state, make_strategy
from trainer.training.record import check_data
from trainer.training.saved_state import restore
from trainer.training.train_state import model_part

pytestmark = pytest.mark.distributed
CPU = torch.device("cpu")
STRATEGIES = {
    "ddp": (),
    "fsdp": ('distributed.strategy="fsdp"',),
    "hsdp": ('distributed.strategy="hsdp"', "distributed.replicas=2"),
}
ABSENT = (*MEASURED, "gns/consistency")  # of shards no rank has a sum of its own: absent, not wrong
EVERYTHING = """
[eval]
every = 5
batches = 2
holdout_fraction = 0.2
depth = true

[sample]
every = 5
tokens = 4

[checkpoint]
every = 5
"""
QUIET = ("eval.every=0", "sample.every=0", "checkpoint.every=0")
SETTINGS = ("model.num_layers=3", "optimizer.lr=2e-3", 'scheduler.name="constant"', "metrics.per_layer=true")


def start(config: Path, run_dir: Path, *sets: str, steps: int, nproc: int = 2, **options: Any) -> Path:
    train(config, run_dir, *SETTINGS, f"train.steps={steps}", *sets, nproc=nproc, **options)
    return run_dir


def ddp_and_fsdp(config: Path, folder: Path, *sets: str, steps: int, **options: Any) -> list[Path]:
    """The same run under both."""
    return [start(config, folder / key, *sets, *STRATEGIES[key], steps=steps, **options) for key in ("ddp", "fsdp")]


def within(key: str) -> tuple[float, float]:
    """Small differences of large numbers by as much as those."""
    # Bounds and standard errors: of few windows or documents, whose differences they are made of.
    # Rounding grows over the steps, and the norm of one layer averages over fewer numbers.
    relative = 3e-6 if key.startswith("layer/") else 1e-6
    relative = 1e-4 if key.startswith(("gns/", "eval")) and key.endswith(("_se", "_low", "_high")) else relative
    # A weight of 1 in float32 moves in units of 1e-7: an update of 1e-3 has four digits.
    relative = 1e-5 if key.endswith("/update_ratio") else relative
    return relative, 1e-6 if "carry_gain" in key else 0.0


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return write_tiny_config(tmp_path_factory.mktemp("strategies"), EVERYTHING)


@pytest.fixture(scope="module")
def runs(config) -> dict[str, Path]:
    """Ten steps of four ranks each, that evaluate, sample and save."""
    return {name: start(config, config.parent / name, *sets, steps=10, nproc=4) for name, sets in STRATEGIES.items()}


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_every_number_is_that_of_ddp(runs, strategy):
    assert row_differences(runs["ddp"], runs[strategy], within, but=ABSENT) == []
    assert "gns/consistency" not in read_rows(runs[strategy] / "metrics.jsonl")["train", 10]
    assert read_rows(runs[strategy] / "metrics.jsonl")["train", 10]["gns/tr_sigma"] > 0


def test_samples_are_the_same(runs):
    texts = {
        name: [e for e in (path / "events.jsonl").read_text().splitlines() if '"sample"' in e]
        for name, path in runs.items()
    }
    texts = {name: [line.partition('"text"')[2] for line in lines] for name, lines in texts.items()}
    assert len(texts["ddp"]) == 2
    assert texts["ddp"] == texts["fsdp"] == texts["hsdp"]


def test_a_rank_writes_its_shards_and_of_replicas_the_first(runs):
    files = {name: sorted(p.name for p in (path / "checkpoints/latest").glob("model_*")) for name, path in runs.items()}
    assert [len(files[name]) for name in STRATEGIES] == [1, 4, 2]
    sizes = [path.stat().st_size for path in (runs["fsdp"] / "checkpoints/latest").glob("model_*")]
    assert max(sizes) < 0.5 * (runs["ddp"] / "checkpoints/latest/model_000.safetensors").stat().st_size


def held_after(rank: int, world: int, config: str, saved: dict[str, str]) -> list[str]:
    """Where the weights and the optimizer that were restored, from each checkpoint under each strategy, are not those saved."""
    info, found = RankInfo(rank, rank, world), []
    for strategy, sets in STRATEGIES.items():
        plan = plan_of(Path(config), *SETTINGS, *sets, "train.steps=99", ranks=world)
        ranks = make_strategy(plan, info, CPU)
        for name, path in saved.items():
            state = make_state(plan, info, CPU, ranks)
            _, state_json = checkpoint.find(Path(path).parent, path)
            check_data(plan, state_json, info)
            restore(Path(path), state_json, plan, state, info)
            part = model_part(state, rank=rank)
            whole = model_content(Path(path))
            rows = {} if part is None else part.rows
            expected = {f"model.{key}": value for key, value in whole["model"].items()}
            for parameter, values in whole["optimizer"].items():
                expected.update({f"optimizer.{parameter}.{key}": value for key, value in values.items()})
            for key, (own, start, shape) in rows.items():
                tensor = expected[key] if not shape else expected[key][start : start + len(own)]
                if tuple(expected[key].shape) != shape or not torch.equal(own, tensor):
                    found.append(f"{strategy} from {name}: {key}")
            if part is not None and not rows:
                found.append(f"{strategy} from {name}: nothing")
    return found


def test_each_checkpoint_is_restored_bit_for_bit_under_each_strategy(config, runs):
    saved = {name: str(path / "checkpoints/step_00000010") for name, path in runs.items()}
    found = run_on_ranks(held_after, 4, str(config), saved, torch_keeps_group=True)
    assert [line for each in found for line in each] == []


def test_a_run_goes_on_bit_for_bit(config, runs, tmp_path):
    middle = runs["fsdp"] / "checkpoints/step_00000005"
    path = start(config, tmp_path / "run", *STRATEGIES["fsdp"], steps=10, nproc=4, more=("--resume", middle))
    whole, again = losses(runs["fsdp"] / "metrics.jsonl"), losses(path / "metrics.jsonl")
    assert again == {step: loss for step, loss in whole.items() if step > 5}
    name = "checkpoints/step_00000010"
    assert checkpoint_differences(runs["fsdp"] / name, path / name) == []


def test_shards_of_four_ranks_go_on_whole_on_two(config, runs, tmp_path):
    """The weights are those of the checkpoint, and every document is read once: the ledger misses no state."""
    saved = runs["fsdp"] / "checkpoints/step_00000010"
    path = start(config, tmp_path / "run", "ledger.capacity=64", steps=13, more=("--resume", saved))
    rows = read_rows(path / "metrics.jsonl")
    assert [rows["train", step]["ledger/cold_starts"] for step in (11, 12, 13)] == [0] * 3
    assert rows["train", 11]["loss"] < 1.5 * read_rows(runs["fsdp"] / "metrics.jsonl")["train", 10]["loss"]


def test_shards_are_exported_whole_and_another_run_begins_with_them(config, runs, tmp_path):
    exported = tmp_path / "exported"
    assert run("export", runs["hsdp"], "--format", "safetensors", "--out", exported).returncode == 0
    tensors, _ = read_weights(exported)
    expected = weights(runs["hsdp"])
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    begun = (*QUIET, f'model.weights="{exported}"', *STRATEGIES["fsdp"])
    path = start(config, tmp_path / "run", *begun, steps=2)
    assert losses(path / "metrics.jsonl")[1] < 0.95 * losses(runs["ddp"] / "metrics.jsonl")[1], "other weights"


def test_muon_steps_the_same(config, tmp_path):
    paths = ddp_and_fsdp(config, tmp_path, "optimizer.name=muon", "model.dim=24", *QUIET, steps=4)
    # Newton-Schulz in bfloat16 makes of the last bits of a gradient the last of its own.
    one, other = (losses(path / "metrics.jsonl") for path in paths)
    assert all(math.isclose(one[step], other[step], rel_tol=1e-4) for step in one), (one, other)
    assert not math.isclose(one[4], one[1], rel_tol=1e-2)


@pytest.mark.parametrize(
    "sets",
    [
        (
            *("objective.chunk_tokens=8", "distributed.reshard_after_forward=false"),
            *("train.activation_checkpointing=block", "model.args={tie_embeddings=true}"),
        ),
        pytest.param((FULL_ROWS, "model.family=gated_delta", "train.micro_batches=1"), marks=pytest.mark.slow),
        pytest.param(("train.compile=true", "eval.every=0", "sample.every=0"), marks=pytest.mark.slow),
    ],
    ids=lambda sets: sets[0],
)
def test_what_a_step_can_do_it_does_on_shards(config, tmp_path, sets):
    paths = ddp_and_fsdp(config, tmp_path, *sets, steps=5)
    assert row_differences(*paths, within, but=ABSENT) == []


@pytest.mark.slow
def test_bf16_parameters_train_as_autocast_does(config, tmp_path):
    paths = ddp_and_fsdp(config, tmp_path, "train.precision=bf16", "objective.chunk_tokens=8", steps=5)
    one, other = (losses(path / "metrics.jsonl") for path in paths)
    assert all(math.isclose(one[step], other[step], rel_tol=5e-3) for step in one), (one, other)
    assert {value.dtype for value in weights(paths[1]).values()} == {torch.float32}


def test_a_stop_of_one_rank_ends_an_evaluation_of_shards_on_all(config, tmp_path):
    words = overrides(*SETTINGS, *STRATEGIES["fsdp"], *FAULTY)
    arguments = ("--config", config, "--run-dir", tmp_path / "run", "--steps", 6, *words)
    fault = {"what": "signal", "rank": 1, "mode": "eval", "step": 1, "micro": 0}
    with Ranks(arguments, logs=tmp_path / "logs", fault=fault) as ranks:
        assert ranks.wait() == [0, 0], ranks.said()
    assert (status(tmp_path / "run")["state"], status(tmp_path / "run")["last_step"]) == ("stopped", 5)
    assert run(*arguments, "--resume", "auto", nproc=2, extra={"PYTHONPATH": str(ROOT)}).returncode == 0
    assert ("eval", 5) in read_rows(tmp_path / "run" / "metrics.jsonl")


UNITS = """
from torch import nn
from tests.support.models import DropoutModel
from trainer.model.protocol import ModelOutput


class Units(DropoutModel):
    def __init__(self, vocab_size, dim, num_layers):
        super().__init__(vocab_size, dim)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim)) for _ in range(num_layers))
        self.layers[-1][1] = self.layers[0][1]  # shared: neither is a unit

    def forward(self, tokens, state=None):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return ModelOutput(self.head(x), None)
"""


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ("own_units:Units", ""),
        ("tests.support.models:Scaled", "scale: a scalar cannot be sharded"),
        ("tests.support.models:StatefulDropout", "1 parameter took no part in a step's last micro-batch"),
    ],
)
def test_blocks_of_ones_own_are_found_and_wrong_ones_refused(config, tmp_path, own, said):
    (tmp_path / "own_units.py").write_text(UNITS)
    sets = ("train.steps=3", f"model.target={own}", "model.contract=false", "model.num_layers=3", *QUIET)
    extra, code = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}, 2 if said else 0
    output = train(config, tmp_path / "fsdp", *sets, *STRATEGIES["fsdp"], nproc=2, extra=extra, code=code)
    assert said in output
    assert "Traceback" not in output
    if not said:
        assert "no nn.ModuleList of blocks" not in output
        train(config, tmp_path / "ddp", *sets, nproc=2, extra=extra)
        assert row_differences(tmp_path / "ddp", tmp_path / "fsdp", within, but=ABSENT) == []
