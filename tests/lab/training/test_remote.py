"""Checkpoints on their way to a store and back: which one a run resumes from, and what a failing store costs."""

from __future__ import annotations

import shutil
import sys
import threading
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.checkpoints import make_checkpoint
from trainer.config.schema import CheckpointTable, RunConfig
from trainer.errors import UserError
from trainer.lab.remote import ABANDONED, Store, StoreError, Uploads, find_checkpoint
from trainer.metrics.best_effort import Diagnostics
from trainer.training import checkpoint
from trainer.training.checkpoint import MARKER, checkpoint_name
from trainer.training.run_dir import RunDir

FILES = ("model_000.safetensors", "rank_000.safetensors", "state.json")


@pytest.fixture
def url():
    return f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture
def checkpoints(tmp_path):
    directory = tmp_path / "run" / "checkpoints"
    directory.mkdir(parents=True)
    return directory


@pytest.fixture
def stored(checkpoints, url):
    """The checkpoints 1, 2 and 3 of a run, here and in the store."""
    store = Store(url)
    store.claim("run", is_own=False, is_auto=False)
    for step in (1, 2, 3):
        store.put(make_checkpoint(checkpoints, step))
    return store


def spoil(store, step):
    store._fs.pipe_file(store._path(checkpoint_name(step), FILES[0]), b"another content")


def found_by(url, run_dir, resume="auto"):
    source = {"source": [{"name": "s", "root": "x"}]}
    config = RunConfig.model_validate({"train": {"steps": 1}, "data": source, "checkpoint": {"remote": url}})
    found, _ = find_checkpoint(config, RunDir(run_dir), resume, lambda: None)
    return None if found is None else found[0].relative_to(run_dir / "checkpoints").name


def test_the_newest_whole_one_of_directory_and_store_is_found(stored, checkpoints, url, tmp_path, caplog):
    (checkpoints / "step_00000003" / MARKER).unlink()
    assert found_by(url, checkpoints.parent) == "step_00000003", "incomplete here, whole there"
    for step in (1, 2, 3):
        (checkpoints / f"step_{step:08d}" / FILES[0]).write_bytes(b"damaged")
    assert found_by(url, checkpoints.parent) == "step_00000003", "damaged here, whole there"
    assert checkpoint.verify(checkpoints / "step_00000003")["step"] == 3
    stored._fs.copy(*(stored._path(checkpoint_name(step)) for step in (3, 9)), recursive=True)  # under a wrong name
    assert found_by(url, tmp_path / "new") == "step_00000003"
    spoil(stored, 3)
    assert found_by(url, tmp_path / "other") == "step_00000002"
    assert "falling back to the checkpoint before it" in caplog.text
    assert not list((tmp_path / "other" / "checkpoints").glob(".tmp*"))
    for step in (1, 2):
        spoil(stored, step)
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole"):
        found_by(url, tmp_path / "third")


def test_a_prefix_is_of_one_run_and_an_outage_is_no_reason_not_to_resume(
    stored, tmp_path, checkpoints, url, monkeypatch
):
    with pytest.raises(UserError, match="holds the checkpoints of another run"):
        found_by(url, tmp_path / "other", "off")
    stored._fs.pipe_file(stored._path("RUN"), b"another\n")
    with pytest.raises(UserError, match="holds the checkpoints of another run, another"):
        found_by(url, checkpoints.parent)
    stored._fs.pipe_file(stored._path("RUN"), b"")  # as a full disk leaves it
    checkpoint.set_aside_after(checkpoints, 2, checkpoints / "step_00000002")
    assert found_by(url, checkpoints.parent) == "step_00000002", "the other is not marked yet in the store"

    def names(self):
        raise StoreError("planned")

    monkeypatch.setattr(Store, "names", names)
    assert found_by(url, checkpoints.parent) == "step_00000002"
    with pytest.raises(UserError, match=r"checkpoint\.remote: cannot be used"):
        found_by(url, tmp_path / "new", "off")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("ftp://me:[verysecret@host/x", "a URL with a password in it cannot be used"),
        ("nosuch://bucket/x", "cannot be used as a store: .*Protocol not known: nosuch"),
        ("s3:///", "it names no bucket"),
        ("memory://run*/x", "it names no bucket or directory, or several"),
        ("without://fsspec/x", r"pip install fsspec s3fs"),
    ],
)
def test_what_cannot_be_opened_is_refused_by_its_key_and_no_password_is_shown(url, problem, monkeypatch):
    if url.startswith("without"):
        monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(UserError, match=problem) as found:
        Store(url)
    assert found.value.key == "checkpoint.remote"
    assert "verysecret" not in found.value.message


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_what_was_put_comes_back_and_another_branch_is_set_aside(scheme, url, tmp_path, checkpoints):
    store = Store(url if scheme == "memory" else f"file://{tmp_path}/store")
    for step in (1, 2, 3, 4):
        store.put(make_checkpoint(checkpoints.parent / "other", step, value=2.0))
    original = make_checkpoint(checkpoints, 1)
    store.put(original)  # in place of the other
    newest = make_checkpoint(checkpoints, 2)  # killed before its upload
    store._fs.rm_file(store._path(checkpoint_name(4), MARKER))  # as an interrupted upload leaves it
    uploads = Uploads(store, CheckpointTable())
    uploads.begin(RunDir(checkpoints.parent), 2, Diagnostics())  # before it saves another one
    uploads.wait(SimpleNamespace(requested=False))
    for step, saved in ((1, original), (2, newest)):
        assert checkpoint.listed_files(store.get(step, tmp_path / "back")[0]) == checkpoint.listed_files(saved)
    assert (store.steps(), 4 in store.names()) == ([2, 1], False)
    assert ABANDONED in store.names()[3]
    store.prune(keep_last=1, keep_every=0)
    assert store.steps() == [2]


class Faulty(Store):
    """A store that fails, waits, or cuts a file."""

    def __init__(self, url):
        super().__init__(url)
        self.fails = self.cuts = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.puts = []
        real = self._fs

        class Patched:
            def __getattr__(_, name):
                return getattr(real, name)

            def put_file(_, local, path):
                self.puts.append(path.rpartition("/")[2])
                assert self.may_go_on.wait(60)
                if self.fails:
                    raise ConnectionError("planned")
                real.pipe_file(path, Path(local).read_bytes()[: 1 if self.cuts else None])

        self._fs = Patched()


def until(happens):
    end = time.monotonic() + 120
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_what_is_uploaded_holds_up_nobody_and_a_failure_costs_one_checkpoint(checkpoints, url, caplog):
    store, run_dir = Faulty(url), RunDir(checkpoints.parent)
    uploads = Uploads(store, CheckpointTable(keep_last=1))
    uploads.begin(run_dir, -1, Diagnostics())
    store.may_go_on.clear()
    for step in (1, 2, 3, 4):  # the thread waits with the first
        uploads.publish(make_checkpoint(checkpoints, step))
        until(lambda: store.puts)
    assert sorted(path.name for path in checkpoints.glob("step_*")) == ["step_00000001", "step_00000004"]
    store.may_go_on.set()
    until(lambda: store.steps() == [4])
    assert store.puts == 2 * [*FILES, MARKER], "the newest alone has waited"
    store.fails = True
    uploads.publish(make_checkpoint(checkpoints, 5))
    until(lambda: '"remote_failed"' in run_dir.events.read_text())
    store.fails, store.cuts = False, True
    uploads.publish(make_checkpoint(checkpoints, 6))
    until(lambda: "has 1 bytes there, not " in run_dir.events.read_text())
    assert store.steps() == [4]
    store.cuts = False
    uploads.publish(make_checkpoint(checkpoints, 7))
    uploads.wait(SimpleNamespace(requested=False))
    assert store.steps() == [7]
    assert caplog.text.count("the run continues, and the next save will try again") == 1


def test_the_best_is_uploaded_late_or_early_stays_in_the_store_and_comes_back(checkpoints, url, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "best_step", lambda path: 2)
    store, run_dir = Faulty(url), RunDir(checkpoints.parent)
    uploads = Uploads(store, CheckpointTable(keep_last=1))
    uploads.begin(run_dir, -1, Diagnostics())
    store.may_go_on.clear()
    for step in (1, 2, 3, 4):  # the best is not the newest that waits
        uploads.publish(make_checkpoint(checkpoints, step))
        until(lambda: store.puts)
    store.may_go_on.set()
    uploads.wait(SimpleNamespace(requested=False))
    assert store.steps() == [4, 2]
    assert found_by(url, tmp_path / "new") == "step_00000004"
    assert {path.name for path in (tmp_path / "new" / "checkpoints").iterdir()} == {"step_00000002", "step_00000004"}


def test_a_stop_ends_the_wait_for_a_store_that_hangs(checkpoints, url, caplog):
    store, requests = Faulty(url), iter([False])
    store.may_go_on.clear()
    uploads = Uploads(store, CheckpointTable())
    path = make_checkpoint(checkpoints, 1)
    uploads.begin(RunDir(checkpoints.parent), 1, Diagnostics())
    hurried = type("Hurried", (), {"requested": property(lambda _: next(requests, True))})
    uploads.wait(hurried())
    assert f"does not have the last checkpoint: copy {path} there" in caplog.text
    store.may_go_on.set()
    shutil.rmtree(checkpoints.parent, ignore_errors=True)
