"""Tables in narrow terminals: nothing is cut, whole columns go instead."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from trainer.tools.fitted_table import Column, fitted_table


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
