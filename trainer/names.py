"""Names of files and modalities in messages: whatever they hold, a message is one harmless line."""

from __future__ import annotations

from collections.abc import Sequence

EXAMPLES = 3


def printable(text: str) -> str:
    """The text with everything that a terminal might act on as an escape: `\\n`, `\\x1b`, `\\u202e`.

    Names of files and modalities may hold control characters, marks that reverse the reading direction, and bytes that
    are not UTF-8 (in Python, lone surrogates; shown as the byte, `\\xff`).
    """
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else _escape(character) for character in text)


def _escape(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # a byte that is not UTF-8, as os.fsdecode returns it
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


def few(names: Sequence[str]) -> str:
    """Some examples of many names: `a, b, c and 12 more`."""
    more = len(names) - EXAMPLES
    return printable(", ".join(names[:EXAMPLES])) + (f" and {more:,} more" if more > 0 else "")
