"""`make gpu` itself: what fails, hangs or is missing becomes a row, the rest goes on, and runs are merged check by check."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import ROOT

HARNESS = ROOT / "scripts" / "gpu"
sys.path.insert(0, str(HARNESS))

import gpu_checks  # noqa: E402 - found by the line above
import gpu_results  # noqa: E402
import limited_process  # noqa: E402
import run as harness  # noqa: E402

FIGURE: dict[str, Any] = {"name": "x", "value": 2.0, "unit": "x", "low": None, "high": None}
NO_GOAL = {"goal": "", "is_met": None}
MET, MISSED = {"goal": "at least 1", "is_met": True}, {"goal": "at least 3", "is_met": False}


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking torch for its versions takes seconds."""
    monkeypatch.setattr(harness, "versions", lambda: {"torch": "2.11", "device": "made up"})


def figures(*found: dict[str, Any]) -> str:
    """A benchmark's output."""
    return f"print('about the run')\nprint({json.dumps(json.dumps({'figures': list(found)}))})"


def check(name: str, code: str, *, part: str = "speed", limit_sec: float = 30.0) -> gpu_checks.Check:
    read: Callable[..., gpu_checks.Findings] = lambda ended: gpu_checks.read_figures(ended, is_rehearsal=False)  # noqa: E731
    return gpu_checks.Check(part, name, ("-c", code), limit_sec, read)


def run(*checks: gpu_checks.Check, part_sec: float = 60.0) -> list[gpu_results.Record]:
    return harness.run_parts(checks, dict(os.environ), {"torch": "2.11"}, lambda record: None, part_sec=part_sec)


@cache
def enough_sec() -> float:
    """For a python to start and to do something small, on this machine as busy as it is now."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import subprocess"], check=True)
    return 1.5 + 20.0 * (time.monotonic() - began)


def of(record: gpu_results.Record) -> list[tuple[str, str]]:
    return [(row.status, row.reason) for row in record.rows]


def test_a_failure_is_a_row_with_its_last_line_and_the_rest_goes_on() -> None:
    failed, silent, odd, late, good = run(
        check("failed", "import sys; print('so far', file=sys.stderr); raise OSError('no such thing')"),
        check("silent", "pass"),
        check("odd", "print('{')"),
        check("late", figures({**FIGURE, **NO_GOAL}) + "\nraise SystemExit(3)"),
        check("good", figures({**FIGURE, **MET})),
    )
    assert of(failed) == [("FAILED", "OSError: no such thing")]
    assert of(silent) == [("FAILED", "no result: it printed nothing")]
    assert of(odd)[0][0] == "FAILED"
    assert of(late) == [("measured", ""), ("FAILED", "exit code 3")]  # what was printed before is kept
    assert of(good) == [("passed", "")]
    assert good.machine == {"torch": "2.11"}


SLEEPER = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(sleep, process_group=group, stdout=subprocess.DEVNULL) for group in (None, 0)]
open(sys.argv[1], "w").write(" ".join(str(child.pid) for child in children))
print("tests/x.py::test_that_hangs ", end="", flush=True)
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[tuple[gpu_checks.Check, Path]]:
    """A check that hangs, as do the children that it starts, one of them in a process group of its own."""
    told = tmp_path / "pids"
    yield replace(check("hangs", SLEEPER, limit_sec=enough_sec()), arguments=("-c", SLEEPER, str(told))), told
    for pid in map(int, told.read_text().split()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_hang_is_killed_with_its_children_and_is_a_row(sleeper: tuple[gpu_checks.Check, Path]) -> None:
    hanging, told = sleeper
    found, good = run(hanging, check("good", figures({**FIGURE, **NO_GOAL})), part_sec=600.0)
    assert of(found) == [("TIMED OUT", f"after {hanging.limit_sec:.0f} s: tests/x.py::test_that_hangs")]
    assert [is_alive(pid) for pid in map(int, told.read_text().split())] == [False, False]
    assert of(good) == [("measured", "")]


def test_what_a_process_leaves_behind_is_ended(tmp_path: Path) -> None:
    code = f"import subprocess; p = subprocess.Popen(['sleep', '600']); open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid))"
    ended = limited_process.run_process([sys.executable, "-c", code], limit_sec=30, environ=os.environ, cwd=tmp_path)
    assert ended.code == 0
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_a_part_ends_in_time_and_names_what_was_not_run() -> None:
    slow = check("slow", "import time; time.sleep(600)", limit_sec=600.0)
    records = run(
        slow,
        check("next", "pass"),
        check("other", figures({**FIGURE, **NO_GOAL}), part="ledger"),
        part_sec=enough_sec(),
    )
    assert [each.rows[0].status for each in records] == ["TIMED OUT", "NOT RUN", "measured"]
    assert of(records[1]) == [("NOT RUN", "the time of the part is over")]


@pytest.mark.parametrize(("goal", "status"), [(MET, "passed"), (MISSED, "MISSED"), (NO_GOAL, "measured")])
def test_a_goal_is_met_or_missed_and_does_not_apply_in_a_rehearsal(goal: dict[str, Any], status: str) -> None:
    ended = limited_process.Ended(0, json.dumps({"figures": [{**FIGURE, **goal}]}), "", 1.0)
    rows, _ = gpu_checks.read_figures(ended, is_rehearsal=False)
    assert [row.status for row in rows] == [status]
    rehearsed, _ = gpu_checks.read_figures(ended, is_rehearsal=True)
    assert [row.status for row in rehearsed] == ["measured" if status == "measured" else "rehearsed"]


TESTS = """
import time
import pytest

def test_good(): pass
def test_bad(): assert 1 == 2
@pytest.mark.skip(reason="not here")
def test_skipped(): pass
@pytest.fixture
def broken(): raise OSError("no fixture")
def test_broken(broken): pass
"""


def pytest_check(tmp_path: Path, text: str, limit_sec: float = 60.0) -> gpu_checks.Check:
    path, report = tmp_path / "test_made_up.py", tmp_path / "report.xml"
    path.write_text(text)
    arguments = ("-m", "pytest", "-vv", "-p", "no:cacheprovider", f"--junitxml={report}", str(path))
    return gpu_checks.Check(
        "tests", "made_up", arguments, limit_sec, lambda ended: gpu_checks.read_tests(ended, report)
    )


def test_each_test_is_a_row(tmp_path: Path) -> None:
    (record,) = run(pytest_check(tmp_path, TESTS))
    assert [(row.name, row.status) for row in record.rows] == [
        ("test_good", "passed"),
        ("test_bad", "FAILED"),
        ("test_skipped", "skipped"),
        ("test_broken", "FAILED"),
    ]
    reasons = ["assert 1 == 2", "not here", 'failed on setup with "OSError: no fixture"']
    assert [row.reason for row in record.rows[1:]] == reasons
    assert all(row.seconds is not None for row in record.rows)


def test_tests_before_a_hang_keep_their_rows(tmp_path: Path) -> None:
    said = "tests/x.py::test_good PASSED [ 20%]\ntests/x.py::test_bad FAILED [ 40%]\ntests/x.py::test_hangs "
    rows, _ = gpu_checks.read_tests(limited_process.Ended(None, said, "", 1.0), tmp_path / "report.xml")
    assert [(row.name, row.status) for row in rows] == [("test_good", "passed"), ("test_bad", "FAILED")]


def test_no_row_at_all_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no test was run: exit code 4"):
        gpu_checks.read_tests(limited_process.Ended(4, "", "", 1.0), tmp_path / "report.xml")


def test_every_file_with_a_test_marked_cuda_is_a_check_of_its_own(tmp_path: Path) -> None:
    found = {each.key for each in gpu_checks.checks(ROOT, "cuda", tmp_path)}
    assert {"tests/cuda/test_late_reading.py", "tests/core/cli/test_every_key.py", "runs/cuda/test_resume.py"} <= found
    assert "tests/core/test_wording.py" not in found


def test_every_benchmark_exists_and_takes_the_device(tmp_path: Path) -> None:
    for device in ("cuda", "cpu"):
        for each in gpu_checks.checks(ROOT, device, tmp_path):
            if each.part not in ("tests", "runs"):
                assert (ROOT / each.arguments[0]).is_file()
                assert each.arguments[1:4] == ("--device", device, "--json")
                assert each.limit_sec <= harness.PART_SEC[device]


RECORD = gpu_results.Record(
    "speed",
    "loop",
    "2026-01-02T03:04:05+00:00",
    "abc",
    12.0,
    [gpu_results.Row("a | b", "MISSED", 0.98, 0.97, 0.99, "x", "at least 0.99", reason="slow")],
    [gpu_results.Table("Kernels", ("kernel", "calls"), [("gemm<int>", 1200), ("scan", 3)])],
    {"torch": "2.11", "device": "H100", "triton": None},
)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "new" / "results.json"
    assert gpu_results.load(file, "cuda") == {}
    gpu_results.save(file, "cuda", {RECORD.key: RECORD})
    found = gpu_results.load(file, "cuda")
    gpu_results.save(file, "cuda", found)
    assert gpu_results.load(file, "cuda") == found
    assert replace(found[RECORD.key], tables=RECORD.tables) == RECORD
    assert [path.name for path in file.parent.iterdir()] == ["results.json"]


def test_results_of_another_device_or_damaged_ones_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    gpu_results.save(file, "cuda", {})
    with pytest.raises(ValueError, match=r"results\.json: has format 1 of cuda, not 1 of cpu; move it away"):
        gpu_results.load(file, "cpu")
    file.write_text("{")
    with pytest.raises(ValueError, match="move it away"):
        gpu_results.load(file, "cuda")


def test_the_page_has_figures_goals_tables_and_versions() -> None:
    page = gpu_results.render([RECORD], "cuda")
    assert "| a \\| b | 0.98 (0.97 to 0.99) | at least 0.99 | MISSED: slow |" in page
    assert "| gemm<int> | 1,200 |" in page
    assert "- 2026-01-02, commit abc: torch 2.11, device H100\n" in page
    assert "rehearsal" not in page
    assert "a rehearsal, whose figures mean nothing" in gpu_results.render([RECORD], "cpu")


@pytest.fixture
def two_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """`make gpu` with two parts of one check each, whose code is given."""

    def main(*arguments: str, speed: str, ledger: str) -> int:
        made = [check("a", speed), check("b", ledger, part="ledger")]
        monkeypatch.setattr(harness, "checks", lambda root, device, results: made)
        monkeypatch.setattr(harness, "make_corpus", lambda environ: None)
        return harness.main(["--json", str(tmp_path / "results.json"), *arguments])

    return main


GOOD = figures({**FIGURE, **NO_GOAL})
BAD = figures({**FIGURE, **MISSED})


def test_parts_are_merged_and_the_exit_code_is_that_of_what_ran(
    two_checks: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def statuses() -> dict[str, str]:
        content = json.loads((tmp_path / "results.json").read_text())["checks"]
        return {key: record["rows"][0]["status"] for key, record in content.items()}

    assert two_checks("--part", "ledger", speed=GOOD, ledger=BAD) == 1
    assert statuses() == {"ledger/b": "MISSED"}
    assert two_checks("--part", "speed", speed=GOOD, ledger=GOOD) == 0
    assert statuses() == {"speed/a": "measured", "ledger/b": "MISSED"}
    assert two_checks(speed=BAD, ledger=GOOD) == 1
    assert statuses() == {"speed/a": "MISSED", "ledger/b": "measured"}
    assert two_checks("--check", "b", speed=BAD, ledger=GOOD) == 0
    assert "MISSED: x: 2 2 is not at least 3" in capsys.readouterr().out
    assert (tmp_path / "results.md").read_text().count("## ") == 2
    assert two_checks("--check", "nothing", speed=GOOD, ledger=GOOD) == 2


def test_a_machine_without_a_device_is_refused(
    two_checks: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "versions", lambda: {"torch": "2.11", "device": None})
    assert two_checks(speed=GOOD, ledger=GOOD) == 2
    assert "torch 2.11 of" in capsys.readouterr().err
    assert two_checks("--device", "cpu", "--part", "speed", speed=GOOD, ledger=GOOD) == 0
