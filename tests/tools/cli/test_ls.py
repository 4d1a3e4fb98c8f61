"""`train ls`: what the files of runs say, at a glance."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from tests.support.in_process import program
from tests.support.records import write_record
from trainer.errors import UserError
from trainer.tools.verbs.records import entry_of, find_runs, ls

NOW = 1_000_000.0


def make_run(path: Path, state: str, losses: list[float], *, age: float = 90.0, now: float = NOW) -> Path:
    status = {"state": state, "last_step": len(losses), "pid": 1}
    write_record(path, {"loss": losses}, config={"train": {"steps": 100}}, status=status)
    os.utime(path / "metrics.jsonl", (now - age, now - age))
    return path


def test_an_entry_says_state_step_loss_age_and_verdict(tmp_path):
    healthy = entry_of(make_run(tmp_path / "a", "done", [5.0, 4.0, 3.5]), now=NOW)
    assert (healthy.state, healthy.step, healthy.steps, healthy.loss, healthy.age_sec) == ("done", 3, 100, 3.5, 90.0)
    assert healthy.verdict == "nothing wrong in what was measured", "a loss alone is not health"
    (tmp_path / "a" / "config.resolved.toml").write_text("[train]\nsteps = 2\ntokens = 99\n")  # steps of full batches
    assert entry_of(tmp_path / "a", now=NOW).steps is None
    broken = [3.0 - step / 100 for step in range(60)] + [float("nan")]
    diverged = entry_of(make_run(tmp_path / "b", "failed", broken), now=NOW)
    assert diverged.verdict not in (None, "healthy")
    empty = write_record(tmp_path / "c", {})
    (empty / "events.jsonl").write_text('{"ev')
    entry = entry_of(empty, now=time.time())
    assert (entry.verdict, entry.age_sec < 99) == ("skipped 1 line of events.jsonl", True), "no row is no damage"


def test_a_pipe_gets_whole_lines_and_a_narrow_terminal_every_number(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = "many/levels/of/folders/tiny-20261125-143000"
    make_run(Path(name), "done", [5.0, 4.0, 3.5])
    monkeypatch.setenv("COLUMNS", "0")  # as some containers do
    assert name in program(["ls", "many/levels/of/folders"], capsys).stdout
    monkeypatch.setenv("COLUMNS", "60")
    narrow = program(["ls", "many/levels/of/folders"], capsys).stdout
    assert max(map(len, narrow.splitlines())) <= 60
    assert "…" not in narrow


def test_the_step_is_the_later_of_the_last_row_and_the_status(tmp_path):
    """Rows are ten steps apart, and a run may stop in between; a status may be older than the last row."""
    path = make_run(tmp_path / "a", "stopped", [5.0, 4.0, 3.5])
    for said, shown in ((5, 5), (2, 3), ("?", 3)):
        (path / "status.json").write_text(json.dumps({"state": "stopped", "last_step": said, "pid": 1}))
        assert entry_of(path, now=NOW).step == shown


def test_runs_are_found_in_directories_and_by_name(tmp_path):
    make_run(tmp_path / "runs" / "a", "done", [1.0])
    make_run(tmp_path / "runs" / "b", "done", [1.0])
    (tmp_path / "runs" / "c").mkdir()
    both = [tmp_path / "runs" / "a", tmp_path / "runs" / "b"]
    assert find_runs([str(tmp_path / "runs")]) == both
    assert find_runs([str(both[1]), str(tmp_path / "runs")]) == [both[1], both[0]]
    assert find_runs([f"{tmp_path}/runs" + "/../runs" * (510 - len(str(tmp_path)) // 8)]) == []  # too long for files
    with pytest.raises(UserError, match="is not a directory"):
        find_runs([str(tmp_path / "nowhere")])


def test_the_program_prints_the_newest_last(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "new", "done", [2.0, 1.25], age=1)
    make_run(tmp_path / "runs" / "old", "stopped", [2.5], age=10_000)
    table = program(["ls"], capsys)
    assert table.returncode == 0, table.stderr
    lines = [line for line in table.stdout.splitlines() if "runs/" in line]
    assert [line.split()[1] for line in lines] == ["runs/old", "runs/new"]
    assert "2/100" in lines[1]
    assert "1.2500" in lines[1]


def test_a_run_that_failed_before_its_first_number_stands_where_it_belongs_and_says_why(tmp_path, capsys):
    now = time.time()
    make_run(tmp_path / "runs" / "old", "done", [2.5], age=10_000, now=now)
    make_run(tmp_path / "runs" / "new", "done", [2.0], age=1, now=now)
    failed = make_run(tmp_path / "runs" / "failed", "failed", [])
    status = {"state": "failed", "last_step": 0, "pid": 1, "reason": "KeyError: 'x' " + "and more " * 30}
    (failed / "status.json").write_text(json.dumps(status))
    os.utime(failed / "status.json", (now - 200, now - 200))
    ls([str(tmp_path / "runs")], as_json=True)
    listed = json.loads(capsys.readouterr().out)
    assert [Path(each["run"]).name for each in listed] == ["old", "failed", "new"]
    assert 200 <= listed[1]["age_sec"] < 500
    assert listed[1]["reason"] == status["reason"]
    ls([str(tmp_path / "runs")])
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"failed │ 0/100 │ - │ - │ [3-8] min", shown), shown
    assert "KeyError:" in shown  # the column wraps
    assert "..." in shown
