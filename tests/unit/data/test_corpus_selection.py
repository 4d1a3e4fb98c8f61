"""Which document goes into which stream, and which fit under a cap."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.tools.corpus.documents import Document, cap_evenly, group_by_directory


def document(source, num_bytes):
    return Document(source, "", num_bytes, source)


def test_a_small_directory_joins_its_parent():
    documents = [document("a/x", 60), document("a/b/x", 40), document("a/b/c/x", 30), document("a/d/x", 50)]
    streams = group_by_directory(documents, min_bytes=50)
    assert {name: [d.source for d in members] for name, members in streams.items()} == {
        "a": ["a/x"],
        "a.b": ["a/b/c/x", "a/b/x"],
        "a.d": ["a/d/x"],
    }


def test_what_a_small_stream_leaves_goes_to_the_others():
    streams = {"s": [document("s/0", 10)], "b": [document(f"b/{k}", 10) for k in range(20)]}
    capped = cap_evenly(streams, 100, min_bytes=0)
    assert len(capped["s"]) == 1
    assert len(capped["b"]) == 9


PATHS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=0, max_size=3)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(found=st.lists(st.tuples(PATHS, st.integers(1, 40)), max_size=40), cap=st.integers(0, 400))
def test_nothing_is_lost_or_doubled_and_the_cap_holds(found, cap):
    documents = [document("/".join([*parts, f"f{k}"]), size) for k, (parts, size) in enumerate(found)]
    streams = group_by_directory(documents, min_bytes=50)
    placed = [d.source for members in streams.values() for d in members]
    assert sorted(placed) == sorted(d.source for d in documents)
    total = sum(d.num_bytes for d in documents)
    if total >= 50:
        assert all(sum(d.num_bytes for d in members) >= 50 for members in streams.values())
    capped = cap_evenly(streams, cap, min_bytes=50)
    assert sum(d.num_bytes for members in capped.values() for d in members) <= cap
    assert cap_evenly(streams, total * (len(streams) + 1), min_bytes=50) == streams
