"""The mirror of checkpoints in a store, against a store in memory whose requests can fail or wait."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from tests.lab.remote.conftest import make_checkpoint
from trainer.config.schema import CheckpointTable
from trainer.errors import UserError
from trainer.lab.mirror import Mirror
from trainer.lab.remote import ABANDONED, Claimed, Owner, RemoteCheckpoints, claim, save_id
from trainer.lab.storage import StorageError
from trainer.training.checkpointing.checkpoint import MARKER, complete_checkpoints, parse_marker, step_of
from trainer.training.checkpointing.tensor_files import CheckpointError
from trainer.training.run_dir import ID_FILE, RunDir

OWNER = Owner("id", "run", "writer")


class Faulty(RemoteCheckpoints):
    """A store that fails, or waits, before it takes a file."""

    def __init__(self, url):
        super().__init__(url)
        self.fails = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.puts = []
        real = self.storage.put

        def put(local, name, **options):
            self.puts.append(name)
            assert self.may_go_on.wait(20)
            if self.fails:
                raise StorageError(f"{name}: planned")
            real(local, name, **options)

        self.storage.put = put


@pytest.fixture
def remote(url):
    return Faulty(url)


@pytest.fixture
def events():
    return []


@pytest.fixture
def mirrored(remote, checkpoints, events):
    """Makes a mirror of `checkpoints` in `remote`."""

    def make(*, step=-1, stall_sec=60.0, **table):
        remote.set_owner(OWNER)
        return Mirror(
            Claimed(remote, OWNER, lambda: OWNER),
            RunDir(checkpoints.parent),
            CheckpointTable(**{"keep_last": 2, **table}),
            step=step,
            on_event=events.append,
            first_wait_sec=0.01,
            longest_wait_sec=0.05,
            stall_sec=stall_sec,
        )

    return make


def until(happens):
    end = time.monotonic() + 120
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.005)


def steps(events, name):
    return [event["global_step"] for event in events if event["event"] == name]


def local_steps(checkpoints):
    return [step_of(path) for path in complete_checkpoints(checkpoints)]


def test_the_store_gets_what_retention_keeps_and_nothing_else(checkpoints, remote, mirrored):
    mirror = mirrored(keep_every=4)
    for step in range(1, 10):
        mirror.publish(make_checkpoint(checkpoints, step))
    assert mirror.wait()
    assert local_steps(checkpoints) == remote.complete() == [9, 8, 4]
    for step in (9, 8, 4):
        remote.verify(step)


def test_while_a_store_fails_only_retention_decides_what_stays_and_the_newest_is_uploaded(
    checkpoints, remote, mirrored, events
):
    remote.fails = True
    mirror = mirrored()
    for step in range(1, 7):
        is_tried = partial(lambda before: len(events) > before, len(events))
        mirror.publish(make_checkpoint(checkpoints, step))
        until(is_tried)
        assert len(local_steps(checkpoints)) <= 3  # two, and the one of the attempt
    assert remote.complete() == []
    remote.fails = False
    assert mirror.wait()
    assert remote.complete() == local_steps(checkpoints) == [6, 5]
    failed = [event["error"] for event in events if event["event"] == "remote_failed"]
    assert any("planned" in error for error in failed)  # the first may have met a marker half written


def test_publishing_waits_for_no_store_and_what_is_being_uploaded_is_not_deleted(checkpoints, remote, mirrored, events):
    remote.may_go_on.clear()
    mirror = mirrored(keep_last=1)
    mirror.publish(make_checkpoint(checkpoints, 1))
    until(lambda: remote.puts)
    for step in (2, 3, 4):  # one that waited would wait for ever
        mirror.publish(make_checkpoint(checkpoints, step))
    assert local_steps(checkpoints) == [4, 1]
    remote.may_go_on.set()
    assert mirror.wait()
    assert steps(events, "remote_uploaded") == [1, 4]
    assert remote.complete() == local_steps(checkpoints) == [4]


def test_a_file_that_reads_back_differently_is_uploaded_again(checkpoints, remote, mirrored, events):
    real, spoiled = remote.storage.put, []

    def put(local, name, **options):
        real(local, name, **options)
        if not spoiled:
            spoiled.append(name)
            remote.storage.write(name, remote.storage.read(name)[:-1] + b"!")

    remote.storage.put = put
    mirror = mirrored()
    mirror.publish(make_checkpoint(checkpoints, 1))
    assert mirror.wait()
    assert "is damaged" in next(event["error"] for event in events if event["event"] == "remote_failed")
    remote.verify(1)


def test_the_wait_at_the_end_gives_up_when_nothing_moves_and_names_the_command(checkpoints, remote, mirrored, caplog):
    remote.may_go_on.clear()
    mirror = mirrored(stall_sec=0.3)
    mirror.publish(make_checkpoint(checkpoints, 1))
    started = time.monotonic()
    assert not mirror.wait()
    assert time.monotonic() - started > 0.25
    assert f"train checkpoint push {checkpoints.parent}" in caplog.text
    remote.may_go_on.set()


def test_leftovers_are_cleaned_a_left_branch_is_set_aside_and_another_content_replaced(checkpoints, remote, mirrored):
    for step in (1, 2, 3):
        remote.upload(make_checkpoint(checkpoints.parent / "other", step, branch=1), set())
    remote.storage.write("step_00000009/model_000.safetensors", b"of an interrupted upload")
    mirror = mirrored(step=2, keep_last=3)
    mirror.publish(make_checkpoint(checkpoints, 2))
    assert mirror.wait()
    assert remote.complete() == [2, 1]
    assert remote.marker(2) == (checkpoints / "step_00000002" / MARKER).read_bytes()
    files = remote.files()
    assert 9 not in files
    assert ABANDONED in files[3]
    mirror.publish(make_checkpoint(checkpoints, 3))
    assert mirror.wait()
    assert ABANDONED not in remote.files()[3]
    remote.verify(3)


def test_a_process_whose_store_is_taken_over_stops_writing(checkpoints, remote, mirrored, caplog):
    mirror = mirrored()
    mirror.publish(make_checkpoint(checkpoints, 1))
    assert mirror.wait()
    remote.set_owner(OWNER._replace(writer="a later process"))
    mirror.publish(make_checkpoint(checkpoints, 2))
    assert not mirror.wait()
    assert remote.complete() == [1]
    assert "another process of this run writes to" in caplog.text


def test_two_runs_cannot_share_a_prefix(checkpoints, remote, url):
    run_dir = checkpoints.parent
    first = claim(remote, run_dir, "run", resumes=False, may_adopt=False)
    assert claim(remote, run_dir, "run", resumes=False, may_adopt=False).id != first.id  # nothing to lose yet
    save_id(run_dir, first, url)
    remote.set_owner(first)
    remote.upload(make_checkpoint(checkpoints, 1), set())
    assert claim(remote, run_dir, "run", resumes=True, may_adopt=False).id == first.id

    def refused(name, **how):
        with pytest.raises(UserError, match="holds the checkpoints of another run"):
            claim(remote, run_dir, name, **how)

    refused("run", resumes=False, may_adopt=False)
    (run_dir / ID_FILE).unlink()
    refused("run", resumes=True, may_adopt=False)
    refused("another name", resumes=True, may_adopt=True)
    assert claim(remote, run_dir, "run", resumes=True, may_adopt=True).id == first.id


@pytest.mark.parametrize("name", ["../x", "/etc/x", "..", MARKER, ""])
def test_a_marker_that_lists_a_path_is_damage(name):
    marker = b'{"format_version": 2, "step": 1, "files": {"%s": {"bytes": 1, "sha256": ""}}}' % name.encode()
    with pytest.raises(CheckpointError, match="which is no file of the checkpoint"):
        parse_marker(marker, "x")


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: b"!" + content[1:]])
def test_a_download_leaves_nothing_of_a_damaged_checkpoint(checkpoints, remote, damage):
    original = make_checkpoint(checkpoints.parent / "other", 1)
    remote.upload(original, set())
    path, file = remote.download(1, checkpoints), "model_000.safetensors"
    assert local_steps(checkpoints) == [1]
    assert (path / file).read_bytes() == (original / file).read_bytes()
    remote.storage.write(f"step_00000001/{file}", damage(remote.storage.read(f"step_00000001/{file}")))
    with pytest.raises(CheckpointError, match="is damaged"):
        remote.download(1, checkpoints.parent / "new")
    assert list((checkpoints.parent / "new").iterdir()) == []


def test_a_deletion_begins_with_the_marker(checkpoints, remote, monkeypatch):
    remote.upload(make_checkpoint(checkpoints, 1), set())
    real, order = remote.storage.remove, []
    monkeypatch.setattr(remote.storage, "remove", lambda names: (order.extend(names), real(names)))
    remote.remove(1)
    assert order[0] == f"step_00000001/{MARKER}"
    assert remote.files() == {}
