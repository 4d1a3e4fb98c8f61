"""Line numbers of the keys in a TOML file, which the standard library's parser does not give.

The text is one that `tomllib` has accepted, so nothing is checked here. With strings and comments blanked out, a line
that starts outside all brackets is a header, a `key = value` or the rest of a value. A key inside an inline table has the
line of the key that holds the table.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KeyPath = tuple[str | int, ...]

# What may hide brackets, "=" and newlines: the four kinds of string, and comments.
_OPAQUE = re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*', re.DOTALL)


def key_lines(text: str) -> dict[KeyPath, int]:
    """Path of every table and key outside inline tables -> its line, counted from 1.

    An element of an array of tables has its index in the path: `("data", "source", 0, "name")`.
    """
    lines: dict[KeyPath, int] = {}
    counts: dict[KeyPath, int] = {}
    table: KeyPath = ()
    depth = 0
    blanked = _OPAQUE.sub(lambda opaque: re.sub(r"[^\n]", " ", opaque[0]), text)
    for number, (line, plain) in enumerate(zip(text.split("\n"), blanked.split("\n"), strict=True), start=1):
        start = plain.strip() if depth == 0 else ""
        depth += sum(map(plain.count, "[{")) - sum(map(plain.count, "]}"))
        if not start.startswith("[") and "=" not in start:
            continue
        if not start.startswith("["):
            path = table + _keys(line[: plain.index("=")])
        else:
            keys = _keys(line[: plain.rindex("]") + 1].strip().strip("[]"))
            path = table = _inside_arrays(keys, counts)
            if start.startswith("[["):
                lines.setdefault(path, number)
                counts[path] = counts.get(path, 0) + 1
                path = table = (*path, counts[path] - 1)
        for end in range(1, len(path) + 1):
            lines.setdefault(path[:end], number)
    return lines


def line_of(lines: dict[KeyPath, int], path: KeyPath) -> int | None:
    """The line of `path`, or of the nearest table around it; None if the file has neither."""
    return next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), None)


@dataclass(frozen=True)
class KeyOrigins:
    """Where each key of a config was written.

    Args:
        path: of the file.
        lines: see `key_lines`.
        overrides: path of a key -> the override that changed it, in the order in which they were applied.
    """

    path: str
    lines: dict[KeyPath, int]
    overrides: Mapping[KeyPath, str] = field(default_factory=dict)

    def where(self, key: KeyPath) -> str:
        """`file:line` or `--set ...`."""
        # The latest override of the key, of something in it, or of a table around it.
        for changed, origin in reversed(list(self.overrides.items())):
            if key and (key[: len(changed)] == changed or changed[: len(key)] == key):
                return origin
        line = line_of(self.lines, key)
        if line is not None:
            return f"{self.path}:{line}"
        # A key may be missing from a table that an override created.
        siblings = (
            origin for changed, origin in self.overrides.items() if len(key) > 1 and key[:-1] == changed[: len(key) - 1]
        )
        return next(siblings, self.path)


def _keys(dotted: str) -> KeyPath:
    """The parts of a dotted key, unquoted."""
    node: Any = tomllib.loads(f"{dotted} = 0")
    keys: KeyPath = ()
    while isinstance(node, dict):
        ((key, node),) = node.items()
        keys = (*keys, key)
    return keys


def _inside_arrays(keys: KeyPath, counts: dict[KeyPath, int]) -> KeyPath:
    """`keys` with the index of the newest element after each array of tables but the last key."""
    path: KeyPath = ()
    for position, key in enumerate(keys):
        path = (*path, key)
        if path in counts and position < len(keys) - 1:
            path = (*path, counts[path] - 1)
    return path
