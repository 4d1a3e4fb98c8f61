"""`train --profile N`: a trace of N steady steps in the run directory."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.support.runs import losses, train, write_tiny_config


def profiled(directory: Path, steps: int) -> tuple[Path, str]:
    """The directory of a run, and what it said."""
    run_dir = directory / "run"
    return run_dir, train(write_tiny_config(directory), run_dir, f"train.steps={steps}", more=("--profile", 3))


@pytest.mark.distributed
def test_the_trace_has_the_steps_and_no_loss_changes(tmp_path):
    run_dir, said = profiled(tmp_path, 16)
    train(tmp_path / "tiny.toml", tmp_path / "plain", "train.steps=16")
    assert losses(tmp_path / "plain" / "metrics.jsonl") == losses(run_dir / "metrics.jsonl")
    events = json.loads(gzip.decompress((run_dir / "profile" / "trace.json.gz").read_bytes()))["traceEvents"]
    steps = {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep#")}
    assert len(steps) == 3
    assert said.count("profile of 3 steps from step 11 on") == 1
    assert "USDT" not in said  # torch's own log of its profiler


def test_a_run_that_ends_before_says_that_there_is_no_profile(tmp_path):
    run_dir, said = profiled(tmp_path, 12)
    assert "the run ended before steps 11 to 13 were recorded: there is no profile" in said
    assert not any((run_dir / "profile").iterdir())
