"""Checkpoints on their way to a store in memory whose requests can fail or wait."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace

import pytest

from tests.lab.remote.conftest import make_checkpoint
from trainer.config.schema import CheckpointTable
from trainer.errors import UserError
from trainer.lab import remote as remotes
from trainer.lab.remote import ABANDONED, Store, Uploads
from trainer.metrics.best_effort import Diagnostics
from trainer.training.checkpointing.checkpoint import MARKER, complete_checkpoints, parse_marker, step_of
from trainer.training.checkpointing.tensor_files import CheckpointError
from trainer.training.run_dir import RunDir


class Faulty(Store):
    """A store that fails, or waits, before it takes a file."""

    def __init__(self, url):
        super().__init__(url)
        self.fails, self.cuts = False, False
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.puts = []
        real = self._fs

        def put_file(local, path, **options):
            self.puts.append("/".join(path.split("/")[-2:]))
            assert self.may_go_on.wait(20)
            if self.fails:
                raise ConnectionError("planned")
            real.put_file(local, path, **options)
            if self.cuts:
                real.pipe_file(path, b"!")

        class Patched:
            def __getattr__(self, name):
                return put_file if name == "put_file" else getattr(real, name)

        self._fs = Patched()


@pytest.fixture
def store(url, monkeypatch):
    monkeypatch.setattr(remotes, "WAIT_SEC", 0.01)
    return Faulty(url)


@pytest.fixture
def started(store, checkpoints):
    def start(*, step=-1, **table):
        retention = CheckpointTable(**{"keep_last": 2, **table})
        return Uploads(store, RunDir(checkpoints.parent), retention, step, Diagnostics())

    return start


def ended(uploads, *, is_hurried=False):
    requests = iter([False])
    uploads.wait(SimpleNamespace(requested=False) if not is_hurried else Hurried(requests))


class Hurried:
    """A stop that is requested once the end waits."""

    def __init__(self, requests):
        self._requests = requests

    @property
    def requested(self):
        return next(self._requests, True)


def until(happens):
    end = time.monotonic() + 120
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.005)


def events_of(run_dir, name):
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == name]


def local_steps(checkpoints):
    return [step_of(path) for path in complete_checkpoints(checkpoints)]


def test_the_store_gets_what_retention_keeps_and_the_marker_comes_last(checkpoints, store, started):
    uploads = started(keep_every=4)
    for step in range(1, 10):
        uploads.publish(make_checkpoint(checkpoints, step))
        until(lambda step=step: step in store.steps())
    ended(uploads)
    assert local_steps(checkpoints) == store.steps() == [9, 8, 4]
    assert store.puts[-3:] == [f"step_00000009/{name}" for name in ("model_000.safetensors", "state.json", MARKER)]
    assert [e["global_step"] for e in events_of(checkpoints.parent, "remote_uploaded")] == list(range(1, 10))


def test_a_store_that_fails_costs_its_checkpoints_alone(checkpoints, store, started, caplog):
    store.fails = True
    uploads = started()
    for step in range(1, 5):
        uploads.publish(make_checkpoint(checkpoints, step))
        until(lambda step=step: f"step_{step:08d}/model_000.safetensors" in store.puts)
        assert len(local_steps(checkpoints)) <= 3  # two, and the one of the attempt
    assert store.steps() == []
    store.fails = False
    uploads.publish(make_checkpoint(checkpoints, 5))
    ended(uploads)
    assert store.steps()[0] == 5
    assert caplog.text.count("the run goes on, and this is tried again") == 1
    assert "planned" in events_of(checkpoints.parent, "remote_failed")[0]["error"]


def test_publishing_waits_for_no_store_and_what_is_being_uploaded_is_not_deleted(checkpoints, store, started):
    store.may_go_on.clear()
    uploads = started(keep_last=1)
    uploads.publish(make_checkpoint(checkpoints, 1))
    until(lambda: store.puts)
    for step in (2, 3, 4):  # one that waited would wait for ever
        uploads.publish(make_checkpoint(checkpoints, step))
    assert local_steps(checkpoints) == [4, 1]
    store.may_go_on.set()
    ended(uploads)
    assert [e["global_step"] for e in events_of(checkpoints.parent, "remote_uploaded")] == [1, 4]
    assert store.steps() == local_steps(checkpoints) == [4]


def test_a_file_that_arrives_cut_is_no_checkpoint(checkpoints, store, started, caplog):
    store.cuts = True
    uploads = started()
    uploads.publish(make_checkpoint(checkpoints, 1))
    ended(uploads)
    assert store.steps() == []
    assert "has 1 bytes there, not 1000" in caplog.text
    assert f"does not have the last checkpoint: copy {checkpoints}/step_00000001 there" in caplog.text


def test_a_stop_ends_the_wait_for_a_store_that_hangs(checkpoints, store, started, caplog):
    store.may_go_on.clear()
    uploads = started()
    uploads.publish(make_checkpoint(checkpoints, 1))
    ended(uploads, is_hurried=True)
    assert "does not have the last checkpoint" in caplog.text
    store.may_go_on.set()


def test_leftovers_are_deleted_a_left_branch_is_set_aside_and_another_content_replaced(checkpoints, store, started):
    for step in (1, 2, 3):
        store.put(make_checkpoint(checkpoints.parent / "other", step, branch=1))
    store._fs.pipe_file(store._path("step_00000009/model_000.safetensors"), b"of an interrupted upload")
    uploads = started(step=2, keep_last=3)
    uploads.publish(make_checkpoint(checkpoints, 2))
    until(lambda: store.steps() == [2, 1])
    assert store.marker(2) == (checkpoints / "step_00000002" / MARKER).read_bytes()
    assert 9 not in store.names()
    assert ABANDONED in store.names()[3]
    uploads.publish(make_checkpoint(checkpoints, 3))
    ended(uploads)
    assert ABANDONED not in store.names()[3]
    assert store.marker(3) == (checkpoints / "step_00000003" / MARKER).read_bytes()


def test_a_prefix_that_holds_checkpoints_is_for_the_run_that_resumes_from_them(checkpoints, store):
    store.claim("run", resumes=False)
    store.claim("another", resumes=False)  # nothing to lose yet
    store.put(make_checkpoint(checkpoints, 1))
    store.claim("run", resumes=True)
    with pytest.raises(UserError, match="holds the checkpoints of another run"):
        store.claim("run", resumes=False)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "..", MARKER, ""])
def test_a_marker_that_lists_a_path_is_damage(name):
    marker = b'{"format_version": 2, "step": 1, "files": {"%s": {"bytes": 1, "sha256": ""}}}' % name.encode()
    with pytest.raises(CheckpointError, match="which is no file of the checkpoint"):
        parse_marker(marker, "x")
