"""`train checkpoint verify` on the checkpoints of a real run."""

from __future__ import annotations

import shutil

import pytest

from tests.support.in_process import program
from tests.support.runs import run, write_tiny_config


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("verbs")
    config = write_tiny_config(directory, "\n[checkpoint]\nevery = 2\nkeep_last = 3\n")
    assert run("--config", config, "--run-dir", directory / "run").returncode == 0
    return directory / "run"


def test_verify_reads_every_file_and_fails_for_one_flipped_byte(run_dir, tmp_path, capsys):
    result = program(["checkpoint", "verify", run_dir], capsys)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.partition(": ")[0][-1] for line in lines] == ["6", "4", "2"]
    size = sum(path.stat().st_size for path in (run_dir / "checkpoints" / "step_00000006").iterdir())
    assert lines[0].endswith(f": {size / 1e6:.1f} MB, 1 rank: verified")
    copied = tmp_path / "run"
    shutil.copytree(run_dir, copied, symlinks=True)
    (copied / "checkpoints" / "step_00000004" / "COMPLETE").unlink()
    damaged = copied / "checkpoints" / "step_00000002" / "rank_000.safetensors"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    result = program(["checkpoint", "verify", copied], capsys)
    assert result.returncode == 2
    incomplete, flipped = result.stderr.splitlines()
    assert "step_00000004: is not complete" in incomplete
    assert f"{damaged}: is damaged" in flipped
    assert result.stdout.count("verified") == 1


def test_what_has_no_checkpoint_is_refused_with_one_line(tmp_path, capsys):
    result = program(["checkpoint", "verify", tmp_path / "nowhere"], capsys)
    assert result.returncode == 2
    assert result.stderr == (f"{tmp_path / 'nowhere'}: has no checkpoint; name a run (runs/NAME-TIME) that saved one\n")
