"""What `make gpu` reads in a profiler's trace: of made-up events, whose sums are known."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.runs import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "bench"))

import bench_profile
from bench_table import Figure, Table


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
    found = bench_profile.measure(EVENTS)
    figures = {each.name: each.value for each in found if isinstance(each, Figure)}
    assert figures == {
        "profiled steps": 2,
        "step": 1.0,
        "no kernel runs, per step": pytest.approx(0.35),  # 0 to 100, 1200 to 1500 and 1600 to 1900 of 2,000
        "no kernel runs, share of the step": pytest.approx(0.35),
        "longest gap": pytest.approx(0.3),
        "kernels started, per step": 2.5,
        "synchronizations on steps that do not log": 1,
        "waits for an event, per step": 0.5,
    }
    kernels, waits = (each for each in found if isinstance(each, Table))
    assert kernels.rows == [("gemm", 3, 1.1, "68.8%"), ("scan", 1, 0.4, "25.0%"), ("Memcpy HtoD", 1, 0.1, "6.2%")]
    assert waits.rows == [("8", "cudaStreamSynchronize", 1)]


SPANS = st.lists(st.tuples(st.integers(-5, 30), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair), "x")))


@given(SPANS, st.integers(0, 10), st.integers(10, 30))
def test_gaps_are_the_times_that_no_span_covers(spans: list[Any], start: int, end: int) -> None:
    free = [all(not low <= at < high for low, high, _ in spans) for at in range(start, end)]
    lengths = [len(run) for run in "".join(" x"[is_free] for is_free in free).split()]
    assert bench_profile.gaps([span for span in spans if span[0] < span[1]], start, end) == lengths
