"""Checkpoints in a store: real runs against a real S3-compatible server."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.support.ranks import checkpoint_differences
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
    assert complete(server, "alone") == ["step_00000004", "step_00000006"]
    events = [json.loads(line) for line in (tmp_path / "whole" / "events.jsonl").read_text().splitlines()]
    assert 6 in [e["global_step"] for e in events if e["event"] == "remote_uploaded"]
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
    said = train(config, tmp_path / "third", code=2, extra=extra)
    assert "checkpoint.remote: s3://bucket/alone holds the checkpoints of another run;" in said
    by_url = ("--resume", "s3://bucket/alone/step_00000006", "--steps", 8)
    said = train(config, tmp_path / "branch", "checkpoint.remote=s3://bucket/branch", more=by_url, extra=extra)
    assert "resuming after step 6" in said
    assert complete(server, "branch") == ["step_00000008"]


@pytest.mark.parametrize(
    ("remote", "environ", "problem"),
    [
        ("s3://nobucket/x", {}, "The specified bucket does not exist"),
        ("s3://bucket/x", {"AWS_SECRET_ACCESS_KEY": "wrong"}, "PermissionError"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_before_the_run_in_one_line(server, tmp_path, remote, environ, problem):
    config, own = config_in(tmp_path), f"checkpoint.remote={remote}"
    said = train(config, tmp_path / "run", own, code=2, extra={**server.environment(), **environ})
    assert said.startswith("--set checkpoint.remote=")
    assert problem in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()
