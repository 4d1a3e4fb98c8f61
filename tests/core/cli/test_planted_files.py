"""Links, pipes, devices and directories under the names of a run's files: refused by name, and nothing is touched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.grouped import train
from tests.support.in_process import program
from tests.support.runs import write_tiny_config

pytestmark = pytest.mark.timeout(300)
FILES = ("metrics.jsonl", "events.jsonl", "status.json", "config.resolved.toml")
PRECIOUS = "precious, and without a newline"


def link(path: Path) -> None:
    path.symlink_to(next(each for each in path.parents if (each / "victim").exists()) / "victim")


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


PLANTS: dict[str, Callable[[Path], object]] = {"link": link, "pipe": os.mkfifo, "directory": Path.mkdir, "zero": device}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("planted")
    config = write_tiny_config(directory)
    train(config, directory / "run", "train.steps=2")
    return config, directory / "run"


def resume(config: Path, run_dir: Path, code: int) -> str:
    return train(config, run_dir, more=("--resume", "auto", "--steps", 3), code=code)


def copy_with(whole: Path, tmp_path: Path, name: str, kind: str) -> Path:
    """A copy of the run with something else in the place of a file; a link points to `victim` beside it."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir, symlinks=True)
    (tmp_path / "victim").write_text(PRECIOUS)
    (run_dir / name).parent.mkdir(exist_ok=True)
    (run_dir / name).unlink(missing_ok=True)
    PLANTS[kind](run_dir / name)
    return run_dir


def content(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("metrics.jsonl", "link"), ("status.json", "pipe"), ("logs/rank_000.log", "link"), (".lock", "link")],
)
def test_a_resume_refuses_it_by_name_and_writes_nothing(trained, tmp_path, name, kind):
    config, whole = trained
    run_dir = copy_with(whole, tmp_path, name, kind)
    before = content(run_dir)
    said = resume(config, run_dir, code=2)
    what = "a symbolic link" if kind == "link" else "a pipe"
    assert f"{run_dir / name}: cannot be written: {what}, not a plain file; choose another" in said
    assert "Traceback" not in said
    assert (tmp_path / "victim").read_text() == PRECIOUS
    assert content(run_dir) == before


def test_latest_is_a_link_or_nothing(trained, tmp_path):
    config, whole = trained
    run_dir = copy_with(whole, tmp_path, "checkpoints/latest", "directory")
    said = resume(config, run_dir, code=2)
    assert f"{run_dir}/checkpoints/latest: cannot be written: a directory, not a plain file" in said


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("name", FILES)
def test_reading_verbs_neither_wait_nor_fail(trained, tmp_path, capsys, name, kind):
    path = copy_with(trained[1], tmp_path, name, kind) / name
    shutil.copytree(trained[1], tmp_path / "neighbour", symlinks=True)
    pair = (tmp_path / "run", tmp_path / "neighbour")
    report = ["report", *pair, "--out", tmp_path / "r.html"]
    for verb in (["ls", tmp_path], ["diagnose", pair[0]], ["compare", *pair], report):
        done = program(verb, capsys)
        if name == "metrics.jsonl" and verb[0] != "ls":  # there is nothing to show of this run
            assert done.returncode == 2
            assert done.stderr.count("\n") == 1
            assert str(path) in done.stderr
        else:
            assert done.returncode in (0, 3), done.stderr


def test_linked_directories_are_as_good_as_their_own(trained, tmp_path):
    """A run directory, and its checkpoints on another disk."""
    config, whole = trained
    shutil.copytree(whole, tmp_path / "real", symlinks=True)
    shutil.move(tmp_path / "real" / "checkpoints", tmp_path / "disk")
    (tmp_path / "real" / "checkpoints").symlink_to(tmp_path / "disk")
    (tmp_path / "run").symlink_to("real")
    resume(config, tmp_path / "run", code=0)
    assert (tmp_path / "disk" / "step_00000003" / "COMPLETE").is_file()
