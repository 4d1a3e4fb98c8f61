"""What a run must survive or refuse clearly: a read-only run directory, a jumping clock, a closed stdout, a stopped wandb."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.fault_runs import ARGUMENTS, assert_same, end_with, keep, make_config, whole_run
from tests.support.ranks import Ranks, children, last_logged
from trainer.metrics.payload_contract import validate_stream

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]
JUMPY_CLOCK = """
import itertools, time
_jumps = itertools.cycle([0.0, 86400.0, -7200.0, 3600.5, -1e9])
_now = time.time
time.time = lambda: _now() + next(_jumps)
"""


@pytest.fixture
def read_only(tmp_path):
    place = tmp_path / "read_only"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,ro", "tmpfs", place], check=False, capture_output=True
    ).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_read_only_run_directory_is_refused_with_one_line(tmp_path, read_only):
    arguments = ("--config", make_config(tmp_path), "--run-dir", read_only / "run", *ARGUMENTS)
    said = end_with(2, arguments, tmp_path / "logs")
    assert f"{read_only / 'run'}: cannot be written: Read-only file system; choose another place with --run-dir" in said
    assert len([line for line in said.splitlines() if line and " INFO " not in line]) == 1, said
    keep(7, "a run directory on a read-only file system", lost="–")


def test_clock_jumps_change_nothing(tmp_path):
    config = make_config(tmp_path)
    whole = whole_run(config, tmp_path / "whole", "--steps", 20)
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(JUMPY_CLOCK)
    path = f"{tmp_path / 'clock'}:{Path(__file__).parents[3]}"
    run_dir = tmp_path / "run"
    arguments = ("--config", config, "--run-dir", run_dir, *ARGUMENTS, "--steps", 20)
    end_with(0, arguments, tmp_path / "logs", extra={"PYTHONPATH": path}, is_fresh=True)
    assert_same(whole, run_dir, 20)
    assert not list(validate_stream((run_dir / "metrics.jsonl").read_bytes().splitlines()))
    keep(6, "a wall clock that jumps by hours, days and 30 years at every reading")


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
                with suppress(ProcessLookupError):
                    os.kill(service, signal.SIGKILL)
        said = ranks.said(0)
    assert services
    assert last_logged(run_dir / "metrics.jsonl") == 300
    assert "wandb: " in said
    assert "rows were dropped" in said
    keep(6, "SIGSTOP of wandb's service", lost="wandb's rows since then")


def descendants(pid: int) -> list[int]:
    return [each for child in children(pid) for each in (child, *descendants(child))]
