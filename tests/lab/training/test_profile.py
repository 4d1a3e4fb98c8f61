"""`train --profile N`: a trace of N steady steps in the run directory, and where the time went."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import losses, train, write_tiny_config
from trainer.lab.profile import summarize


def event(cat: str, name: str, start: float, end: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "pid": 1, "tid": tid}


# Two steps from 0 to 2,000 us; the device works until 2,500, in two streams.
EVENTS = [
    event("user_annotation", "ProfilerStep#7", 0, 1000),
    event("user_annotation", "ProfilerStep#8", 1000, 2000),
    event("user_annotation", "forward", 0, 300),
    event("gpu_user_annotation", "ProfilerStep#7", 0, 900),
    event("kernel", "gemm", 100, 600),
    event("kernel", "gemm", 700, 1200),
    event("kernel", "scan", 500, 900, tid=2),
    event("gpu_memcpy", "Memcpy HtoD", 1500, 1600),
    event("kernel", "gemm", 1900, 2500),
    event("cpu_op", "aten::mm", 0, 2000),
    event("cuda_runtime", "cudaLaunchKernel", 50, 60),
    event("cuda_runtime", "cudaEventSynchronize", 400, 500),
    event("cuda_runtime", "cudaStreamSynchronize", 1300, 1400),
    event("cuda_runtime", "cudaMemcpyAsync", 1290, 1300),
    event("cuda_runtime", "cudaDeviceSynchronize", 2000, 2600),  # the profiler's own, after the last step
    {"ph": "M", "name": "process_name", "pid": 1},
    {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 5, "pid": 1, "tid": 1},
]


def test_kernels_idle_time_and_synchronizations_of_the_device() -> None:
    found = summarize(EVENTS)
    assert (found.num_steps, found.step_ms) == (2, 1.0)
    # 0 to 100, 1200 to 1500 and 1600 to 1900 of 2,000.
    assert found.idle_share == pytest.approx(0.35)
    shares = [pytest.approx(part / 1.6) for part in (1.1, 0.4, 0.1)]
    assert [*found.kernels] == list(zip(("gemm", "scan", "Memcpy HtoD"), (3, 1, 1), shares, strict=True))
    assert found.synchronizations == {"cudaStreamSynchronize": 1}
    with pytest.raises(ValueError, match="no profiled step"):
        summarize([each for each in EVENTS if "ProfilerStep" not in each["name"]])


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
    assert said.count("profile of 3 steps") == 1
    assert "USDT" not in said  # torch's own log of its profiler


def test_a_run_that_ends_before_says_that_there_is_no_profile(tmp_path):
    run_dir, said = profiled(tmp_path, 12)
    assert "the run ended before steps 11 to 13 were recorded: there is no profile" in said
    assert not (run_dir / "profile" / "trace.json.gz").exists()
