"""Configs with something wrong: mutations of valid ones, as data, as text, and as overrides."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import tomli_w
from hypothesis import strategies as st

Path = tuple[str | int, ...]
INTEGERS = [0, -1, 1, 2, 7, 2**31, 2**63 - 1, -(2**63), 10**30]
NUMBERS = [*INTEGERS, 0.0, -0.0, 1e-320, 1e308, math.inf, -math.inf, math.nan, 0.5]
KEYWORDS = ["auto", "off", "1e5", "true", "null", "os:system"]
WORDS = [*KEYWORDS, "", " ", "../../x", "/", "\0", "a" * 5000, "\u00e9\u202e\U0001f600", "[x]", "*", "**/*"]

junk = st.recursive(
    st.sampled_from([*NUMBERS, *WORDS]) | st.booleans() | st.floats() | st.text(max_size=12) | st.dates() | st.times(),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=4,
)


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


def _at(table: Any, path: Path) -> Any:
    for key in path:
        table = table[key]
    return table


@st.composite
def mutated_tables(draw: st.DrawFn, base: dict[str, Any]) -> dict[str, Any]:
    """The base with one to three values replaced, removed, moved or added."""
    table = copy.deepcopy(base)
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(table))
        if not found:
            break
        path = draw(st.sampled_from(found))
        parent, key = _at(table, path[:-1]), path[-1]
        match draw(st.sampled_from(["replace", "remove", "add", "copy"])):
            case "replace":
                parent[key] = draw(junk)
            case "remove":
                del parent[key]
            case "add" if isinstance(parent, dict):
                new = st.text(max_size=8) | st.sampled_from([f"{key}s", str(key)[:-1], "steps"])
                parent[draw(new)] = draw(junk)
            case _:
                parent[key] = copy.deepcopy(_at(table, draw(st.sampled_from(found))))
    return table


@st.composite
def mutated_texts(draw: st.DrawFn, text: str) -> bytes:
    """The text with some bytes cut out, doubled or replaced, most of them no longer TOML."""
    data = text.encode()
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 40)))
        part = draw(st.one_of(st.just(b""), st.binary(max_size=6), st.just(data[start:end] * 2), st.just(b'"')))
        data = data[:start] + part + data[end:]
    return data


@st.composite
def mutated_overrides(draw: st.DrawFn, base: dict[str, Any]) -> list[str]:
    """What stands after `--set`."""
    keys = [".".join(map(str, path)) for path in places(base)]
    key = st.sampled_from([*keys, "train.stepz", "a.b.c", ".", "data.source", "train"]) | st.text(max_size=10)
    value = st.sampled_from([*WORDS, *map(str, NUMBERS), "[", "{a=1}", "[1,", '"']) | st.text(max_size=10)
    count = draw(st.integers(1, 3))
    return [draw(key) + draw(st.sampled_from(["=", "=", "=", "", "=="])) + draw(value) for _ in range(count)]


def to_bytes(table: dict[str, Any]) -> bytes | None:
    """As TOML; None where TOML cannot say it."""
    try:
        return tomli_w.dumps(table).encode("utf-8")
    except (TypeError, ValueError, UnicodeEncodeError):
        return None
