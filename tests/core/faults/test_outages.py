"""A full disk, a file-size limit, a read-only directory: the run stops and says why; a stopped wandb does not matter."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fault_runs import ARGUMENTS, LOST, assert_same, end_with, keep, make_config, whole_run
from tests.support.ranks import Ranks, children, last_logged, status
from tests.support.runs import train
from trainer.training.extension import Extension

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]
STOP_AT_5 = {"what": "signal", "rank": 0, "step": 5}


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


class Fills(Extension):
    """Leaves no byte free from the third step on."""

    def settled(self, step, sums):
        if step.number == 3:
            (self.run.run_dir.path.parent / "filler").touch()
            fill(self.run.run_dir.path.parent / "filler")


def test_a_disk_that_stays_full_does_not_keep_the_run_from_saying_how_it_ended(small_disk, tmp_path):
    config, fills = make_config(tmp_path), "extension=[{target='tests.core.faults.test_outages:Fills'}]"
    train(config, small_disk / "run", fills, "train.steps=1000", code=1)
    ended = status(small_disk / "run")
    assert ended["state"] == "failed"
    assert "No space left on device" in ended["reason"]
    keep(2, "full disk: no byte is left, ever, from step 3 on", lost=LOST)


@pytest.mark.parametrize("left", [0, 40_000])
def test_a_full_disk_stops_the_run_and_loses_no_older_checkpoint(small_disk, tmp_path, left):
    config = make_config(tmp_path)
    whole = whole_run(config, tmp_path / "whole", "--steps", 20)
    run_dir = small_disk / "run"
    whole_run(config, run_dir, "--steps", 20, fault=STOP_AT_5)
    filler = small_disk / "filler"
    filler.write_bytes(b"\0" * max(shutil.disk_usage(small_disk).free - left - 60_000, 0))  # 60 kB for the record
    if left == 0:
        fill(filler)
    arguments = ("--config", config, "--run-dir", run_dir, "--resume", "auto", *ARGUMENTS, "--steps", 20)
    with Ranks(arguments, logs=tmp_path / "full") as ranks:
        codes, said = ranks.wait(), ranks.said()
    assert 0 not in codes
    assert "Traceback" not in said, said
    if left:
        assert codes == [1, 1]
        assert status(run_dir)["state"] == "failed"
        assert "the checkpoint could not be written: rank " in status(run_dir)["reason"]
        assert "No space left on device" in status(run_dir)["reason"]
    else:
        assert "No space left on device" in said
    assert [path.name for path in sorted((run_dir / "checkpoints").glob("*step_*"))] == ["step_00000005"]
    filler.unlink()
    end_with(0, arguments, tmp_path / "again")
    assert_same(whole, run_dir, 20)
    what = "no byte is left" if left == 0 else "less is left than a checkpoint needs"
    keep(2, f"full disk: {what}", lost=LOST)


def test_a_wandb_service_that_is_stopped_holds_up_no_step(tmp_path):
    config = make_config(tmp_path, 'wandb = { mode = "offline", project = "trainer-test" }\n')
    run_dir = tmp_path / "run"
    arguments = ("--config", config, "--run-dir", run_dir, *ARGUMENTS, "--steps", 300)
    services: list[int] = []
    with Ranks(arguments, logs=tmp_path / "logs", is_fresh=True) as ranks:
        try:
            assert ranks.until(lambda: last_logged(run_dir / "metrics.jsonl") >= 3), ranks.said()
            services = descendants(ranks.processes[0].pid)
            for service in services:
                os.kill(service, signal.SIGSTOP)
            assert ranks.wait() == [0, 0], ranks.said()
        finally:
            for service in services:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(service, signal.SIGKILL)
        said = ranks.said(0)
    assert services
    assert last_logged(run_dir / "metrics.jsonl") == 300
    assert "wandb: " in said
    assert "rows were dropped" in said
    keep(6, "SIGSTOP of wandb's service", lost="wandb's rows since then")


def descendants(pid: int) -> list[int]:
    return [each for child in children(pid) for each in (child, *descendants(child))]
