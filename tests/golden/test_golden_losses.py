"""The losses of a tiny CPU run, step by step, against those kept in losses.json.

A difference means that some number of the trainer changed: say so in CHANGELOG.md, and write the new file with
`python -m tests.golden.test_golden_losses`. Other CPUs differ in the last bits, which 25 steps let grow: hence 1e-4.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests.support.runs import losses, read_rows, run, write_tiny_config

GOLDEN = Path(__file__).with_name("losses.json")
STEPS = 25
EVALUATION = """
[eval]
every = 10
batches = 3
holdout_fraction = 0.2
"""


def measure(directory: Path) -> dict[str, dict[str, float]]:
    config = write_tiny_config(directory, EVALUATION)
    result = run("--config", config, "--run-dir", directory / "run", "--steps", STEPS, "--set", "optimizer.lr=5e-3")
    assert result.returncode == 0, result.stderr
    rows = read_rows(directory / "run" / "metrics.jsonl")
    evaluations = {str(step): row["eval_loss"] for (mode, step), row in rows.items() if mode == "eval"}
    train = {str(step): loss for step, loss in losses(directory / "run" / "metrics.jsonl").items()}
    return {"loss": train, "eval_loss": evaluations}


def test_losses_are_the_golden_ones(tmp_path):
    golden = json.loads(GOLDEN.read_text())
    measured = measure(tmp_path)
    assert len(golden["loss"]) == STEPS
    for kind, expected in golden.items():
        assert measured[kind] == {step: pytest.approx(loss, rel=1e-4) for step, loss in expected.items()}


def test_the_golden_run_learns():
    values = list(json.loads(GOLDEN.read_text())["loss"].values())
    assert values[-1] < 0.75 * values[0]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.write_text(json.dumps(measure(Path(folder)), indent=1) + "\n")
