"""Settings of which no learnt number depends, each in a run against the one without."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import weights
from tests.support.fault_runs import MEASURED
from tests.support.runs import evaluating, held_out_documents, losses_of_documents, read_rows, train, write_tiny_config

pytestmark = pytest.mark.distributed
EXTRA = evaluating(12, batches=1000, saves=6)
CHUNKED, BLOCKS = "objective.chunk_tokens=20", "train.activation_checkpointing=block"
COMPARED = (
    *("loss", "eval_loss", "grad_norm", "accuracy", "tokens"),
    *("objective/", "gns/", "ledger/", "stream_mixing/", "blend/"),
)


def start(directory: Path, name: str, *sets: str) -> Path:
    """Twelve steps on two ranks; the run's directory."""
    common = ('scheduler.name="constant"', "objective.z_loss=0.001", "train.steps=12")
    train(write_tiny_config(directory, EXTRA), directory / name, *common, *sets, nproc=2)
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
    runs = [start(tmp_path, name, *common, *sets) for name, sets in (("with", (CHUNKED, BLOCKS)), ("without", ()))]
    check_same(*runs)
    found, expected = map(weights, runs)
    assert found.keys() == expected.keys(), "checkpoints hold the model itself"
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)


def check_losses_of_documents(run_dir: Path, row: Mapping[str, float]) -> None:
    """Both ranks' documents are there, each once and with all its tokens, and make up the logged losses."""
    lines, texts = losses_of_documents(run_dir, 12), held_out_documents(run_dir.parent, 0.2)
    tokens = {(line["stream"], line["document"]): line["tokens"] for line in lines}
    assert len(tokens) == len(lines)
    assert tokens == {place: len(text) for place, text in texts.items()}
    for key, kept in (
        ("eval_objective/token_ce", "fs"),
        ("eval_source/first/loss", "f"),
        ("eval_source/second/loss", "s"),
    ):
        own = [line for line in lines if line["source"][0] in kept and line["key"] == "eval_loss"]
        mean = sum(line["nats"] for line in own) / sum(line["tokens"] for line in own)
        assert mean == pytest.approx(row[key], rel=1e-6)


def test_diagnostics_change_no_number_and_no_weight(tmp_path):
    """Dropout draws what it would have drawn without a sample."""
    on = ("metrics.per_layer=true", "metrics.per_source=true", "sample.every=5", "train.spike_sigma=6")
    model = ("model.family=lstm", "model.args={dropout=0.1}")
    measured, plain = start(tmp_path, "on", *model, *on), start(tmp_path, "off", *model, "gns.enabled=false")
    assert '"sample"' in (measured / "events.jsonl").read_text()
    rows, expected = (read_rows(path / "metrics.jsonl") for path in (measured, plain))
    for key, row in expected.items():
        assert {name: value for name, value in row.items() if not name.startswith(MEASURED)}.items() <= rows[
            key
        ].items()
    found = rows["train", 12].keys() - expected["train", 12].keys()
    assert {name.partition("/")[0] for name in found} >= {"gns", "layer", "source"}
    check_losses_of_documents(measured, rows["eval", 12])
    files = [path / "evaluations" / "step_00000012.jsonl" for path in (measured, plain)]
    assert files[0].read_bytes() == files[1].read_bytes()
    kept = weights(plain)
    assert all(torch.equal(kept[name], tensor) for name, tensor in weights(measured).items())
