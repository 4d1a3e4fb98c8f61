"""A run that is followed: what the page is given while the files change."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from trainer.errors import UserError
from trainer.metrics.payload_contract import build_payload, build_restart, encode_payload
from trainer.metrics.run_status import take_lock
from trainer.tools.report.follow import BUSY_FACTOR, Follower


def line(step, loss=1.0, mode="train", key="loss"):
    return encode_payload(build_payload(mode, step, {key: loss})) + "\n"


class Clock:
    """Each reading takes `takes` seconds."""

    def __init__(self, takes=0.0):
        self.now, self.takes = 100.0, takes

    def __call__(self):
        self.now += self.takes
        return self.now


class Followed:
    """A run directory, its follower, and the page's questions."""

    def __init__(self, directory, clock=None):
        self.directory, self.clock = directory, clock or Clock()
        directory.mkdir(parents=True, exist_ok=True)
        self.lock = take_lock(directory)  # or a run that says "running" counts as dead
        self.metrics = directory / "metrics.jsonl"

    def start(self):
        self.follower = Follower([str(self.directory)], clock=self.clock)
        self.version = self.ask("")["version"]
        return self

    def write(self, text, mode="a"):
        with self.metrics.open(mode, encoding="utf-8") as file:
            file.write(text)

    def status(self, state, time=0.0, reason=""):
        value = {"state": state, "reason": reason, "last_step": 1, "time": time}
        (self.directory / "status.json").write_text(json.dumps(value))

    def ask(self, since=None, wait=1000.0):
        self.clock.now += wait
        found = json.loads(self.follower.answer(self.version if since is None else since))
        self.version = found["version"]
        return found


@pytest.fixture
def run(tmp_path):
    return Followed(tmp_path / "run")


def drawn_steps(found):
    return sorted({step for steps in found["data"]["steps"] for step in steps["x"]})


def test_a_run_without_rows_is_waited_for(run):
    run.start()
    assert "run: no row yet" in run.ask()["line"]
    assert "html" not in run.ask()
    run.write(line(1) + line(2, 0.5))
    found = run.ask()
    assert drawn_steps(found) == [1, 2]
    assert "Loss" in found["html"]["details"]
    assert "at step 2" in found["line"]


def test_the_parts_come_only_if_they_are_newer_than_those_of_the_page(run):
    run.write(line(1))
    run.start()
    assert set(run.ask()) == {"version", "line"}
    run.write(line(2))
    assert set(run.ask()) == {"version", "line", "html", "data"}
    assert set(run.ask()) == {"version", "line"}
    assert "html" in run.ask("of an earlier server")


def test_a_partial_line_is_left_out_until_it_is_whole(run):
    run.write(line(1) + line(2)[:30])
    run.start()
    assert drawn_steps(run.ask("")) == [1]
    run.write(line(2)[30:])
    found = run.ask()
    assert drawn_steps(found) == [1, 2]
    assert "About the record" not in found["html"]["overview"]


def test_a_resumed_run_and_a_truncated_file_are_read_anew(run):
    run.write("".join(line(step) for step in range(1, 7)))
    run.start()
    run.write(encode_payload(build_restart(3)) + "\n" + line(4, 9.0))
    found = run.ask()
    assert found["data"]["runs"][0]["restarts"] == [3]
    assert "replaced by later rows" in found["html"]["overview"]
    run.write(line(1) + line(2), mode="w")
    assert drawn_steps(run.ask()) == [1, 2]


def test_a_directory_that_is_gone_leaves_the_page_as_it_was_and_may_come_back(run):
    run.write(line(1) + line(2))
    run.start()
    kept = run.directory.with_name("moved")
    run.directory.rename(kept)
    found = run.ask()
    assert found["line"] == "run: is gone; the page shows what was read before"
    assert drawn_steps(run.ask("")) == [1, 2]
    shutil.copytree(kept, run.directory)
    run.write(line(3))
    found = run.ask()
    assert drawn_steps(found) == [1, 2, 3]
    assert "gone" not in found["line"]


def test_a_heartbeat_is_no_news_and_the_end_is(run):
    run.write(line(1))
    run.status("running")
    run.start()
    run.status("running", time=5.0)
    assert "html" not in run.ask()
    run.status("done", reason="all steps are done")
    found = run.ask()
    assert "html" in found
    assert found["line"] == "run has ended at step 1: done, all steps are done"
    run.status("running")
    assert "running at step 1, last row at " in run.ask()["line"]
    run.lock.close()  # a process that is killed writes nothing
    found = run.ask()
    assert "has ended at step 1: died, process" in found["line"]
    assert "html" in found


def test_reading_pauses_in_proportion_to_how_long_it_takes(run):
    run.clock.takes = 3.0
    run.write(line(1))
    run.start()
    run.write(line(2))
    run.ask()
    run.write(line(3))
    assert "html" not in run.ask(wait=BUSY_FACTOR * 3.0 - 10.0)
    assert "html" in run.ask(wait=10.0)


def test_step_and_time_of_the_last_row_are_of_the_same_row(run):
    run.start()
    run.write(line(1))
    os.utime(run.metrics, (1000.0, 1000.0))
    said = run.ask()["line"]
    run.write(line(2))
    os.utime(run.metrics, (5000.0, 5000.0))
    assert run.ask(wait=0.0)["line"] == said  # not read yet
    found = run.ask()["line"]
    assert "at step 2" in found
    assert found.partition("last row")[2] != said.partition("last row")[2]


def test_following_writes_nothing(run):
    run.write(line(1))
    run.status("running")
    before = {path.name: path.stat().st_mtime_ns for path in run.directory.iterdir()}
    run.start()
    run.follower.page(plotly="")
    assert {path.name: path.stat().st_mtime_ns for path in run.directory.iterdir()} == before


def test_a_file_alone_and_several_runs_can_be_followed(tmp_path):
    file = tmp_path / "other.jsonl"
    file.write_text(line(1))
    (tmp_path / "waiting").mkdir()
    clock = Clock()
    follower = Follower([str(file), str(tmp_path / "waiting")], clock=clock)
    first = json.loads(follower.answer(""))
    assert [run["name"] for run in first["data"]["runs"]] == ["other.jsonl", "waiting"]
    file.write_text(line(1) + line(2))
    clock.now += 1000
    assert drawn_steps(json.loads(follower.answer(first["version"]))) == [1, 2]


def test_a_run_that_does_not_exist_yet_is_waited_for(tmp_path):
    clock = Clock()
    path = tmp_path / "run"
    follower = Follower([str(path)], clock=clock)
    assert follower.names == [f"{path} (waiting: it does not exist yet)"]
    first = json.loads(follower.answer(""))
    assert first["line"] == f"run: waiting for {path}, which does not exist yet"
    path.mkdir()
    clock.now += 1000
    assert json.loads(follower.answer(first["version"]))["line"] == "run: no row yet"
    (path / "metrics.jsonl").write_text(line(1) + line(2))
    clock.now += 1000
    found = json.loads(follower.answer(first["version"]))
    assert drawn_steps(found) == [1, 2]
    assert follower.names == [str(path)]
    shutil.rmtree(path)
    clock.now += 1000
    assert json.loads(follower.answer(""))["line"] == "run: is gone; the page shows what was read before"


def test_a_path_in_a_directory_that_does_not_exist_is_refused_at_the_start(tmp_path):
    with pytest.raises(UserError, match="is neither a run directory nor a file"):
        Follower([str(tmp_path / "nowhere" / "run")])


def test_the_loss_is_the_latest_until_the_status_says_that_the_run_has_ended(run):
    run.write(line(1) + line(2, 0.5))
    run.start()
    for state, words in (("running", "Latest"), ("done", "Final"), ("running", "Latest"), ("failed", "Final")):
        run.status(state)
        overview = run.ask("")["html"]["overview"]
        assert [name for name in ("Latest", "Final") if f"<dt>{name} loss</dt>" in overview] == [words]


def test_the_page_asks_only_if_it_is_followed(run, tmp_path):
    run.write(line(1))
    run.start()
    page = run.follower.page(plotly="")
    assert f'data-version="{run.version}"' in page
    assert "connect-src 'self'" in page
    assert os.listdir(tmp_path) == ["run"]
    assert Path(run.metrics).read_text() == line(1)
