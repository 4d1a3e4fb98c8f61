"""Stores by fsspec URL: what is refused at once, and what a store's errors become."""

from __future__ import annotations

import sys

import pytest

from trainer.errors import UserError
from trainer.storage import MissingError, Storage, StorageError


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
    assert list(storage.match("a/*/*")) == ["a/b/c"]
    storage.get("a/b/c", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"abc" * 100
    storage.remove(["a/d", "never there"])
    assert list(storage.files()) == ["a/b/c"]
    with pytest.raises(MissingError, match="a/d"):
        storage.read("a/d")
    with pytest.raises(StorageError, match=f"{storage.url}/x: "):
        storage.put(tmp_path / "not there", "x")
