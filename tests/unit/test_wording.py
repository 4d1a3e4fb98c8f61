"""Numbers in sentences and tables, and tables in narrow terminals: nothing is cut, whole columns go instead."""

from __future__ import annotations

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from trainer.tools.fitted_table import Column, fitted_table
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


def shown(columns: list[Column], width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(fitted_table(columns, width=width))
    return file.getvalue()


COLUMNS = [
    Column("run", ["runs/smoke-20261121-005620"]),
    Column("step", ["1,234,567"], "right", leave_out=1),
    Column("longest\nwait", ["12,345 steps"], "right", leave_out=2),
    Column("verdict", ["[red]loss_diverged, data_bound[/]"], leave_out=1, wraps=True),
]


def test_columns_go_in_order_and_are_named():
    assert "omitted" not in shown(COLUMNS, 120)
    narrow = shown(COLUMNS, 70)
    assert "omitted to fit the terminal: longest wait" in narrow
    assert "1,234,567" in narrow


@given(width=st.integers(30, 140))
def test_what_is_shown_is_whole_and_fits(width):
    text = shown(COLUMNS, width)
    assert max(map(len, text.splitlines())) <= width
    assert "runs/smoke-20261121-005620" in text
    for column, whole in zip(COLUMNS[1:3], ("1,234,567", "12,345 steps"), strict=True):
        is_there = column.heading.split("\n")[-1] in text.split("omitted")[0]
        assert is_there == (whole in text)
    assert "…" not in text
