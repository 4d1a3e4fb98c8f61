"""Fingerprints of data files: a change of size, of a sampled block or of a small file is seen; a touch is not."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.data.fingerprint import BLOCK_BYTES, Fingerprint, compare, mark_files
from trainer.errors import UserError

SIZES = (1, BLOCK_BYTES, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 1, 5 * BLOCK_BYTES)


def marks(path, *, blocks=2):
    return mark_files([[path]], blocks=blocks)[0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(size=st.sampled_from(SIZES), at=st.floats(0, 1, exclude_max=True), blocks=st.integers(2, 4))
def test_a_changed_byte_is_seen_in_every_sampled_block(tmp_path, size, at, blocks):
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(size))
    before = marks(path, blocks=blocks)
    content = bytearray(size)
    content[place := int(at * size)] = 1
    path.write_bytes(content)
    is_sampled = size <= blocks * BLOCK_BYTES or place < BLOCK_BYTES or place >= size - BLOCK_BYTES
    assert (marks(path, blocks=blocks) != before) == is_sampled or blocks > 2
    path.write_bytes(bytes(size))
    os.utime(path, (0, 0))
    assert marks(path, blocks=blocks) == before
    path.write_bytes(bytes(size + 1))
    assert marks(path, blocks=blocks) != before


def test_the_index_beside_a_file_belongs_to_it_and_one_that_cannot_be_read_is_named(tmp_path):
    pair = [tmp_path / "a.bin", tmp_path / "a.idx"]
    for path in pair:
        path.write_bytes(b"x")
    before = mark_files([pair], blocks=2)
    pair[1].write_bytes(b"y")
    assert mark_files([pair], blocks=2) != before
    pair[1].unlink()
    with pytest.raises(UserError, match=r"a.idx: cannot be read: No such file"):
        mark_files([pair], blocks=2)


def test_differences_are_counted_with_examples():
    before = Fingerprint(2, "5:aa", {"s": {f"{i}": f"1:{i}" for i in range(6)}, "gone": {"x": "1:a"}})
    after = Fingerprint(2, "5:aa", {"s": {f"{i}": f"1:{i}" for i in range(1, 8)}, "added": {"y": "1:b"}})
    other = Fingerprint(2, "5:bb", {"s": {f"{i}": f"2:{i}" for i in range(6)}})
    assert compare(before, after) == ["source s: 1 missing (0), 2 new (6, 7)"]
    assert compare(before, other) == ["the tokenizer.json changed", "source s: 6 changed (0, 1, 2 and 3 more)"]
    assert not compare(before, before)
    renamed = Fingerprint(2, "5:aa", {"t": {f"x/{i}": f"1:{i}" for i in range(6)}, "u": {"z": "1:a"}})
    assert before.content == renamed.content != other.content
