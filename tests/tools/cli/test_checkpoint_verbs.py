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


def test_list_shows_the_newest_first_and_what_has_no_marker(run_dir, tmp_path, capsys):
    copied = tmp_path / "run"
    shutil.copytree(run_dir, copied, symlinks=True)
    (copied / "checkpoints" / "step_00000004" / "COMPLETE").unlink()
    result = program(["checkpoint", "list", copied, "--json"], capsys)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)["checkpoints"]
    columns = [(each["step"], each["is_latest"], each["world_size"]) for each in found]
    assert columns == [(6, True, 1), (4, False, None), (2, False, 1)]
    assert found[0]["problem"] is None
    assert "is not complete" in found[1]["problem"]
    directory = copied / "checkpoints" / "step_00000006"
    assert found[0]["num_bytes"] == sum(path.stat().st_size for path in directory.iterdir())
    table = program(["checkpoint", "list", copied], capsys)
    assert "complete, latest" in table.stdout
    assert "is not complete" in table.stdout


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


@pytest.mark.parametrize("verb", ["list", "verify"])
@pytest.mark.parametrize("made", ["", "nowhere/checkpoints"])
def test_what_has_no_checkpoint_is_refused_with_one_line(tmp_path, capsys, verb, made):
    (tmp_path / made).mkdir(parents=True, exist_ok=True)
    result = program(["checkpoint", verb, tmp_path / "nowhere"], capsys)
    assert result.returncode == 2
    assert result.stderr == (
        f"{tmp_path / 'nowhere'}: has no checkpoint; name a run (runs/NAME-TIME) that saved one, or the store of one\n"
    )
