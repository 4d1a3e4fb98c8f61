"""Settings of which no learnt number depends, each in a run against the one without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import weights
from tests.support.fault_runs import MEASURED
from tests.support.ranks import checkpoint_differences
from tests.support.runs import evaluating, losses, read_rows, train, write_tiny_config

pytestmark = pytest.mark.distributed
EXTRA = evaluating(12, batches=1000, saves=6)
STILL, MOVING = "optimizer.lr=1e-30", "optimizer.lr=5e-3"
CHUNKED, BLOCKS = "objective.chunk_tokens=20", "train.activation_checkpointing=block"
COMPARED = (
    *("loss", "eval_loss", "grad_norm", "accuracy", "tokens"),
    *("objective/", "gns/", "ledger/", "stream_mixing/", "blend/"),
)


def start(directory: Path, name: str, *sets: str, nproc: int | None = None, more: tuple[object, ...] = ()) -> Path:
    """Twelve steps; the run's directory."""
    common = ('scheduler.name="constant"', "objective.z_loss=0.001", "train.steps=12")
    train(write_tiny_config(directory, EXTRA), directory / name, *common, *sets, nproc=nproc, more=more)
    return directory / name


def check_same(one: Path, other: Path) -> None:
    """The noise scale apart, which divides by what may be near zero, all to the rounding of float32."""
    first, second = (read_rows(path / "metrics.jsonl") for path in (one, other))
    assert first.keys() == second.keys()
    for key, row in second.items():
        for name in (name for name in row if name.startswith(COMPARED) and not name.startswith(MEASURED)):
            tolerance = 1e-2 if name.startswith("gns/") else 2e-5
            assert first[key][name] == pytest.approx(row[name], rel=tolerance, abs=1e-7), (key, name)
    assert {"loss", "grad_norm", "gns/tr_sigma", "objective/z_loss"} <= second["train", 12].keys()
    assert second["eval", 12]["eval_loss"] > 0


@pytest.mark.parametrize(
    "common",
    [
        pytest.param((), id="chunked loss"),
        *(
            pytest.param((f"model.family={family}",), id=family, marks=pytest.mark.slow)
            for family in ("gated_delta", "transformer")
        ),
    ],
)
def test_no_number_depends_on_chunks_and_recomputation(tmp_path, common):
    runs = [
        start(tmp_path, name, *common, *sets, nproc=2) for name, sets in (("with", (CHUNKED, BLOCKS)), ("without", ()))
    ]
    check_same(*runs)
    found, expected = map(weights, runs)
    assert found.keys() == expected.keys(), "checkpoints hold the model itself"
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)


def test_diagnostics_change_no_number_and_no_weight(tmp_path):
    on = ("metrics.per_layer=true", "metrics.per_source=true", "sample.every=5")
    on, off = (*on, "train.spike_sigma=6"), ("gns.enabled=false",)
    measured, plain = start(tmp_path, "on", *on, nproc=2), start(tmp_path, "off", *off, nproc=2)
    rows, expected = (read_rows(path / "metrics.jsonl") for path in (measured, plain))
    for key, row in expected.items():
        assert {name: value for name, value in row.items() if not name.startswith(MEASURED)}.items() <= rows[
            key
        ].items()
    found = rows["train", 12].keys() - expected["train", 12].keys()
    assert {name.partition("/")[0] for name in found} >= {"gns", "layer", "source"}
    kept = weights(plain)
    assert all(torch.equal(kept[name], tensor) for name, tensor in weights(measured).items())


def test_a_run_with_all_of_them_resumes_bit_for_bit(tmp_path):
    sets = (MOVING, CHUNKED)
    whole = start(tmp_path, "whole", *sets, BLOCKS, nproc=2)
    middle = whole / "checkpoints" / "step_00000006"
    # Recomputed or not, the numbers are the same: it may change.
    again = start(tmp_path, "again", *sets, nproc=2, more=("--resume", middle))
    assert not checkpoint_differences(whole / "checkpoints" / "latest", again / "checkpoints" / "latest")
    expected = losses(whole / "metrics.jsonl")
    assert losses(again / "metrics.jsonl") == {step: loss for step, loss in expected.items() if step > 6}
