"""Numbers of things read as a person would write them."""

from __future__ import annotations

import pytest

from trainer.cli.terminal import counted


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "stream", "0 streams"),
        (1, "stream", "1 stream"),
        (2, "document", "2 documents"),
        (12345, "document", "12,345 documents"),
        (1.04, "pass", "1 pass"),
        (2.53, "pass", "2.5 passes"),
        (0.31, "pass", "0.31 passes"),
        (9.97, "pass", "10 passes"),
        (22.4, "pass", "22 passes"),
    ],
)
def test_a_number_and_its_noun(number, noun, text):
    assert counted(number, noun) == text
