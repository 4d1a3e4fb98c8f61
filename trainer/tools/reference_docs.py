"""Generated documentation of the config: docs/config.md, and the JSON Schema that editors use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

from trainer.config.data_tables import FilesTable
from trainer.config.schema import RunConfig

_Node = dict[str, Any]


def render_config_markdown() -> str:
    """docs/config.md: every table and key with its type, default and meaning."""
    schema = RunConfig.model_json_schema()
    head = resources.files("trainer.tools") / "reference" / "config.md"
    parts = [head.read_text(encoding="utf-8")]
    for title, table in _tables("", schema, schema["$defs"]):
        summary = table["description"].split("`: ", 1)[-1]
        parts.append(f"\n## {title}\n\n{summary[:1].upper()}{summary[1:]}\n\n")
        for name, node in table["properties"].items():
            # The keys of a set's files are those of a source.
            is_told_before = title == "`[[eval.source]]`" and name in FilesTable.model_fields
            if "description" in node and not is_told_before:
                parts.append(_row(name, node))
    return "".join(parts)


def render_config_schema() -> str:
    """docs/config.schema.json: JSON Schema (2020-12) of a config."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}
    return json.dumps(schema, indent=1) + "\n"


def _tables(prefix: str, table: _Node, definitions: _Node) -> Iterator[tuple[str, _Node]]:
    """The tables in the order of the file, each with its TOML header."""
    for name, node in table["properties"].items():
        path = prefix + name
        for reference in _references(node):
            if reference != "MixingOverride":  # its keys are those of [data.mixing]
                yield f"`[[{path}]]`" if "items" in node else f"`[{path}]`", definitions[reference]
                yield from _tables(f"{path}.", definitions[reference], definitions)


def _references(node: _Node) -> Iterator[str]:
    """Names of the tables that a key's value may be."""
    if "$ref" in node:
        yield node["$ref"].rpartition("/")[2]
    for child in (*node.get("anyOf", ()), *node.get("oneOf", ()), *filter(None, [node.get("items")])):
        yield from _references(child)


def _row(name: str, node: _Node) -> str:
    default = node.get("default")
    value = f" = {json.dumps(default)}" * (default is not None and "$ref" not in node)
    meaning = node["description"].replace("\n", " ")
    if "enum" in node:
        is_clear = all(f"{value}:" in meaning for value in node["enum"])
    else:
        is_clear = node.get("type") in ("string", "integer", "number", "boolean", "object")
    if value and is_clear:  # the value shows the type
        return f"- `{name}{value}`: {meaning}\n"
    kind = _type(node) + ", required" * ("default" not in node)
    return f"- `{name}{value}` ({kind}): {meaning}\n"


def _type(node: _Node) -> str:
    if node.get("$ref", "").endswith("ScheduleTable"):
        return "schedule"
    if "$ref" in node:
        return "table"
    if "enum" in node or "const" in node:
        allowed = node.get("enum") or [node["const"]]
        return ", ".join(json.dumps(each).strip('"') for each in allowed)
    options = node.get("anyOf") or node.get("oneOf")
    if options:
        return " or ".join(_type(option) for option in options if option.get("type") != "null")
    if node["type"] == "array":
        return f"list of {_type(node['items'])}" + "s" * ("enum" not in node["items"])
    return str(node["type"]).replace("object", "table")
