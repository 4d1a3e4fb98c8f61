"""The status of a loop that is not the trainer's: what it says while it runs, and however it ends."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import status
from tests.support.records import write_lock, write_record
from trainer.errors import UserError
from trainer.lab.own_loop import run_status
from trainer.metrics.run_status import _place, _started, is_held, last_step, take_lock
from trainer.tools.diagnostics.diagnose import diagnose
from trainer.tools.runs.load import load_run
from trainer.tools.verbs.records import entry_of


def write_rows(directory: Path, *steps: int) -> None:
    write_record(directory, {"loss": dict.fromkeys(steps, 2.0)})


def ending(directory: Path) -> tuple[str, str]:
    """What the rule about the ending says."""
    outcome = next(ruling for ruling in diagnose(load_run(directory)).rulings if ruling.rule.name == "ending").outcome
    return outcome.verdict, outcome.sentence


def test_a_run_is_running_and_then_done_with_the_step_of_its_last_row(tmp_path: Path) -> None:
    out = tmp_path / "new" / "run"
    with run_status(out):
        assert (status(out)["state"], status(out)["last_step"]) == ("running", None)
        write_rows(out, 1, 10, 20)
        assert entry_of(out, now=0.0).state == "running"
        assert ending(out) == ("not_measured", "the run is running")
    assert (status(out)["state"], status(out)["last_step"]) == ("done", 20)
    assert not is_held(out)
    assert ending(out) == ("healthy", "the run is done")


@pytest.mark.parametrize(("environ", "known"), [("", None), ("4", 4)])
def test_the_number_of_ranks_is_torchrun_s(tmp_path, monkeypatch, environ, known) -> None:
    monkeypatch.setenv("WORLD_SIZE", environ)
    with run_status(tmp_path):
        write_rows(tmp_path, 1)
    assert load_run(tmp_path).world_size == known


def interrupted() -> SystemExit:
    """What a framework makes of an interrupt."""
    error = SystemExit(1)
    error.__context__ = KeyboardInterrupt()
    return error


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (ValueError("bad batch"), "failed", "ValueError: bad batch"),
        (SystemExit("no data"), "failed", "exit: no data"),
        (SystemExit(0), "done", ""),
        (KeyboardInterrupt(), "stopped", "stopped by SIGINT"),
        (interrupted(), "stopped", "stopped by SIGINT"),
    ],
)
def test_an_exception_is_passed_on_and_says_how_the_run_ended(
    tmp_path: Path, error: BaseException, state: str, reason: str
) -> None:
    write_rows(tmp_path, 1, 2)
    with pytest.raises(type(error)), run_status(tmp_path):
        raise error
    assert (status(tmp_path)["state"], status(tmp_path)["reason"], status(tmp_path)["last_step"]) == (state, reason, 2)
    assert ending(tmp_path)[0] == ("finding" if state == "failed" else "healthy")


def test_only_rank_0_writes_and_two_runs_in_one_directory_are_refused(tmp_path: Path) -> None:
    with run_status(tmp_path, rank=1):
        assert not list(tmp_path.iterdir())
    with run_status(tmp_path), pytest.raises(UserError, match="is in use by another run"), run_status(tmp_path):
        pass
    assert status(tmp_path)["state"] == "done"


HERE = {"place": _place(), "pid": os.getpid(), "started": _started(os.getpid())}
ABSENT = {**HERE, "pid": 2**22 + 1}
OTHERS = {
    "a process of this host": (HERE, 1e6, True),
    "another one of its number": ({**HERE, "started": "1"}, 0.0, False),
    "none of its number": (ABSENT, 0.0, False),
    "none of its number, which did not know its start": ({**ABSENT, "started": ""}, 1000.0, False),
    "one in another container of this host": ({**ABSENT, "place": f"{HERE['place']}1"}, 60.0, True),
    "one of another host": ({}, 60.0, True),
    "one of another host, long ago": ({}, 1000.0, False),
    "one that says that it may be silent for longer": ({"timeout_sec": 2000.0}, 1000.0, True),
    "one of another host that has given it back": ({"is_over": True}, 0.0, False),
    "nobody knows": (None, 5.0, True),
    "nobody knows, a minute ago": (None, 60.0, False),
}


@pytest.mark.skipif(not HERE["place"], reason="without /proc no process can be looked up")
@pytest.mark.parametrize(("owner", "silent_sec", "lives"), OTHERS.values(), ids=OTHERS)
def test_whose_run_it_is(tmp_path: Path, owner: dict[str, Any] | None, silent_sec: float, lives: bool) -> None:
    write_lock(tmp_path, owner, silent_sec)
    assert is_held(tmp_path) == lives
    if owner is HERE:
        with pytest.raises(UserError, match=f"process {os.getpid()} on elsewhere"):
            take_lock(tmp_path)
    if not lives:
        with take_lock(tmp_path, 600.0):
            assert is_held(tmp_path)
        assert not is_held(tmp_path)


@pytest.mark.parametrize(("silent_sec", "lives"), [(60.0, True), (1000.0, False)])
def test_another_user_s_process_that_proc_hides_is_judged_by_its_signs(
    tmp_path, monkeypatch, silent_sec, lives
) -> None:
    def kill(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr("trainer.metrics.run_status._started", lambda pid: "")
    write_lock(tmp_path, HERE, silent_sec)
    assert is_held(tmp_path) == lives


@pytest.mark.parametrize("shows_itself", [False, True])
def test_a_process_of_another_host_is_waited_for(tmp_path: Path, caplog: Any, shows_itself: bool) -> None:
    write_lock(tmp_path)
    later = threading.Timer(0.5, os.utime, [tmp_path / ".lock"])
    began = time.monotonic()
    if shows_itself:
        later.start()
        with pytest.raises(UserError, match="process 1 on elsewhere"):
            take_lock(tmp_path, 60.0)
    else:
        with take_lock(tmp_path, 2.0) as lock:
            lock.check()
            time.sleep(0.5)
            assert time.time() - (tmp_path / ".lock").stat().st_mtime < 0.4, "it shows itself"
    assert 1.0 < time.monotonic() - began < 20
    assert "process 1 on elsewhere had it last, and cannot be looked up from here; waiting up to" in caplog.text


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """A run of seven steps whose process was killed."""
    path: Path = tmp_path_factory.mktemp("killed")
    pid = os.fork()
    if not pid:
        try:
            with run_status(path):
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    write_rows(path, 1, 7)
    return path


def test_every_reader_says_in_the_same_words_that_a_killed_process_is_gone(killed: Path) -> None:
    words = f"process {status(killed)['pid']} on {socket.gethostname()} ended without a word at about step 7"
    entry = entry_of(killed, now=0.0)
    assert (entry.state, entry.step) == ("died", 7)
    assert str(entry.reason).startswith(words)
    assert ending(killed) == ("finding", f"the run died: {entry.reason}")


def test_the_last_step_is_that_of_the_last_complete_row(tmp_path: Path) -> None:
    assert last_step(tmp_path) is None
    write_rows(tmp_path, *range(1, 40_000, 2))
    assert (tmp_path / "metrics.jsonl").stat().st_size > 1 << 20, "only the end of the file is read"
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for tail in ("", "nonsense\n", '{"schema_version":1,"mode":"train","global'):
            file.write(tail)
            file.flush()
            assert last_step(tmp_path) == 39_999
