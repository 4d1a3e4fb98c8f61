"""Numbers and names in messages: whatever a file's name holds, a message is one harmless line."""

from __future__ import annotations

import reprlib
import traceback
from collections.abc import Mapping, Sequence


def printable(text: str) -> str:
    """The text with everything that a terminal might act on as an escape: `\\n`, `\\u202e`.

    Bytes that are not UTF-8, in Python lone surrogates, are shown as bytes, `\\xff`.
    """
    return text if text.isprintable() else "".join(map(_escape, text))


def printable_lines(text: str) -> str:
    """The text with all but its line breaks `printable`."""
    return "\n".join(map(printable, text.split("\n")))


def _escape(character: str) -> str:
    if character.isprintable():
        return character
    if "\udc80" <= character <= "\udcff":  # a byte that is not UTF-8, as os.fsdecode returns it
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


def message_of(error: BaseException) -> str:
    """What an error says, if it can."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a class of the user's own may do anything
        return "its message cannot be shown"


def error_text(error: BaseException) -> str:
    """`ValueError: the message`; without one: `AssertionError: at /home/me/model.py:12`."""
    text = message_of(error)
    frames = traceback.extract_tb(error.__traceback__)
    if not text and frames:
        text = f"at {frames[-1].filename}:{frames[-1].lineno}"
    return f"{type(error).__name__}: {text}"


def short_repr(value: object) -> str:
    """A foreign value's repr, without most of what is long, or its type if that fails."""
    try:
        return printable(reprlib.repr(value))
    except Exception:  # noqa: BLE001 - a class of the user's own may do anything
        return f"a value of type {type(value).__name__}"


def few(names: Sequence[str]) -> str:
    """Some examples of many names: `a, b, c and 12 more`."""
    text = printable(", ".join(names[:3]))
    more = len(names) - 3
    return text + f" and {more:,} more" * (more > 0)


def counted(number: float, noun: str) -> str:
    """`1 stream`, `2 streams`, `1,234 passes`, `2.5 passes`."""
    shown = f"{number:,.2g}" if 0 < number < 10 else f"{number:,.0f}"
    if shown == "1":
        return f"1 {noun}"
    return f"{shown} {noun}es" if noun.endswith(("s", "ch")) else f"{shown} {noun}s"


def decimals_text(value: float) -> str:
    """With 4 decimals, or as 2.6e-05 where these would all be 0."""
    text = f"{value:.4f}"
    if value and not float(text):
        text = f"{value:.1e}"
    return text


def metrics_problem(metrics: object) -> str:
    """The mistake of an output's metrics, after "it returns"; empty if there is none."""
    return f"metrics as a {type(metrics).__name__}, no mapping of names to numbers" * (not isinstance(metrics, Mapping))
