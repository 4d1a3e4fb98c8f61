"""`make gpu` itself: what fails, hangs or is missing becomes a row, the rest goes on, and runs are merged check by check."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import is_there
from tests.support.runs import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "gpu"))

import gpu_checks
import run as harness

FIGURE = {"name": "a | b", "value": 2.0, "unit": "x", "low": None, "high": None, "goal": "", "is_met": None}
MET, MISSED = {**FIGURE, "goal": "at least 1", "is_met": True}, {**FIGURE, "goal": "at least 3", "is_met": False}
TABLE = {"title": "Kernels", "columns": ["kernel", "calls"], "rows": [["gemm<int>", 1200]]}
# A hang, with a child in a process group of its own; one that ends leaves it behind.
CHILD = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], process_group=0, stdout=subprocess.DEVNULL)
open(sys.argv[1], "w").write(str(child.pid))
"""
TESTS = """
import pytest
def test_good(): pass
def test_bad(): assert 1 == 2
@pytest.mark.skip(reason="not here")
def test_skipped(): pass
@pytest.fixture
def broken(): raise OSError("no fixture")
def test_broken(broken): pass
"""


def printing(*figures: dict[str, Any]) -> str:
    """A benchmark's code."""
    content = json.dumps({"figures": figures, "tables": [TABLE]})
    return f"print('about the run')\nprint({content!r})\n"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """`make gpu` with checks whose code is given; the exit code, and what is merged in the file."""

    def main(*options: str, device: str = "cuda", limit_sec: float = 60.0, **code: str) -> tuple[int, dict[str, Any]]:
        made = []
        for name, text in code.items():
            place = tmp_path / f"{name}.py"
            place.write_text(text)
            own: tuple[str, ...] = (str(place), str(tmp_path / f"{name}.pid"))
            if name == "tests":
                own = ("-m", "pytest", "-vv", "-p", "no:cacheprovider", str(place))
            made.append(gpu_checks.Check("tests" if name == "tests" else "speed", name, own, limit_sec))
        monkeypatch.setattr(harness, "checks", lambda root, device: made)
        monkeypatch.setattr(harness, "machine", lambda: {"commit": "abc", "torch": "2.11", "device": "made up"})
        monkeypatch.setattr(harness, "make_corpus", lambda environ: None)
        monkeypatch.setattr(harness, "RESULTS", {"cuda": tmp_path, "cpu": tmp_path / "new" / "cpu"})
        exit_code = harness.main(["--device", device, *options])
        file = harness.RESULTS[device] / "benchmarks-gpu.json"
        return exit_code, json.loads(file.read_text())["checks"] if file.exists() else {}

    return main


def rows(record: dict[str, Any]) -> list[tuple[str, str]]:
    return [(row["status"], row["reason"]) for row in record["rows"]]


def test_failures_are_rows_the_rest_goes_on_and_runs_are_merged(
    gpu: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    code, found = gpu(
        tests=TESTS,
        failed="raise OSError('no such thing')",
        silent=CHILD,
        late=printing(FIGURE) + "raise SystemExit(3)",
        good=printing(MET),
        missed=printing(MISSED),
    )
    assert code == 1
    good, bad, skipped, broken = rows(found["tests/tests"])
    assert (good, bad, skipped[0]) == (("passed", ""), ("FAILED", "assert 1 == 2"), "skipped")
    assert broken == ("FAILED", "OSError: no fixture")
    assert rows(found["speed/failed"]) == [("FAILED", "OSError: no such thing")]
    assert rows(found["speed/silent"])[0][0] == "FAILED"
    assert not is_there(int((tmp_path / "silent.pid").read_text()))
    assert rows(found["speed/late"]) == [("measured", ""), ("FAILED", "exit code 3")]  # what was printed before is kept
    assert rows(found["speed/good"]) == [("passed", "")]
    assert rows(found["speed/missed"]) == [("MISSED", "2 is not at least 3")]
    page = (tmp_path / "benchmarks-gpu.md").read_text()
    assert "| a \\| b | 2 | at least 3 | MISSED: 2 is not at least 3 |" in page
    assert "| gemm<int> | 1,200 |" in page
    assert page.count("commit abc, torch 2.11, device made up\n") == 1

    code, again = gpu("--check", "good", good=printing(FIGURE), missed=printing(MISSED))
    assert (code, rows(again["speed/good"])) == (0, [("measured", "")])
    assert again["speed/missed"] == found["speed/missed"]
    assert gpu("--check", "nothing", good=printing(FIGURE))[0] == 2
    code, rehearsed = gpu(device="cpu", missed=printing(MISSED))
    assert (code, rows(rehearsed["speed/missed"])) == (0, [("rehearsed", "")])
    assert "whose figures mean nothing" in (tmp_path / "new" / "cpu" / "benchmarks-gpu.md").read_text()


def test_a_hang_is_killed_with_its_children_and_a_part_ends_in_time(
    gpu: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(harness.PART_SEC, "cuda", 10.0)
    hangs = (
        CHILD + "print('test_x.py::test_a PASSED', flush=True)\nprint('test_x.py::test_b', flush=True)\ntime.sleep(600)"
    )
    code, found = gpu(hangs=hangs, next=printing(FIGURE))
    assert code == 1
    assert rows(found["speed/hangs"]) == [("TIMED OUT", "after 10 s: test_x.py::test_b")]
    assert not is_there(int((tmp_path / "hangs.pid").read_text()))
    assert rows(found["speed/next"]) == [("NOT RUN", "the time of the part is over")]
    assert gpu_checks.read_tests("tests/x.py::test_a[1 2] PASSED [ 20%]\nx.py::test_b ")[0]["name"] == "test_a[1 2]"


def test_every_benchmark_and_every_file_with_a_test_marked_cuda_is_a_check() -> None:
    for device in ("cuda", "cpu"):
        found = {each.key: each for each in gpu_checks.checks(ROOT, device)}
        assert {"tests/cuda/test_late_reading.py", "tests/core/cli/test_every_key.py", "runs/cuda/test_resume.py"} <= {
            *found
        }
        for each in found.values():
            assert each.limit_sec <= harness.PART_SEC[device]
            if each.part not in ("tests", "runs"):
                assert (ROOT / each.arguments[0]).is_file()
                assert each.arguments[1:4] == ("--device", device, "--json")
