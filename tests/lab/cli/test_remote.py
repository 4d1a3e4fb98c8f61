"""Checkpoints and data in a store: real runs against a real S3-compatible server."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from typing import ClassVar

import pytest

from tests.support import grouped
from tests.support.in_process import program
from tests.support.ranks import checkpoint_differences
from tests.support.runs import losses, train, write_tiny_config
from tests.support.s3 import S3Server
from trainer.lab.storage import Storage


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = S3Server(tmp_path_factory.mktemp("s3") / "root")
    yield server
    server.kill()


def config_in(directory, remote=None):
    """A config whose checkpoints go to this folder of the store, or to none."""
    return write_tiny_config(
        directory, "[checkpoint]\nevery = 2\n" + f'remote = "s3://bucket/{remote}"\n' * bool(remote)
    )


def complete(server, name):
    return sorted(path.parent.name for path in (server.bucket / name).glob("step_*/COMPLETE"))


def test_a_run_resumed_from_the_store_alone_equals_the_run_that_was_never_stopped(server, tmp_path):
    config, extra, new = config_in(tmp_path, "alone"), server.environment(), tmp_path / "new"
    said = train(config, tmp_path / "whole", extra=extra)
    assert "s3://bucket/alone has the last checkpoint, step_00000006" in said
    assert complete(server, "alone") == ["step_00000004", "step_00000006"]
    events = [json.loads(line) for line in (tmp_path / "whole" / "events.jsonl").read_text().splitlines()]
    assert 6 in [e["global_step"] for e in events if e["event"] == "remote_uploaded"]  # 4 may come later
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
    assert "checkpoint.remote: s3://bucket/alone holds the checkpoints of another run (tiny);" in said
    by_url = ("--resume", "s3://bucket/alone/step_00000006", "--steps", 8)
    said = train(config, tmp_path / "branch", "checkpoint.remote=s3://bucket/branch", more=by_url, extra=extra)
    assert "resuming after step 6" in said
    assert complete(server, "branch") == ["step_00000006", "step_00000008"]


@pytest.fixture
def client(server, monkeypatch):
    """This process can use the server."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("client")
def test_a_file_of_several_parts_arrives_whole_and_its_bytes_are_counted_on_the_way(tmp_path):
    class Noting(Storage):
        seen: ClassVar[set[int]] = set()
        moved = property(lambda self: max(self.seen, default=0), lambda self, count: self.seen.add(count))

    (tmp_path / "large").write_bytes(content := random.Random(0).randbytes(20_000_000))
    storage = Noting("s3://bucket/large", key="k")
    storage.put(tmp_path / "large", "file")
    assert len(storage.seen - {0}) == 3
    assert storage.moved == len(content)
    assert storage.sha256("file", len(content)) == hashlib.sha256(content).hexdigest()


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


@pytest.mark.usefixtures("client")
def test_the_verbs_list_verify_and_push_a_store(server, tmp_path, capsys):
    run_dir = tmp_path / "run"
    grouped.train(config_in(tmp_path), run_dir)
    pushed = program(["checkpoint", "push", run_dir, "--to", "s3://bucket/pushed"], capsys)
    assert pushed.returncode == 0, pushed.stderr
    assert complete(server, "pushed") == ["step_00000004", "step_00000006"]
    listed = program(["checkpoint", "list", "s3://bucket/pushed", "--json"], capsys)
    found = json.loads(listed.stdout)["checkpoints"]
    assert [(each["step"], each["world_size"], each["problem"]) for each in found] == [(6, 1, None), (4, 1, None)]
    object_ = server.bucket / "pushed" / "step_00000004" / "model_000.safetensors"
    data = bytearray(object_.read_bytes())
    data[100] ^= 1
    object_.write_bytes(data)
    server.restart()
    damaged = program(["checkpoint", "verify", "s3://bucket/pushed"], capsys)
    assert damaged.returncode == 2
    assert "s3://bucket/pushed/step_00000004/model_000.safetensors: is damaged" in damaged.stderr
