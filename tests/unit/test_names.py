"""Names from anywhere stay one harmless line in whatever shows them."""

from __future__ import annotations

import io
import logging
import os

from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import UserError, UserErrors
from trainer.metrics.logger import get_logger
from trainer.wording import few, printable

NAMES = st.text(st.characters(), max_size=12) | st.binary(max_size=12).map(os.fsdecode)


@given(name=NAMES)
def test_a_printable_name_is_one_line_of_utf_8_without_control_characters(name):
    shown = printable(name)
    assert shown.isprintable()
    assert len(shown.encode("utf-8").decode("utf-8").splitlines()) <= 1
    assert printable(shown) == shown
    assert not name.isprintable() or shown == name


def test_what_is_escaped_can_be_recognized():
    assert printable("a\n\x1b[31m\u202eb\xa0é漢") == "a\\n\\x1b[31m\\u202eb\\xa0é漢"
    assert printable(os.fsdecode(b"caf\xe9")) == "caf\\xe9"


def test_many_names_are_three_and_a_count():
    assert few(["a", "b\n"]) == "a, b\\n"
    assert few(list("abc")) == "a, b, c"
    assert few([str(i) for i in range(1203)]) == "0, 1, 2 and 1,200 more"


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
