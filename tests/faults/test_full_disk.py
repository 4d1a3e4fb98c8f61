"""A full disk and a file-size limit: the run stops with the space that it needs, and the older checkpoint still resumes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fault_runs import ARGUMENTS, LOST, keep, make_config, row_differences, whole_run
from tests.support.ranks import Ranks, checkpoint_differences, status

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]
STOP_AT_5 = {"what": "signal", "rank": 0, "step": 5}
NAME = "checkpoints/step_00000020"


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A tmpfs of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def fill(file: Path) -> None:
    """Let it grow until the disk is full."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND)
    with contextlib.suppress(OSError):
        while os.write(descriptor, b"\0" * 4096):
            pass
    os.close(descriptor)


def resume(config: Path, run_dir: Path, logs: Path, *more: object) -> tuple[list[int], str]:
    arguments = ("--config", config, "--run-dir", run_dir, "--resume", "auto", *ARGUMENTS, "--steps", 20, *more)
    with Ranks(arguments, logs=logs) as ranks:
        return ranks.wait(), ranks.said()


@pytest.mark.parametrize(("left", "background"), [(0, False), (40_000, False), (40_000, True)])
def test_a_full_disk_stops_the_run_and_loses_no_older_checkpoint(small_disk, tmp_path, left, background):
    config = make_config(tmp_path)
    whole = whole_run(config, tmp_path / "whole", "--steps", 20)
    run_dir = small_disk / "run"
    whole_run(config, run_dir, "--steps", 20, fault=STOP_AT_5)
    filler = small_disk / "filler"
    filler.write_bytes(b"\0" * max(shutil.disk_usage(small_disk).free - left - 60_000, 0))  # 60 kB for the record
    if left == 0:
        fill(filler)
    more = ("--set", "checkpoint.background=true") if background else ()
    codes, said = resume(config, run_dir, tmp_path / "full", *more)
    assert 0 not in codes
    assert "Traceback" not in said, said
    if left:
        assert codes == [1, 1]
        assert "the checkpoint could not be written: rank 0: No space left on device" in said
        assert "it needs 0." in said
        assert status(run_dir)["state"] == "failed"
        assert "it needs 0." in status(run_dir)["reason"]
    else:
        assert "No space left on device" in said
    assert [path.name for path in sorted((run_dir / "checkpoints").glob("*step_*"))] == ["step_00000005"]
    filler.unlink()
    codes, said = resume(config, run_dir, tmp_path / "again")
    assert codes == [0, 0], said
    assert row_differences(whole, run_dir) == []
    assert checkpoint_differences(whole / NAME, run_dir / NAME) == []
    what = "no byte is left" if left == 0 else "less is left than a checkpoint needs"
    keep(2, f"full disk: {what}{', saving in the background' if background else ''}", lost=LOST)


def test_a_limit_in_the_midst_of_a_file_stops_the_run_and_loses_no_older_checkpoint(tmp_path):
    config = make_config(tmp_path)
    steps = ("--steps", 20, "--set", "metrics.log_interval=5")
    whole = whole_run(config, tmp_path / "whole", *steps)
    run_dir = whole_run(config, tmp_path / "run", *steps, fault=STOP_AT_5)
    model = run_dir / "checkpoints" / "step_00000005" / "model_000.safetensors"
    limit = model.stat().st_size // 2
    arguments = ("--config", config, "--run-dir", run_dir, "--resume", "auto", *ARGUMENTS, *steps)
    with Ranks(arguments, logs=tmp_path / "limited", max_file_bytes=limit) as ranks:
        assert ranks.wait() == [1, 1], ranks.said()
        said = ranks.said()
    assert "the checkpoint could not be written: rank 0: File too large" in said, said
    assert "Traceback" not in said
    assert not list((run_dir / "checkpoints").glob(".tmp*"))
    with Ranks(arguments, logs=tmp_path / "again") as ranks:
        assert ranks.wait() == [0, 0], ranks.said()
    assert row_differences(whole, run_dir) == []
    assert checkpoint_differences(whole / NAME, run_dir / NAME) == []
    keep(2, "a file-size limit in the midst of a checkpoint's file", lost=LOST)
