"""Globs: like `glob.glob`, but every directory is entered once."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.layout import find_files

PATTERNS = (
    "**/*.txt",
    "*/**/*.txt",
    "a/**",
    "a/**/b/*",
    "**/b/**/*.txt",
    "*.txt",
    "[ab]/*",
    "a/../**/c.txt",
    "**",
    "./**/*",
)


def by_glob(pattern: str) -> set[str]:
    return {os.path.normpath(path) for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)}


@given(
    paths=st.sets(
        st.lists(st.sampled_from(["a", "b", ".h", "x[1]", "_u"]), max_size=3).map("/".join), min_size=1, max_size=6
    ),
    pattern=st.sampled_from(PATTERNS),
    is_absolute=st.booleans(),
)
def test_without_links_the_files_are_those_of_glob(tmp_path_factory, paths, pattern, is_absolute):
    root = tmp_path_factory.mktemp("tree")
    for path in paths:
        (root / path).mkdir(parents=True, exist_ok=True)
        for name in ("c.txt", "d.md", ".e.txt"):
            (root / path / name).touch()
    before = Path.cwd()
    os.chdir(root)
    try:
        if is_absolute:
            pattern = os.path.join(glob.escape(str(root)), pattern)
        found = find_files(pattern)
        assert {os.path.normpath(path) for path in found} == by_glob(pattern)
        assert found == sorted(set(found))
    finally:
        os.chdir(before)


def test_a_link_to_an_ancestor_ends_and_one_to_elsewhere_is_followed_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("in/a/deep", "in/b", "elsewhere"):
        Path(path).mkdir(parents=True)
        Path(path, "x.txt").touch()
    for number in range(4):
        Path(f"in/a/deep/up{number}").symlink_to(tmp_path / "in")
    Path("in/0").symlink_to("a")  # comes first, but is a link
    Path("in/b/other").symlink_to(tmp_path / "elsewhere")
    assert find_files("in/**/*.txt") == ["in/a/deep/x.txt", "in/b/other/x.txt", "in/b/x.txt"]
    assert len(find_files("in/0/**/*.txt")) == 3


@pytest.mark.skipif(os.getuid() == 0, reason="root may read every directory")
def test_a_directory_that_may_not_be_read_is_passed_over(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").touch()
    (tmp_path / "a").chmod(0)
    try:
        assert find_files(f"{tmp_path}/**/*.txt") == [f"{tmp_path}/b/x.txt"]
    finally:
        (tmp_path / "a").chmod(0o700)
