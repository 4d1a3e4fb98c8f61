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
from trainer.metrics.run_status import write_status
from trainer.training.extension import Extension

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]
STOP_AT_5 = {"what": "signal", "rank": 0, "step": 5}


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A tmpfs of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-osize=4m", "tmpfs", place], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def fill(file: Path) -> None:
    """Let it grow until the disk is full."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with contextlib.suppress(OSError):
        while os.write(descriptor, b"\0" * 4096):
            pass
    os.close(descriptor)


class Fills(Extension):
    """Leaves no byte free from the third step on."""

    def settled(self, step, sums):
        if step.number == 3:
            fill(self.run.run_dir.path.parent / "filler")


def test_a_disk_that_stays_full_does_not_keep_the_run_from_saying_how_it_ended(small_disk, tmp_path):
    config, fills = make_config(tmp_path), "extension=[{target='tests.core.faults.test_outages:Fills'}]"
    train(config, small_disk / "run", fills, "train.steps=1000", code=1)
    ended = status(small_disk / "run")
    assert (ended["state"], "No space left on device" in ended["reason"]) == ("failed", True), ended
    os.truncate(small_disk / "filler", (small_disk / "filler").stat().st_size - 8192)  # less than a status needs
    with pytest.raises(OSError, match="No space left"):
        write_status(small_disk / "status.json", "running", reason="", step=0)
    keep(2, "full disk: no byte is left, ever, from step 3 on", lost=LOST)


@pytest.mark.parametrize("left", [0, 40_000])
def test_a_full_disk_stops_the_run_and_loses_no_older_checkpoint(small_disk, tmp_path, left):
    config = make_config(tmp_path)
    whole = whole_run(config, tmp_path / "whole", "--steps", 20)
    run_dir = whole_run(config, small_disk / "run", "--steps", 20, fault=STOP_AT_5)
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
        assert (codes, status(run_dir)["state"]) == ([1, 1], "failed")
        assert "the checkpoint could not be written: rank " in status(run_dir)["reason"]
        assert "No space left on device" in status(run_dir)["reason"]
    else:
        assert "No space left on device" in said
    assert [path.name for path in sorted((run_dir / "checkpoints").glob("*step_*"))] == ["step_00000005"]
    filler.unlink()
    end_with(0, arguments, tmp_path / "again")
    assert_same(whole, run_dir, 20)
    keep(2, "full disk: " + ("less is left than a checkpoint needs" if left else "no byte is left"), lost=LOST)


def test_a_wandb_service_that_is_stopped_holds_up_no_step(tmp_path):
    wandb = 'wandb = { mode = "offline", project = "trainer-test" }\n'
    config, run_dir = make_config(tmp_path, wandb), tmp_path / "run"
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
