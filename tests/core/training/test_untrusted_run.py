"""The files of a live run: each opened by the one reader or writer for untrusted files, and what is done to them meanwhile."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_process import program, train_here
from tests.support.late import events
from tests.support.launched import children
from tests.support.runs import EVERY_FILE, FULL_ROWS, write_tiny_config
from trainer.training.extension import Extension

FILES = str(Path(sys.modules["trainer"].__path__[0], "files.py"))
VERBS = (
    "ls",
    "diagnose",
    "compare",
    "report",
    "bisect",
    "eval",
    "checkpoint list",
    "checkpoint verify",
    "data at",
    "mix",
)
_opened: dict[str, str] = {}
_root = ""


def note_open(event: str, args: tuple[Any, ...]) -> None:
    """An audit hook, which stays for the process: what is opened below `_root`, by which of our modules."""
    if event != "open" or not _root or not isinstance(args[0], str | os.PathLike):
        return
    if (path := os.path.abspath(os.fspath(args[0]))).startswith(_root) and not os.path.isdir(path):
        frame = sys._getframe(1)
        while frame.f_back is not None and f"{os.sep}trainer{os.sep}" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame.f_code.co_filename != FILES:
            _opened[os.path.relpath(path, _root)] = f"{frame.f_code.co_filename}:{frame.f_lineno}"


def test_every_file_is_opened_by_the_reader_and_writer_for_untrusted_files(tmp_path, capsys):
    global _root
    config, run_dir = write_tiny_config(tmp_path), tmp_path / "run"
    sys.addaudithook(note_open)
    _root = f"{run_dir}{os.sep}"
    try:
        train_here(config, run_dir, *EVERY_FILE, "train.steps=4")
        train_here(run_dir / "config.resolved.toml", run_dir, "train.steps=6", "checkpoint.resume=auto")
        for verb in VERBS:
            more = {
                "compare": [run_dir],
                "bisect": [run_dir],
                "data at": [3],
                "mix": ["--set", "data.source.first.weight=1"],
            }
            more["report"] = ["--out", tmp_path / "page.html"]
            assert program([*verb.split(), run_dir, *more.get(verb, [])], capsys).returncode in (0, 2 * (verb == "mix"))
    finally:
        _root = ""
    assert _opened == {}


class Mistreats(Extension):
    """Asks for other weights as `train mix` does, and does things to the file in between."""

    def step_finished(self, taken, outcome):
        file = self.run.run_dir.path / "mix.jsonl"
        request = json.dumps({"id": str(taken.step), "set": [f"data.source.first.weight={taken.step}"]}) + "\n"
        if taken.step in (2, 26):
            with file.open("a") as opened:
                opened.write(request)
        elif taken.step == 8:
            file.unlink()
            os.mkfifo(file)
        elif taken.step in (12, 18):  # at 18 in place, and no longer than it was
            if taken.step == 12:
                file.unlink()
            file.write_text(request)


@pytest.mark.parametrize("in_tokens", [False, True])
def test_no_request_is_lost_and_no_change_forgotten_whatever_becomes_of_their_file(tmp_path, in_tokens):
    config, run_dir = write_tiny_config(tmp_path, "[checkpoint]\nevery = 1\nkeep_last = 99\n"), tmp_path / "run"
    mistreats = "extension=[{target='tests.core.training.test_untrusted_run:Mistreats'}]"
    length = [FULL_ROWS, f"train.tokens={28 * 128}", "train.steps=0"] if in_tokens else ["train.steps=28"]
    train_here(config, run_dir, *length, mistreats)
    said = {event["request"]: event for event in events(run_dir) if event["event"] == "mix"}
    assert said.keys() == {"2", "12", "18", "26"}
    assert "the run ends after step 28" in said["26"]["problem"]
    changes = {str(said[each]["batch"]): {"first": float(each)} for each in ("2", "12", "18")}
    states = [
        json.loads((run_dir / "checkpoints" / f"step_{step:08d}" / "state.json").read_text())["extensions"]["mix"]
        for step in (10, 28)
    ]
    assert states == [dict([*changes.items()][:1]), changes]


@pytest.fixture
def trained(tmp_path) -> Path:
    """A run of three steps, whose beginning can be repeated."""
    train_here(write_tiny_config(tmp_path), tmp_path / "run", "train.steps=3", "metrics.stdout=off")
    return tmp_path / "run"


def test_numbers_of_its_files_are_checked_before_they_are_used(trained, capsys):
    environment = json.loads((trained / "env.json").read_text())
    for size, problem in ((10**9, "what env.json says cannot be"), (9000, "--nproc 9000 starts them")):
        (trained / "env.json").write_text(json.dumps({**environment, "world_size": size}))
        done = program(["replay", trained, "--step", 2], capsys)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert problem in done.stderr
    odd = [{"batch": math.inf}, {"batch": 1e300}, {"batch": -1}, {"batch": 2, "changed": 5}, {"global_step": math.inf}]
    change = {"data.source.first.weight": {"before": 1, "after": 0.5}}
    with (trained / "events.jsonl").open("a") as file:
        for each in odd:
            file.write(json.dumps({"event": "mix", "global_step": 2, "batch": 9, "changed": change, **each}) + "\n")
    (trained / "env.json").write_text(json.dumps({**environment, "command": 5, "threads": math.inf, "devices": 5}))
    report = ["report", trained, "--out", trained.parent / "page.html"]
    for verb in (["data", "at", trained, 2], ["compare", trained, trained], ["diagnose", trained], report):
        assert program(verb, capsys).returncode == 0
    train_here(trained.parent / "tiny.toml", trained, "train.steps=4", "checkpoint.resume=auto")


def test_a_replay_that_is_stopped_leaves_nothing(trained, tmp_path, monkeypatch, capsys):
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))

    def stop() -> None:
        while not list(place.glob("*/output.txt")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    before = children(os.getpid())
    done = program(["replay", trained, "--step", 2], capsys)
    assert done.returncode == 1
    assert done.stderr.endswith("cannot be repeated to step 2: stopped\n")
    assert not list(place.iterdir())
    assert set(children(os.getpid())) <= set(before)


def test_text_that_is_not_utf_8_is_refused_in_one_line_and_a_path_works(trained, tmp_path, capsys):
    odd = os.fsdecode(b"caf\xc3")
    assert program(["export", trained, "--out", tmp_path / odd], capsys).returncode == 0
    done = program(["sample", trained, "--prompt", odd], capsys)
    assert (done.returncode, done.stderr) == (2, "--prompt: is not UTF-8; write it as UTF-8\n")
