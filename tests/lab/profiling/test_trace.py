"""The summary of a profiler's trace: of made-up device events, whose sums are known, and of a real trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.lab.profile import Span, gaps, read_trace, summarize


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
    assert found.idle_ms == pytest.approx(0.35)
    assert found.idle_share == pytest.approx(0.35)
    assert found.longest_gap_ms == pytest.approx(0.3)
    table = [(kernel.name, kernel.calls, kernel.total_ms) for kernel in found.kernels]
    assert table == [("gemm", 3, 1.1), ("scan", 1, 0.4), ("Memcpy HtoD", 1, 0.1)]
    assert found.kernels[0].share == pytest.approx(1.1 / 1.6)
    assert found.synchronizations == {7: {}, 8: {"cudaStreamSynchronize": 1}}
    assert (found.num_synchronizations, found.event_waits) == (1, 1)


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no profiled step"):
        summarize([each for each in EVENTS if "ProfilerStep" not in each["name"]])


SPANS = st.lists(st.tuples(st.integers(-5, 30), st.integers(0, 12)).map(lambda pair: Span("x", pair[0], sum(pair))))


@given(SPANS, st.integers(0, 10), st.integers(10, 30))
def test_gaps_are_the_times_that_no_span_covers(spans: list[Span], start: int, end: int) -> None:
    free = [all(not span.start <= at < span.end for span in spans) for at in range(start, end)]
    lengths = [len(run) for run in "".join(" x"[is_free] for is_free in free).split()]
    assert gaps(spans, start, end) == lengths


def test_a_real_profile_is_summed_up(tmp_path: Path) -> None:
    path, x = tmp_path / "trace.json.gz", torch.randn(64, 64)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(5):
            (x @ x).relu()
            profiler.step()
    found = summarize(read_trace(path))
    assert found.num_steps == 3
    assert found.step_ms > 0.0
    assert (found.kernels, found.num_synchronizations) == ((), 0)  # of a device alone
