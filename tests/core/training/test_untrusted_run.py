"""The files of a live run: each opened by the one reader or writer for untrusted files, and what is done to them meanwhile."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_process import program, train_here
from tests.support.runs import EVERY_FILE, write_tiny_config

FILES = str(Path(sys.modules["trainer"].__path__[0], "files.py"))
VERBS = (
    "ls",
    "diagnose",
    "compare",
    "report",
    "eval",
    "checkpoint list",
    "checkpoint verify",
    "data at",
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
            more = {"compare": [run_dir], "data at": [3]}
            more["report"] = ["--out", tmp_path / "page.html"]
            assert program([*verb.split(), run_dir, *more.get(verb, [])], capsys).returncode == 0
    finally:
        _root = ""
    assert _opened == {}


@pytest.fixture
def trained(tmp_path) -> Path:
    """A run of three steps, whose beginning can be repeated."""
    train_here(write_tiny_config(tmp_path), tmp_path / "run", "train.steps=3", "metrics.stdout=off")
    return tmp_path / "run"


def test_numbers_of_its_files_are_checked_before_they_are_used(trained, capsys):
    environment = json.loads((trained / "env.json").read_text())
    (trained / "env.json").write_text(json.dumps({**environment, "world_size": 10**9}))
    done = program(["data", "at", trained, 2], capsys)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "what env.json says cannot be" in done.stderr
    odd = [{"global_step": math.inf}, {"global_step": 1e300}, {"global_step": -1}, {"changed": 5}]
    odd += [{"changed": {"data.source.first.weight": pair}} for pair in (5, {"before": {}, "after": math.inf})]
    with (trained / "events.jsonl").open("a") as file:
        for each in odd:
            file.write(json.dumps({"event": "restart", "global_step": 2, **each}) + "\n")
    (trained / "env.json").write_text(json.dumps({**environment, "command": 5, "threads": math.inf, "devices": 5}))
    report = ["report", trained, "--out", trained.parent / "page.html"]
    for verb in (["data", "at", trained, 2], ["compare", trained, trained], ["diagnose", trained], report):
        assert program(verb, capsys).returncode in (0, 3)  # 3: the restarts are a finding
    train_here(trained.parent / "tiny.toml", trained, "train.steps=4", "checkpoint.resume=auto")


def test_text_that_is_not_utf_8_is_refused_in_one_line_and_a_path_works(trained, tmp_path, capsys):
    odd = os.fsdecode(b"caf\xc3")
    assert program(["export", trained, "--out", tmp_path / odd], capsys).returncode == 0
    done = program(["sample", trained, "--prompt", odd], capsys)
    assert (done.returncode, done.stderr) == (2, "--prompt: is not UTF-8; write it as UTF-8\n")
