"""A run that is killed in uploads and loses its directory comes back from its store, which has only complete checkpoints."""

from __future__ import annotations

import hashlib
import json
import signal
from pathlib import Path

import pytest

from tests.support.fault_runs import ARGUMENTS, EXTRA, keep, make_config, whole_run
from tests.support.ranks import Ranks, checkpoint_differences
from tests.support.s3 import S3Server

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]
STEPS, KILLS = 60, 3
LAST = f"step_{STEPS:08d}"


def complete(store: Path) -> list[str]:
    """The checkpoints that have a marker, each of which is as its marker says."""
    markers = sorted(store.glob("step_*/COMPLETE"))
    for marker in markers:
        for name, expected in json.loads(marker.read_bytes())["files"].items():
            assert hashlib.sha256((marker.parent / name).read_bytes()).hexdigest() == expected["sha256"]
    return [marker.parent.name for marker in markers]


def test_a_run_that_is_killed_in_uploads_and_loses_its_directory_comes_back_from_the_store(tmp_path):
    whole = whole_run(make_config(tmp_path / "whole"), tmp_path / "whole" / "run", "--steps", STEPS)
    server = S3Server(tmp_path / "s3" / "root")
    store, config = server.bucket / "run", make_config(tmp_path, f'{EXTRA}remote = "s3://bucket/run"\n')
    try:
        for attempt in range(KILLS + 1):
            line = ("--config", config, "--run-dir", tmp_path / f"run{attempt}", *ARGUMENTS, "--steps", STEPS)
            before = len(complete(store))
            with Ranks(
                (*line, "--resume", "auto"), logs=tmp_path / f"logs{attempt}", extra=server.environment()
            ) as ranks:
                if attempt < KILLS:
                    # In an upload, or just after one.
                    assert ranks.until(lambda before=before: len(list(store.glob("step_*"))) > before), ranks.said()
                    ranks.signal(signal.SIGKILL)
                codes = ranks.wait()
                assert codes == [0, 0] or attempt < KILLS, ranks.said()
                assert before == 0 or "resuming after step" in ranks.said(0), ranks.said()
            server.restart()
        last = tmp_path / f"run{KILLS}" / "checkpoints" / LAST
        assert complete(store)[-1] == LAST
        for path in (last, store / LAST):
            assert checkpoint_differences(whole / "checkpoints" / LAST, path) == []
    finally:
        server.kill()
    keep(9, "SIGKILL of all ranks in an upload, and the run directory lost", times=KILLS)
