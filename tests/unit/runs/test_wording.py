"""Numbers in sentences and tables."""

from __future__ import annotations

import math

import pytest

from trainer.runs.wording import counted, number_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-3.0, "-3"),
        (12_345_678_901.0, "12,345,678,901"),
        (1234.5, "1,234"),
        (99.956, "99.96"),
        (0.02134, "0.02134"),
        (0.5, "0.5"),
        (3.2e-05, "3.2e-05"),
        (1.23456e10 + 0.5, "1.235e+10"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_have_four_significant_digits_or_all_before_the_point(value: float, text: str) -> None:
    assert number_text(value) == text


def test_digits_can_be_chosen() -> None:
    assert (number_text(2.34567, 5), number_text(2.34567, 3)) == ("2.3457", "2.35")


def test_nouns_agree_with_their_number() -> None:
    assert [counted(number, "step") for number in (0, 1, 2, 1234)] == ["0 steps", "1 step", "2 steps", "1,234 steps"]
