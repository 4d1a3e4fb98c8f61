"""Checkpoints and data in a store: real runs against a real S3-compatible server."""

from __future__ import annotations

import hashlib
import json
import random
import shutil

import pytest

from tests.support.fault_runs import row_differences
from tests.support.ranks import checkpoint_differences
from tests.support.runs import read_rows, run, write_tiny_config
from tests.support.s3 import S3Server
from trainer.storage import Storage

CHECKPOINTS = """
[checkpoint]
every = 2
remote = "s3://bucket/{name}"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = S3Server(tmp_path_factory.mktemp("s3") / "root")
    yield server
    server.kill()


def config_in(directory, name):
    directory.mkdir(exist_ok=True)
    return write_tiny_config(directory, CHECKPOINTS.format(name=name))


def complete(server, name):
    return sorted(path.parent.name for path in (server.bucket / name).glob("step_*/COMPLETE"))


def test_a_run_resumed_from_the_store_alone_equals_the_run_that_was_never_stopped(server, tmp_path):
    config, extra = config_in(tmp_path, "alone"), server.environment()
    whole = run("--config", config, "--run-dir", tmp_path / "whole", extra=extra)
    assert whole.returncode == 0, whole.stderr
    assert "s3://bucket/alone has the last checkpoint, step_00000006" in whole.stderr
    assert complete(server, "alone") == ["step_00000004", "step_00000006"]
    events = [json.loads(line) for line in (tmp_path / "whole" / "events.jsonl").read_text().splitlines()]
    assert [e["global_step"] for e in events if e["event"] == "remote_uploaded"][-1] == 6
    # As if it had been stopped after step 4, and its machine were gone.
    shutil.rmtree(server.bucket / "alone" / "step_00000006")
    server.restart()
    new = tmp_path / "new"
    second = run("--config", config, "--run-dir", new, "--resume", "auto", extra=extra)
    assert second.returncode == 0, second.stderr
    assert "downloaded s3://bucket/alone/step_00000004" in second.stderr
    rows, same = read_rows(new / "metrics.jsonl"), read_rows(tmp_path / "whole" / "metrics.jsonl")
    assert sorted(rows) == [("train", 5), ("train", 6)]
    assert [rows[key]["loss"] for key in sorted(rows)] == [same[key]["loss"] for key in sorted(rows)]
    last = "checkpoints/step_00000006"
    assert checkpoint_differences(tmp_path / "whole" / last, new / last) == []
    assert complete(server, "alone") == ["step_00000004", "step_00000006"]
    third = run("--config", config, "--run-dir", tmp_path / "third", extra=extra)
    assert third.returncode == 2
    assert "checkpoint.remote: s3://bucket/alone holds the checkpoints of another run (tiny);" in third.stderr
    by_url = (
        "--resume",
        "s3://bucket/alone/step_00000006",
        "--set",
        "checkpoint.remote=s3://bucket/branch",
        "--steps",
        8,
    )
    branch = run("--config", config, "--run-dir", tmp_path / "branch", *by_url, extra=extra)
    assert branch.returncode == 0, branch.stderr
    assert "resuming after step 6" in branch.stderr
    assert complete(server, "branch") == ["step_00000006", "step_00000008"]


def test_a_corpus_by_url_gives_the_run_of_the_local_corpus(server, tmp_path):
    config = config_in(tmp_path, "data")
    extra = {**server.environment(), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    shutil.copytree(tmp_path / "corpus", server.bucket / "corpus")
    server.restart()
    ranks = {"nproc": 2, "extra": extra}
    local = run("--config", config, "--run-dir", tmp_path / "local", **ranks)
    assert local.returncode == 0, local.stderr
    config.write_text(config.read_text().replace(str(tmp_path / "corpus"), "s3://bucket/corpus"))
    own = ("--set", "checkpoint.remote=s3://bucket/data2")
    stored = run("--config", config, "--run-dir", tmp_path / "stored", *own, **ranks)
    assert stored.returncode == 0, stored.stderr
    assert stored.stderr.count("downloading 4 files of s3://bucket/corpus") <= 2  # one process for each of two sources
    assert row_differences(tmp_path / "local", tmp_path / "stored") == []
    last = "checkpoints/step_00000006"
    assert checkpoint_differences(tmp_path / "local" / last, tmp_path / "stored" / last) == []
    assert "corpus" in (tmp_path / "cache" / "trainer" / "data").rglob("stream0.jsonl").__next__().parts
    resumed = ("--resume", "auto", "--steps", 8, *own)
    object_ = server.bucket / "corpus" / "a" / "stream1.jsonl"
    object_.write_text(object_.read_text().replace("the", "THE", 1))
    server.restart()
    changed = run("--config", config, "--run-dir", tmp_path / "stored", *resumed, **ranks)
    assert changed.returncode == 2
    assert "source first: 1 changed (a/stream1.jsonl)" in changed.stderr


def test_unfinished_multipart_uploads_below_the_url_are_aborted_and_no_others(server, monkeypatch):
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    storage = Storage("s3://bucket/multi", key="k")
    for key in ("multi/step_00000001/model_000.safetensors", "other/model_000.safetensors"):
        storage._fs.call_s3("create_multipart_upload", Bucket="bucket", Key=key)
    assert storage.abort_uploads() == 1
    assert storage.abort_uploads() == 0
    assert Storage("s3://bucket/other", key="k").abort_uploads() == 1


def test_a_file_of_several_parts_arrives_whole_and_each_part_is_reported(server, monkeypatch, tmp_path):
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    content = random.Random(0).randbytes(20_000_000)
    (tmp_path / "large").write_bytes(content)
    storage, sent = Storage("s3://bucket/large", key="k"), []
    storage.put(tmp_path / "large", "file", report=sent.append)
    assert sum(sent) == len(content)
    assert sum(1 for num_bytes in sent if num_bytes) == 3
    assert storage.sha256("file", len(content)) == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("remote", "environ", "problem"),
    [
        ("s3://nobucket/x", {}, "The specified bucket does not exist"),
        ("s3://bucket/x", {"AWS_SECRET_ACCESS_KEY": "wrong"}, "PermissionError"),
        ("gs://bucket/x", {}, "Please install gcsfs"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_before_the_run_with_one_line(
    server, tmp_path, remote, environ, problem
):
    config = config_in(tmp_path, "refused")
    arguments = ("--config", config, "--run-dir", tmp_path / "run", "--set", f"checkpoint.remote={remote}")
    result = run(*arguments, extra={**server.environment(), **environ})
    assert result.returncode == 2
    assert result.stderr.startswith("--set checkpoint.remote=")
    assert problem in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_verbs_list_verify_and_push_a_store(server, tmp_path):
    config, extra = config_in(tmp_path, "unused"), server.environment()
    config.write_text(config.read_text().replace('remote = "s3://bucket/unused"\n', ""))
    run_dir = tmp_path / "run"
    assert run("--config", config, "--run-dir", run_dir).returncode == 0
    pushed = run("checkpoint", "push", run_dir, "--to", "s3://bucket/pushed", extra=extra)
    assert pushed.returncode == 0, pushed.stderr
    assert complete(server, "pushed") == ["step_00000004", "step_00000006"]
    listed = run("checkpoint", "list", "s3://bucket/pushed", "--json", extra=extra)
    found = json.loads(listed.stdout)["checkpoints"]
    assert [(each["step"], each["world_size"], each["problem"]) for each in found] == [(6, 1, None), (4, 1, None)]
    object_ = server.bucket / "pushed" / "step_00000004" / "model_000.safetensors"
    data = bytearray(object_.read_bytes())
    data[100] ^= 1
    object_.write_bytes(data)
    server.restart()
    damaged = run("checkpoint", "verify", "s3://bucket/pushed", extra=extra)
    assert damaged.returncode == 2
    assert "s3://bucket/pushed/step_00000004/model_000.safetensors: is damaged" in damaged.stderr
