"""The keys of a schema, the places of a table, and odd values to put there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

Path = tuple[str | int, ...]
INTEGERS = [0, -1, 1, 2, 7, 2**31, 2**63 - 1, -(2**63), 10**30]
NUMBERS = [*INTEGERS, 0.0, -0.0, 1e-320, 1e308, math.inf, -math.inf, math.nan, 0.5]
KEYWORDS = ["auto", "off", "1e5", "true", "null", "os:system"]
WORDS = [*KEYWORDS, "", " ", "../../x", "/", "\0", "a" * 5000, "\u00e9\u202e\U0001f600", "[x]", "*", "**/*"]


def schema_keys(
    schema: Mapping[str, Any], node: Mapping[str, Any] | None = None, path: Path = ()
) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """The path and the node of every table, key, list element (0) and entry of a free table ("some")."""
    node = schema if node is None else node
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    if path:
        yield path, node
    for option in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        if option.keys() != {"required"}:
            yield from schema_keys(schema, option, path)
    for name, child in node.get("properties", {}).items():
        yield from schema_keys(schema, child, (*path, name))
    if "items" in node:
        yield from schema_keys(schema, node["items"], (*path, 0))
    if isinstance(node.get("additionalProperties"), Mapping):
        yield from schema_keys(schema, node["additionalProperties"], (*path, "some"))


def places(table: Any, path: Path = ()) -> Iterator[Path]:
    """The path of every value, inner tables included."""
    items: Any = table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))
