"""A damaged checkpoint: `auto` falls back one and says so, an explicit path is refused with one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support.fault_runs import ARGUMENTS, keep, make_config, row_differences, whole_run
from tests.support.ranks import Ranks, checkpoint_differences
from tests.support.runs import run

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
SHORT = (*ARGUMENTS, "--steps", 15)


def edit(path: Path, change) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def flip(path: Path) -> None:
    edit(path, lambda data: data.__setitem__(len(data) // 2, data[len(data) // 2] ^ 1))


def rewrite_marker(path: Path, **changes: object) -> None:
    marker = path / "COMPLETE"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), **changes}))


def empty(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def in_place_of(path: Path) -> None:
    path.unlink()
    path.mkdir()


def unlist(path: Path, name: str) -> None:
    (path / name).unlink()
    files = json.loads((path / "COMPLETE").read_text())["files"]
    del files[name]
    rewrite_marker(path, files=files)


DAMAGES = {
    "missing marker": lambda path: (path / "COMPLETE").unlink(),
    "marker cut short": lambda path: edit(
        path / "COMPLETE", lambda data: data.__delitem__(slice(len(data) // 2, None))
    ),
    "wrong version": lambda path: rewrite_marker(path, format_version=99),
    "truncated shard": lambda path: os.truncate(
        path / "rank_001.safetensors", (path / "rank_001.safetensors").stat().st_size - 100
    ),
    "flipped byte in the weights": lambda path: flip(path / "model_000.safetensors"),
    "flipped byte in a rank's shard": lambda path: flip(path / "rank_001.safetensors"),
    "flipped byte in state.json": lambda path: flip(path / "state.json"),
    "missing rank's shard": lambda path: (path / "rank_001.safetensors").unlink(),
    "shard missing in files and marker": lambda path: unlist(path, "rank_001.safetensors"),
    "flipped byte in the states": lambda path: flip(path / "rank_001.rows"),
    "states missing in files and marker": lambda path: unlist(path, "rank_001.rows"),
    "empty file": lambda path: (path / "rank_000.safetensors").write_bytes(b""),
    "empty directory": empty,
    "unreadable (a directory in a file's place)": lambda path: in_place_of(path / "model_000.safetensors"),
    "grown file": lambda path: edit(path / "model_000.safetensors", lambda data: data.extend(b"\0" * 4096)),
}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    directory = tmp_path_factory.mktemp("damage")
    config = make_config(directory)
    return config, whole_run(config, directory / "run", "--steps", 15)


@pytest.mark.parametrize("kind", DAMAGES)
def test_auto_falls_back_one_and_a_path_is_refused(untouched, tmp_path, kind):
    config, whole = untouched
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir, symlinks=True)
    newest = run_dir / "checkpoints" / "step_00000015"
    DAMAGES[kind](newest)
    by_path = run("--config", config, "--resume", newest, "--steps", 20)
    assert by_path.returncode == 2
    assert str(newest) in by_path.stderr
    assert by_path.stderr.count("\n") == 1, by_path.stderr
    with Ranks(("--config", config, "--run-dir", run_dir, "--resume", "auto", *SHORT), logs=tmp_path / "logs") as ranks:
        assert ranks.wait() == [0, 0], ranks.said()
        said = ranks.said()
    assert said.count("falling back to the checkpoint before it") == 1
    assert "resuming after step 10" in said
    assert row_differences(whole, run_dir) == []
    name = "checkpoints/step_00000015"
    assert checkpoint_differences(whole / name, run_dir / name) == []
    keep(2, f"checkpoint damage: {kind}", lost="5 steps, trained again")
