"""Numbers in sentences and tables."""

from __future__ import annotations

import math

import pytest

from trainer.wording import counted, error_text, number_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (12_345_678_901.0, "12,345,678,901"),
        (1234.5, "1,234"),
        (0.02134, "0.02134"),
        (3.2e-05, "3.2e-05"),
        (1.23456e10 + 0.5, "1.235e+10"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_have_four_significant_digits_or_all_before_the_point(value: float, text: str) -> None:
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "stream", "1 stream"),
        (12345, "document", "12,345 documents"),
        (2.53, "pass", "2.5 passes"),
        (9.97, "pass", "10 passes"),
        (2, "micro-batch", "2 micro-batches"),
    ],
)
def test_nouns_agree_with_their_number(number: float, noun: str, text: str) -> None:
    assert counted(number, noun) == text


def test_an_error_without_a_message_says_where_it_was_raised() -> None:
    with pytest.raises(StopIteration) as caught:
        next(iter(()))
    assert error_text(caught.value).startswith(f"StopIteration: at {__file__}:")
    assert error_text(ValueError("bad")) == "ValueError: bad"
