"""Which line of a TOML file a key stands on.

The standard library's parser does not say. This scanner reads only the structure (headers, keys, where a value ends) of
text that `tomllib` has already accepted, so it need not refuse anything. Keys inside an inline table have the line of the
key that holds the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

KeyPath = tuple[str | int, ...]

_KEY_PART = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([A-Za-z0-9_-]+))\s*""")
_HEADER = re.compile(r"\s*(\[\[?)")
# A value's pieces that hide brackets and newlines: the four kinds of string, and comments.
_OPAQUE = re.compile(r'"""(?:[^\\]|\\.)*?"""|\'\'\'.*?\'\'\'|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*', re.DOTALL)


def key_lines(text: str) -> dict[KeyPath, int]:
    """Path of every table and key outside inline tables -> its line, counted from 1.

    An element of an array of tables has its index in the path: `("data", "source", 0, "name")`.
    """
    lines: dict[KeyPath, int] = {}
    counts: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for start, line in _statements(text):
        header = _HEADER.match(text, start)
        keys, _ = _dotted_key(text, header.end() if header else start)
        if not keys:
            continue
        if header is None:
            path = table + keys
        elif header[1] == "[[":
            array = _inside_arrays(keys, counts)
            counts[array] = counts.get(array, 0) + 1
            lines.setdefault(array, line)
            path = table = (*array, counts[array] - 1)
        else:
            path = table = _inside_arrays(keys, counts)
        for end in range(1, len(path) + 1):
            lines.setdefault(path[:end], line)
    return lines


def line_of(lines: dict[KeyPath, int], path: KeyPath) -> int | None:
    """The line of `path`, or of the nearest thing that holds it; None if nothing of it is in the file."""
    for end in range(len(path), 0, -1):
        if path[:end] in lines:
            return lines[path[:end]]
    return None


def _inside_arrays(keys: KeyPath, counts: dict[KeyPath, int]) -> KeyPath:
    """`keys` with the index of the newest element after each array of tables but the last key."""
    path: KeyPath = ()
    for position, key in enumerate(keys):
        path = (*path, key)
        if path in counts and position < len(keys) - 1:
            path = (*path, counts[path] - 1)
    return path


def _dotted_key(text: str, position: int) -> tuple[KeyPath, int]:
    parts: list[str] = []
    while match := _KEY_PART.match(text, position):
        parts.append(next(group for group in match.groups() if group is not None))
        position = match.end()
        if not text.startswith(".", position):
            break
        position += 1
    return tuple(parts), position


def _statements(text: str) -> Iterator[tuple[int, int]]:
    """(offset, line) of every header and every `key = value` outside brackets."""
    position, line, depth, fresh = 0, 1, 0, True
    while position < len(text):
        char = text[position]
        if fresh and not char.isspace() and char != "#":
            yield position, line
            if header := _HEADER.match(text, position):
                _, end = _dotted_key(text, header.end())
                position = text.find("]", end) + len(header[1])
            else:
                _, position = _dotted_key(text, position)
            fresh = False
            continue
        if opaque := _OPAQUE.match(text, position):
            line += opaque[0].count("\n")
            position = opaque.end()
            continue
        if char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "\n":
            line += 1
            fresh = depth == 0
        position += 1
