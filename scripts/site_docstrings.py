"""For the site's reference: our docstrings describe parameters that belong together in one entry (`rank, world_size: ...`).

griffe, which reads them, knows entries of one name. It gets one entry for each, so that its check of names against the
signature holds for them too.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_GROUP = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +.*)*)$", re.MULTILINE)


def split_entries(text: str) -> str:
    """The docstring with every entry of several names in its Args written once for each of them."""
    before, args, after = text.partition("Args:\n")
    if not args:
        return text
    section, blank, rest = after.partition("\n\n")
    each = _GROUP.sub(lambda m: "\n".join(f"{m[1]}{name}: {m[3]}" for name in m[2].split(", ")), section)
    return before + args + each + blank + rest


class SplitEntries(Extension):  # type: ignore[misc]
    """Rewrites docstrings as they are collected."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = split_entries(obj.docstring.value)
