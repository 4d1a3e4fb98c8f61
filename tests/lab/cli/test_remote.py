"""Checkpoints in a store: real runs against a real S3-compatible server."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.fault_runs import ARGUMENTS, EXTRA, keep, make_config, whole_run
from tests.support.ranks import Ranks, checkpoint_differences
from tests.support.runs import losses, train, write_tiny_config
from tests.support.s3 import S3Server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = S3Server(tmp_path_factory.mktemp("s3") / "root")
    yield server
    server.kill()


def config_in(directory, remote=None):
    """A config whose checkpoints go to this folder of the store, or to none."""
    return write_tiny_config(
        directory, "[checkpoint]\nevery = 4\n" + f'remote = "s3://bucket/{remote}"\n' * bool(remote)
    )


def complete(server, name):
    return sorted(path.parent.name for path in (server.bucket / name).glob("step_*/COMPLETE"))


def test_a_run_resumed_from_the_store_alone_equals_the_run_that_was_never_stopped(server, tmp_path):
    config, extra, new = config_in(tmp_path, "alone"), server.environment(), tmp_path / "new"
    said = train(config, tmp_path / "whole", extra=extra)
    assert "s3://bucket/alone has the last checkpoint, step_00000006" in said
    # As if it had been stopped after step 4, and its machine were gone.
    shutil.rmtree(server.bucket / "alone" / "step_00000006")
    server.restart()
    said = train(config, new, more=("--resume", "auto"), extra=extra)
    assert "downloaded s3://bucket/alone/step_00000004" in said
    whole = losses(tmp_path / "whole" / "metrics.jsonl")
    assert losses(new / "metrics.jsonl") == {step: whole[step] for step in (5, 6)}
    last = "checkpoints/step_00000006"
    assert checkpoint_differences(tmp_path / "whole" / last, new / last) == []
    assert complete(server, "alone") == ["step_00000004", "step_00000006"]
    train(config, tmp_path / "whole", more=("--resume", "auto"), extra=extra)  # which is over, and has another one
    assert (tmp_path / "whole" / "events.jsonl").read_text().count('"remote_uploaded"') == 3


STEPS, KILLS = 60, 3
LAST = f"step_{STEPS:08d}"


def whole_ones(store: Path) -> list[str]:
    """The checkpoints that have a marker, each of which is as its marker says."""
    markers = sorted(store.glob("step_*/COMPLETE"))
    for marker in markers:
        for name, expected in json.loads(marker.read_bytes())["files"].items():
            assert hashlib.sha256((marker.parent / name).read_bytes()).hexdigest() == expected["sha256"]
    return [marker.parent.name for marker in markers]


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_run_that_is_killed_in_uploads_and_loses_its_directory_comes_back_from_the_store(tmp_path):
    whole = whole_run(make_config(tmp_path / "whole"), tmp_path / "whole" / "run", "--steps", STEPS)
    server = S3Server(tmp_path / "s3" / "root")
    store, config = server.bucket / "run", make_config(tmp_path, f'{EXTRA}remote = "s3://bucket/run"\n')
    try:
        for attempt in range(KILLS + 1):
            line = ("--config", config, "--run-dir", tmp_path / f"run{attempt}", *ARGUMENTS, "--steps", STEPS)
            before = len(whole_ones(store))
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
        assert whole_ones(store)[-1] == LAST
        for path in (last, store / LAST):
            assert checkpoint_differences(whole / "checkpoints" / LAST, path) == []
    finally:
        server.kill()
    keep(9, "SIGKILL of all ranks in an upload, and the run directory lost", times=KILLS)
