"""Guesses about data that nobody has described: sizes that fit, and what is no text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.groups import held_out
from trainer.data.layout import Stream
from trainer.tools.corpora import why_not_text
from trainer.tools.survey import SEQ_LEN_RANGE, STEPS_RANGE, choose_sizes


@given(
    lengths=st.lists(st.lists(st.integers(0, 5000), min_size=1, max_size=30), min_size=1, max_size=20),
    share=st.floats(0.01, 1.0),
)
def test_sizes_are_usable_whatever_the_lengths(lengths, share):
    lengths[0].append(7)  # something to read
    streams = [Stream(i, f"s{i}.txt", f"s{i}.txt", "m") for i in range(len(lengths))]
    arrays = [np.array(each, dtype=np.int64) for each in lengths]
    sizes = choose_sizes(streams, arrays, share=share)
    assert SEQ_LEN_RANGE[0] <= sizes["seq_len"] <= SEQ_LEN_RANGE[1]
    assert STEPS_RANGE[0] <= sizes["steps"] <= STEPS_RANGE[1]
    assert min(sizes["batch_size"], sizes["micro_batches"]) >= 1
    if sizes["holdout_fraction"]:
        tokens = 0
        for stream, each in zip(streams, arrays, strict=True):
            tokens += int(each[held_out(stream.relative_path, len(each), sizes["holdout_fraction"])].sum())
        assert 0 < tokens < sum(int(each.sum()) for each in arrays)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("plain, \u00e9, \u20ac and \U0001f600".encode(), ""),
        ("\u20ac".encode() + b"x\xff", "not UTF-8: byte 0xff at offset 4"),
        (b"cut \xe2\x82", "not UTF-8: byte 0xe2 at offset 4"),
    ],
)
def test_the_first_byte_that_is_no_text_is_named(content, why):
    assert why_not_text(content) == why
    assert why_not_text(content, is_whole=False) == ("" if content.startswith(b"cut") else why)
