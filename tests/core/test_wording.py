"""Numbers, names and tables in what people read: rounded, harmless, on one line, and whole in narrow terminals."""

from __future__ import annotations

import io
import logging
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import UserError, UserErrors
from trainer.import_path import format_error
from trainer.metrics.logger import get_logger
from trainer.tools.runs.readings import number_text
from trainer.wording import counted, error_text, few, printable

NUMBERS = {"0": 0.0, "12,345,678,901": 12_345_678_901.0, "1,234": 1234.5, "0.02134": 0.02134, "1,000": 999.96}
NUMBERS |= {"3.2e-05": 3.2e-05, "1.235e+10": 1.23456e10 + 0.5, "-inf": -math.inf}
COUNTS = [(1, "stream"), (12345, "document"), (2.53, "pass"), (9.97, "pass"), (2, "micro-batch")]


def test_numbers_have_four_significant_digits_or_all_before_the_point_and_nouns_agree_with_theirs() -> None:
    assert list(map(number_text, NUMBERS.values())) == list(NUMBERS)
    found = ["1 stream", "12,345 documents", "2.5 passes", "10 passes", "2 micro-batches"]
    assert [counted(number, noun) for number, noun in COUNTS] == found


def test_an_error_without_a_message_says_where_it_was_raised() -> None:
    with pytest.raises(StopIteration) as caught:
        next(iter(()))
    assert error_text(caught.value).startswith(f"StopIteration: at {__file__}:")
    assert error_text(ValueError("bad")) == "ValueError: bad"
    odd = type("Odd", (ValueError,), {"__str__": lambda self: self.args[5]})
    assert (error_text(odd()), format_error(SyntaxError())) == ("Odd: its message cannot be shown", "SyntaxError")


NAMES = st.text(st.characters(), max_size=12) | st.binary(max_size=12).map(os.fsdecode)


def test_what_is_escaped_can_be_recognized_and_many_names_are_three_and_a_count():
    assert few(["a", "b\n"]) == "a, b\\n"
    assert few([str(i) for i in range(1203)]) == "0, 1, 2 and 1,200 more"
    assert printable("a\n\x1b[31m\u202eb\xa0é漢") == "a\\n\\x1b[31m\\u202eb\\xa0é漢"
    assert printable(os.fsdecode(b"caf\xe9")) == "caf\\xe9"


@given(key=NAMES, problem=NAMES, fix=NAMES, where=NAMES)
def test_a_message_is_one_printable_line(key, problem, fix, where):
    error = UserError(key, problem, fix, where=where)
    assert error.message.isprintable()
    assert str(error) == error.message
    assert UserErrors([error, error]).message.split("\n") == [error.message] * 2


def test_a_name_in_a_log_line_does_not_act_on_the_terminal(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    # pytest keeps what it captures as it is, and its workers cannot send such a name.
    monkeypatch.setattr(logging.getLogger("trainer"), "propagate", False)
    get_logger("names").warning("%s: is odd\nsecond line", os.fsdecode(b"x\x1b]0;title\x07\xff"))
    assert stream.getvalue() == "[rank 0] WARNING x\\x1b]0;title\\x07\\xff: is odd\nsecond line\n"
    assert logging.getLogger("trainer.wording").handlers == []
