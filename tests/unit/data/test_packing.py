"""Documents share rows by best-fit decreasing."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.groups import pack_rows

CAPACITY = 12


def loads(lengths: list[int]) -> list[int]:
    """Tokens of each row, sorted."""
    rows = pack_rows(np.array(lengths, dtype=np.int64), CAPACITY)
    return sorted(np.bincount(rows, weights=lengths).astype(int).tolist())


def plain(lengths: list[int]) -> list[int]:
    """The same by a loop over all rows: the longest first, each into the fullest row with room."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in range(len(rows)) if rows[row] + length <= CAPACITY]
        if fitting:
            rows[max(fitting, key=rows.__getitem__)] += length
        else:
            rows.append(length)
    return sorted(rows)


@given(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=60))
def test_rows_are_filled_as_best_fit_decreasing_fills_them(lengths: list[int]) -> None:
    assert loads(lengths) == plain(lengths)


@given(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=60))
def test_rows_are_numbered_in_the_order_of_their_first_documents(lengths: list[int]) -> None:
    rows = pack_rows(np.array(lengths, dtype=np.int64), CAPACITY).tolist()
    assert list(dict.fromkeys(rows)) == list(range(max(rows) + 1))
