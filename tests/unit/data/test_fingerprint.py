"""Fingerprints of data files: a change of size, of a sampled block or of a small file is seen; a touch is not."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.data.fingerprint import (
    BLOCK_BYTES,
    FEWEST_BLOCKS,
    MOST_BLOCKS,
    TOTAL_BLOCKS,
    Fingerprint,
    blocks_per_file,
    compare,
    has_contents,
    keep_contents,
    mark_files,
)
from trainer.errors import UserError

SIZES = (0, 1, BLOCK_BYTES, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 1, 5 * BLOCK_BYTES)


def marks(path, *, blocks=2, whole=False):
    return mark_files([[path]], blocks=blocks, whole=whole)[0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(size=st.sampled_from(SIZES), at=st.floats(0, 1, exclude_max=True), blocks=st.integers(2, 4))
def test_a_changed_byte_is_seen_in_every_sampled_block_and_always_in_the_content(tmp_path, size, at, blocks):
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(size))
    before, whole = marks(path, blocks=blocks), marks(path, blocks=blocks, whole=True)
    assert whole.startswith(before)
    if not size:
        return
    content = bytearray(size)
    content[place := int(at * size)] = 1
    path.write_bytes(content)
    is_sampled = size <= blocks * BLOCK_BYTES or place < BLOCK_BYTES or place >= size - BLOCK_BYTES
    if is_sampled:
        assert marks(path, blocks=blocks) != before
    assert marks(path, blocks=blocks, whole=True) != whole
    path.write_bytes(bytes(size))
    os.utime(path, (0, 0))
    assert marks(path, blocks=blocks) == before
    path.write_bytes(bytes(size + 1))
    assert marks(path, blocks=blocks) != before


@given(number=st.integers(0, 10**7))
def test_the_bytes_read_are_bounded(number):
    blocks = blocks_per_file(number)
    assert FEWEST_BLOCKS <= blocks <= MOST_BLOCKS
    assert blocks == FEWEST_BLOCKS or blocks * number <= TOTAL_BLOCKS


def test_the_index_beside_a_file_belongs_to_it(tmp_path):
    for name in ("a.bin", "a.idx"):
        (tmp_path / name).write_bytes(b"x")
    pair = [[tmp_path / "a.bin", tmp_path / "a.idx"]]
    before = mark_files(pair, blocks=2, whole=False)
    (tmp_path / "a.idx").write_bytes(b"y")
    assert mark_files(pair, blocks=2, whole=False) != before


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nope.txt: cannot be read: No such file"):
        marks(tmp_path / "nope.txt")


def test_differences_are_counted_with_examples_and_contents_compared_where_both_have_them():
    before = Fingerprint(2, "5:aa", {"s": {f"{i}": f"1:{i}:whole{i}" for i in range(6)}, "gone": {"x": "1:a"}})
    after = Fingerprint(2, "5:aa", {"s": {f"{i}": f"1:{i}" for i in range(1, 8)}, "added": {"y": "1:b"}})
    change = compare(before, after)
    assert str(change) == "source s: 1 missing (0), 2 new (6, 7); source gone: not in the config"
    assert not compare(before, before)
    assert not has_contents(after)
    kept = keep_contents(before, after)
    assert kept.sources["s"]["5"] == "1:5:whole5"
    assert kept.sources["s"]["7"] == "1:7"
    other = Fingerprint(2, "5:bb", {"s": {f"{i}": f"1:{i}:other" for i in range(6)}})
    change = compare(before, other)
    assert (
        str(change)
        == "the tokenizer.json changed; source s: 6 changed (0, 1, 2 and 3 more); source gone: not in the config"
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(
    state=JSON
    | st.fixed_dictionaries({"blocks": JSON, "tokenizer": JSON, "sources": JSON})
    | st.fixed_dictionaries({"blocks": st.integers(0, 20), "tokenizer": st.just(""), "sources": JSON})
)
def test_a_damaged_state_is_refused_and_a_good_one_comes_back(state):
    try:
        found = Fingerprint.from_state(state)
    except ValueError:
        return
    assert Fingerprint.from_state(json.loads(json.dumps(found.to_state()))) == found
    assert not compare(found, found)
