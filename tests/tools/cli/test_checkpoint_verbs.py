"""`train checkpoint list` and `verify` on the checkpoints of a real run."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.support.grouped import run
from tests.support.in_process import program
from tests.support.runs import write_tiny_config


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("verbs")
    config = write_tiny_config(directory, "\n[checkpoint]\nevery = 2\nkeep_last = 3\n")
    assert run("--config", config, "--run-dir", directory / "run").returncode == 0
    return directory / "run"


def rows(printed: str) -> list[list[str]]:
    """The cells of a table: step, MB, ranks, state (its first line)."""
    found = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in printed.splitlines() if "\u2502" in line]
    return [cells for cells in found if cells[0]]


def test_list_shows_the_newest_first_and_what_has_no_marker(run_dir, tmp_path, capsys):
    copied = tmp_path / "run"
    shutil.copytree(run_dir, copied, symlinks=True)
    (copied / "checkpoints" / "step_00000004" / "COMPLETE").unlink()
    result = program(["checkpoint", "list", copied], capsys)
    assert result.returncode == 0, result.stderr
    found = rows(result.stdout)
    assert [(step, ranks) for step, _, ranks, _ in found] == [("6", "1"), ("4", "?"), ("2", "1")]
    assert [state.split(" (")[0] for *_, state in found] == ["complete", "is not complete", "complete"]
    size = sum(path.stat().st_size for path in (copied / "checkpoints" / "step_00000006").iterdir())
    assert found[0][1] == f"{size / 1e6:.1f}"
    found = json.loads(program(["checkpoint", "list", copied, "--json"], capsys).stdout)["checkpoints"]
    assert [(each["step"], each["world_size"]) for each in found] == [(6, 1), (4, None), (2, 1)]
    assert [each["problem"] is None for each in found] == [True, False, True]
    assert found[0]["num_bytes"] == size


def test_verify_reads_every_file_and_fails_for_one_flipped_byte(run_dir, tmp_path, capsys):
    result = program(["checkpoint", "verify", run_dir], capsys)
    assert result.returncode == 0, result.stderr
    copied = tmp_path / "run"
    shutil.copytree(run_dir, copied, symlinks=True)
    damaged = copied / "checkpoints" / "step_00000002" / "rank_000.safetensors"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    assert program(["checkpoint", "list", copied], capsys).returncode == 0  # reads no tensors
    result = program(["checkpoint", "verify", copied, "--json"], capsys)
    assert result.returncode == 2
    assert f"{damaged}: is damaged" in result.stderr
    assert result.stderr.count("\n") == 1
    assert [each["problem"] is None for each in json.loads(result.stdout)["checkpoints"]] == [True, True, False]
    shown = rows(program(["checkpoint", "verify", copied], capsys).stdout)
    assert [state == "verified" for *_, state in shown] == [True, True, False]


def test_what_has_no_checkpoint_is_refused_with_one_line(tmp_path, capsys):
    result = program(["checkpoint", "list", tmp_path / "nowhere"], capsys)
    assert result.returncode == 2
    assert result.stderr == (f"{tmp_path / 'nowhere'}: has no checkpoint; name a run (runs/NAME-TIME) that saved one\n")
