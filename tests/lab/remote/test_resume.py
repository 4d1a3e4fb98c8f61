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
from trainer.lab.remote import Store, find_checkpoint
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
    store = Store(url)
    store.claim("run", resumes=False)
    for step in (1, 2, 3):
        store.put(make_checkpoint(checkpoints, step))
    return store


def spoil(store, step):
    """Cut a file of a stored checkpoint."""
    store._fs.pipe_file(store._path(f"step_{step:08d}/model_000.safetensors"), b"short")


def found_by(url, run_dir, resume="auto"):
    config = RunConfig.model_validate(
        {"train": {"steps": 1}, "data": {"source": [{"name": "s", "root": "x"}]}, "checkpoint": {"remote": url}}
    )
    found, _ = find_checkpoint(config, RunDir(run_dir), resume, lambda: None)
    return None if found is None else found[0]


def test_one_that_is_damaged_or_missing_here_is_taken_from_the_store(stored, checkpoints, url, caplog):
    path = checkpoints / "step_00000003"
    (path / "model_000.safetensors").write_bytes(b"short")
    assert found_by(url, checkpoints.parent) == path
    assert "is damaged; falling back" in caplog.text
    assert checkpoint.verify(path) == {}
    shutil.rmtree(path)
    assert found_by(url, checkpoints.parent) == path
    (path / "model_000.safetensors").write_bytes(b"short")
    spoil(stored, 3)
    assert found_by(url, checkpoints.parent) == checkpoints / "step_00000002"
    assert "falling back to the checkpoint before it" in caplog.text


def test_one_that_does_not_fit_leaves_nothing(stored, tmp_path, url, monkeypatch):
    def get_file(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/checkpoints/"):
        found_by(url, tmp_path)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_branch_that_was_left_is_not_taken_from_the_store(stored, checkpoints, url):
    checkpoint.set_aside_after(checkpoints, 1)  # and the store was not told
    assert found_by(url, checkpoints.parent) == checkpoints / "step_00000001"


def test_a_new_directory_adopts_the_run_that_the_store_has(stored, tmp_path, checkpoints, url):
    assert found_by(url, tmp_path / "new") == tmp_path / "new" / "checkpoints" / "step_00000003"
    with pytest.raises(UserError, match="holds the checkpoints of another run"):
        found_by(url, tmp_path / "other", "off")


def test_one_is_taken_by_its_url(stored, tmp_path, checkpoints, url):
    assert found_by(url, tmp_path / "new", f"{url}/step_00000002") == tmp_path / "new/checkpoints/step_00000002"
    assert found_by(url, checkpoints.parent, f"{url}/step_00000002") == checkpoints / "step_00000002"
    for name, problem in (("step_00000009", "step_00000009/COMPLETE"), ("typo", "is no checkpoint")):
        with pytest.raises(UserError, match=problem):
            found_by(url, checkpoints.parent, f"{url}/{name}")


def test_where_none_is_whole_nothing_begins_anew(stored, tmp_path, url):
    for step in (1, 2, 3):
        spoil(stored, step)
    with pytest.raises(UserError, match=r"no checkpoint in .* or .* is whole"):
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
        Store(url, key="checkpoint.remote")
    assert found.value.key == "checkpoint.remote"
    assert "verysecret" not in found.value.message


def test_without_fsspec_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(UserError, match=r"pip install fsspec s3fs"):
        Store("s3://bucket/x", key="checkpoint.remote")


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_checkpoint_comes_back_as_it_was_put(scheme, url, tmp_path, checkpoints):
    store = Store(url if scheme == "memory" else f"file://{tmp_path}/store")
    assert store.steps() == []
    original = make_checkpoint(checkpoints, 1)
    store.put(original)
    store.put(make_checkpoint(checkpoints, 2))
    path, _ = store.get(1, tmp_path / "back")
    assert {each.name: each.read_bytes() for each in path.iterdir()} == {
        each.name: each.read_bytes() for each in original.iterdir()
    }
    assert store.tidy(1) == [2]
    assert store.steps() == [1]
    store.prune(keep_last=0, keep_every=0)
    assert store.steps() == []
    with pytest.raises(CheckpointError, match="step_00000001"):
        store.get(1, tmp_path / "back")
