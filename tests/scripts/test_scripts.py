"""Scripts: what the noise scale's, the families' and the profile's say."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import families
from scripts.gns_bias import Setting, run
from tests.support.in_process import program
from tests.support.runs import ROOT, write_tiny_config

sys.path.insert(0, str(ROOT / "scripts" / "bench"))

import bench_profile
from bench_table import Figure, Table

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs the extra families"
)


def row(name: str) -> tuple[str, str, str]:
    return families.row_of(name, dict(families.families())[name])


def test_torch_s_own_layers_are_exact():
    assert row("nn.GRU")[:2] == ("nn.GRU", "exact")
    assert row("nn.LSTM")[:2] == ("nn.LSTM", "exact")


def test_the_table_has_every_family():
    with families.TABLE.open(encoding="utf-8", newline="") as file:
        names = [name for name, *_ in csv.reader(file)]
    assert names[1:-1] == [*dict(families.families()), *families.NOT_TRIED]


@needs_transformers
@pytest.mark.parametrize(
    "family", ["mamba", *(pytest.param(n, marks=pytest.mark.slow) for n in ("falcon_mamba", "mamba2"))]
)
def test_check_refuses_hugging_face_s_mamba_in_one_sentence(family: str, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(families._SMALL, "vocab_size", 257)
    text = "from scripts import families\n"
    text += "def build(vocab_size, dim, num_layers, family):\n    return families.hugging_face(family)\n"
    (tmp_path / "wrapped.py").write_text(text)
    monkeypatch.setattr(sys, "path", list(sys.path))
    options = ["--set", "model.target=wrapped:build", "--set", f'model.args={{family="{family}"}}']
    ended = program(["check", "--config", write_tiny_config(tmp_path), *options], capsys)
    assert ended.returncode == (0 if family == "mamba2" else 2), ended.stderr
    if ended.returncode:
        line = next(line for line in ended.stderr.splitlines() if "model.target=wrapped:build: model.target: " in line)
        assert "breaks carry: cells of 6 tokens differ" in line
        assert 'set model.trust = ["carry"]' in line
    sys.modules.pop("wrapped", None)


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


FEW = {"length": 16, "documents": 768, "files": 48, "trained": 10, "steps": 24}


@pytest.mark.cuda
@pytest.mark.parametrize(
    "setting",
    [
        Setting("carried", rows=4, m=4, sizes=(2.0, 4.3), spread=4, **FEW),
        Setting("aligned, 2 shards", rows=2, m=4, sizes=(0.6, 2.3), spread=8, shards=2, runs_on=False, **FEW),
    ],
    ids=lambda setting: setting.name,
)
def test_it_is_that_of_independent_rows_and_its_bounds_hold(setting, device):
    found = run(setting, str(device), seeds=6, num_rows=1200)
    assert found["spread"] == setting.spread
    away = abs(found["b"] - found["truth"])
    assert away < 0.15 * found["truth"] + 2 * (found["b_se"] ** 2 + found["truth_se"] ** 2) ** 0.5, found
    # Of 12 or so, in pairs of one run, against a truth that has an error itself.
    assert found["covered"] >= 0.6 * found["bounds"] > 4, found


def test_where_documents_are_too_few_there_is_no_value():
    found = run(Setting("few", rows=4, m=4, length=16, documents=32, files=8, steps=6), seeds=1, num_rows=40)
    assert found["groups"] < 4
    assert "b" not in found
    assert "rows of the same document" in found["reason"]
