"""griffe extension for the API reference: splits docstring entries of several parameters (`rank, world_size: ...`).

griffe supports one name per entry and checks it against the signature, so each name gets its own entry.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_GROUP = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +.*)*)$", re.MULTILINE)


def split_entries(text: str) -> str:
    """The docstring with every multi-name entry of its Args repeated for each name."""
    before, args, after = text.partition("Args:\n")
    if not args:
        return text
    section, blank, rest = after.partition("\n\n")
    each = _GROUP.sub(lambda m: "\n".join(f"{m[1]}{name}: {m[3]}" for name in m[2].split(", ")), section)
    return before + args + each + blank + rest


class SplitEntries(Extension):  # type: ignore[misc]
    """Rewrites docstrings as they are collected."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Handle a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = split_entries(obj.docstring.value)
