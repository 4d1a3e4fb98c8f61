"""Which of the local and the stored checkpoints a run resumes from; what stores by URL refuse, and their errors."""

from __future__ import annotations

import errno
import os
import shutil
import sys

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.lab.remote.conftest import make_checkpoint
from trainer.config.schema import RunConfig
from trainer.errors import UserError
from trainer.lab.remote import RemoteCheckpoints, claim, find_checkpoint, save_id
from trainer.lab.storage import MissingError, Storage, StorageError
from trainer.training.checkpointing import checkpoint
from trainer.training.checkpointing.checkpoint import MARKER, parse_marker
from trainer.training.checkpointing.tensor_files import CheckpointError
from trainer.training.run_dir import RunDir


@pytest.fixture(autouse=True)
def sizes_alone(monkeypatch):
    """These checkpoints have no state of a run: the sizes of their files are verified, and no more."""

    def verify(path):
        for name, expected in parse_marker((path / MARKER).read_bytes(), path).items():
            if (path / name).stat().st_size != expected["bytes"]:
                raise CheckpointError(f"{path / name}: is damaged")
        return {}

    monkeypatch.setattr(checkpoint, "verify", verify)


@pytest.fixture
def stored(checkpoints, url):
    """The checkpoints 1, 2 and 3 of a run, here and in the store."""
    remote, run_dir = RemoteCheckpoints(url), checkpoints.parent
    owner = claim(remote, run_dir, "run", resumes=False, may_adopt=False)
    save_id(run_dir, owner, url)
    for step in (1, 2, 3):
        remote.upload(make_checkpoint(checkpoints, step), set())
    return remote


def found_by(url, run_dir, resume="auto"):
    config = RunConfig.model_validate(
        {"train": {"steps": 1}, "data": {"source": [{"name": "s", "root": "x"}]}, "checkpoint": {"remote": url}}
    )
    found, claimed = find_checkpoint(config, RunDir(run_dir), resume, lambda: None)
    return (None if found is None else found[0]), claimed


def test_one_that_is_damaged_or_missing_here_is_taken_from_the_store(stored, checkpoints, url, caplog):
    path = checkpoints / "step_00000003"
    (path / "model_000.safetensors").write_bytes(b"short")
    assert found_by(url, checkpoints.parent)[0] == path
    assert "is damaged; taking that of the store" in caplog.text
    assert checkpoint.verify(path) == {}
    shutil.rmtree(path)
    assert found_by(url, checkpoints.parent)[0] == path
    (path / "model_000.safetensors").write_bytes(b"short")
    stored.storage.write("step_00000003/model_000.safetensors", b"short")
    assert found_by(url, checkpoints.parent)[0] == checkpoints / "step_00000002"
    assert "falling back to the checkpoint before it" in caplog.text


def test_one_that_does_not_fit_is_not_asked_for_again_and_leaves_nothing(stored, tmp_path, url, monkeypatch):
    def get_file(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it is asked for again"))
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/checkpoints/"):
        found_by(url, tmp_path)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_branch_that_was_left_is_not_taken_from_the_store(stored, checkpoints, url):
    checkpoint.set_aside_after(checkpoints, 1)  # and the store was not told
    assert found_by(url, checkpoints.parent)[0] == checkpoints / "step_00000001"


def test_a_new_directory_adopts_the_run_that_the_store_has(stored, tmp_path, checkpoints, url):
    path, claimed = found_by(url, tmp_path / "new")
    assert path == tmp_path / "new" / "checkpoints" / "step_00000003"
    assert claimed.owner.id == stored.owner().id
    with pytest.raises(UserError, match="holds the checkpoints of another run"):
        found_by(url, tmp_path / "other", "off")


def test_one_is_taken_by_its_url(stored, tmp_path, checkpoints, url):
    assert found_by(url, tmp_path / "new", f"{url}/step_00000002")[0] == tmp_path / "new/checkpoints/step_00000002"
    assert found_by(url, checkpoints.parent, f"{url}/step_00000002")[0] == checkpoints / "step_00000002"
    for name, problem in (("step_00000009", "is not there"), ("typo", "is no checkpoint")):
        with pytest.raises(UserError, match=problem):
            found_by(url, checkpoints.parent, f"{url}/{name}")


def test_where_none_is_whole_nothing_begins_anew(stored, tmp_path, url):
    for step in (1, 2, 3):
        stored.storage.write(f"step_{step:08d}/model_000.safetensors", b"short")
    with pytest.raises(UserError, match=r"none of the 3 checkpoints in .* is whole"):
        found_by(url, tmp_path / "new")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("ftp://me:verysecret@host/x", "a URL with a password in it cannot be used"),
        ("nosuch://bucket/x", "cannot be used as a store: .*Protocol not known: nosuch"),
        ("gs://bucket/x", "cannot be used as a store: .*install"),
        ("s3:///", "it names no bucket"),
    ],
)
def test_what_cannot_be_opened_is_refused_by_its_key_and_no_password_is_shown(url, problem):
    with pytest.raises(UserError, match=problem) as found:
        Storage(url, key="checkpoint.remote")
    assert found.value.key == "checkpoint.remote"
    assert "verysecret" not in found.value.message


def test_without_fsspec_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(UserError, match=r"pip install fsspec s3fs"):
        Storage("s3://bucket/x", key="checkpoint.remote")


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_files_come_back_as_they_were_written(scheme, url, tmp_path):
    storage = Storage(url if scheme == "memory" else f"file://{tmp_path}/store", key="k")
    assert storage.files() == {}
    (tmp_path / "local").write_bytes(b"abc" * 100)
    storage.put(tmp_path / "local", "a/b/c")
    storage.write("a/d", b"x")
    assert {name: file.size for name, file in storage.files("a").items()} == {"b/c": 300, "d": 1}
    assert storage.read("a/d") == b"x"
    storage.get("a/b/c", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"abc" * 100
    storage.remove(["a/d", "never there"])
    assert list(storage.files()) == ["a/b/c"]
    with pytest.raises(MissingError, match="a/d"):
        storage.read("a/d")
    with pytest.raises(StorageError, match=f"{storage.url}/x: "):
        storage.put(tmp_path / "not there", "x")
