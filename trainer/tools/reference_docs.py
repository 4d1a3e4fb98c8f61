"""Generated documentation: of the config (docs/config.md, and the JSON Schema that editors use) and of the metrics;
and the differences of two configs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from typing import Any, NamedTuple

from pydantic import BaseModel

from trainer.config.data_tables import FilesTable
from trainer.config.load import flatten
from trainer.config.schema import RunConfig
from trainer.metrics.catalog.lookup import CATALOG
from trainer.metrics.catalog.spec import MetricSpec

_TYPES = {"object": "table"}
_Node = dict[str, Any]


def _head(name: str) -> str:
    return (resources.files("trainer.tools") / "reference" / f"{name}.md").read_text(encoding="utf-8")


def render_config_markdown() -> str:
    """docs/config.md: every table and key with its type, default and meaning."""
    schema = RunConfig.model_json_schema()
    parts = [_head("config")]
    for title, table in _tables("", schema, schema["$defs"]):
        summary = table["description"].split("`: ", 1)[-1]
        parts.append(f"\n## {title}\n\n{summary[:1].upper()}{summary[1:]}\n")
        parts.append("\n")
        alternatives = {name for option in table.get("oneOf", ()) for name in option["required"]}
        parts.extend(
            _row(name, node, is_alternative=name in alternatives)
            for name, node in table["properties"].items()
            if "description" in node and not (title == "`[[eval.source]]`" and name in FilesTable.model_fields)
        )
    return "".join(parts)


def render_config_schema() -> str:
    """docs/config.schema.json: JSON Schema (2020-12) of a config."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}
    return json.dumps(schema, indent=1) + "\n"


def _tables(prefix: str, table: _Node, definitions: _Node) -> Iterator[tuple[str, _Node]]:
    """The tables in the order of the file, each with its TOML header."""
    for name, node in table["properties"].items():
        named = next(iter(node.get("patternProperties", {}).values()), None)  # tables under names of the user's
        path = prefix + name + (".<name>" if named else "")
        for reference in _references(named or node):
            if reference != "MixingOverride":  # its keys are those of [data.mixing]
                yield f"`[[{path}]]`" if "items" in node else f"`[{path}]`", definitions[reference]
                yield from _tables(f"{path}.", definitions[reference], definitions)


def _references(node: _Node) -> Iterator[str]:
    """Names of the tables that a key's value may be."""
    if "$ref" in node:
        yield node["$ref"].rpartition("/")[2]
    for child in (*node.get("anyOf", ()), *node.get("oneOf", ()), *filter(None, [node.get("items")])):
        yield from _references(child)


def _row(name: str, node: _Node, *, is_alternative: bool) -> str:
    default = node.get("default")
    has_value = default is not None and "$ref" not in node and not is_alternative
    is_plain = (
        has_value and node.get("type") in ("string", "integer", "number", "boolean", "object") and "enum" not in node
    )
    value = f" = {json.dumps(default)}" if has_value else ""
    needed = ", one of the two" if is_alternative else ", required" if "default" not in node else ""
    meaning = node["description"].replace("\n", " ")
    is_plain |= has_value and "enum" in node and all(f"{value}:" in meaning for value in node["enum"])
    kind = "" if is_plain else f" ({_type(node)}{needed})"
    return f"- `{name}{value}`{kind}: {meaning}\n"


def _type(node: _Node) -> str:
    if "$ref" in node:
        return "schedule" if node["$ref"].endswith("ScheduleTable") else "table"
    if "enum" in node or "const" in node:
        allowed = node.get("enum") or [node["const"]]
        return ", ".join(each if isinstance(each, str) else json.dumps(each) for each in allowed)
    if options := node.get("anyOf") or node.get("oneOf"):
        return " or ".join(_type(option) for option in options if option.get("type") != "null")
    if node["type"] == "array":
        return f"list of {_type(node['items'])}" + "s" * ("enum" not in node["items"])
    return _TYPES.get(node["type"]) or str(node["type"])


def render_catalog_markdown() -> str:
    """docs/training/METRICS_LOSSES.md: every metric of the catalog; keys that mean the same share an entry."""
    parts = [_head("metrics")]
    for group in dict.fromkeys(spec.group for spec in CATALOG):
        parts.append(f"\n## {group}\n\n")
        alike: dict[tuple[str, ...], list[MetricSpec]] = {}
        for spec in CATALOG:
            if spec.group == group:
                alike.setdefault((spec.description, spec.healthy, spec.pathological), []).append(spec)
        for (meaning, healthy, pathological), specs in alike.items():
            ways = [f"{spec.unit}, " * bool(spec.unit) + f"{spec.window}/{spec.ranks}" for spec in specs]
            how = ways[0] if len(set(ways)) == 1 else "; ".join(ways)
            names = ", ".join(f"`{spec.name}`" for spec in specs)
            parts.append(f"- {names} ({how}): {meaning} *Healthy:* {healthy} *Pathological:* {pathological}\n")
    return "".join(parts)


class Difference(NamedTuple):
    """One key. None: that config does not have the key (an absent optional key, another number of sources)."""

    key: str
    first: Any
    second: Any


def differences(first: BaseModel, second: BaseModel) -> list[Difference]:
    """The keys whose values differ, sorted, with all defaults filled in; elements of arrays of tables are matched by `name`."""
    one, other = (flatten(config.model_dump(mode="json", exclude_none=True)) for config in (first, second))
    keys = sorted(one.keys() | other.keys())
    return [Difference(key, one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)]


def render_differences(found: list[Difference], first: str, second: str) -> str:
    """Two lines per key in the manner of `diff`, with values in JSON's spelling, which is TOML's as well."""
    signed = [(sign, key, value) for key, *both in found for sign, value in zip("-+", both, strict=True)]
    lines = [
        f"{sign}{key} = {json.dumps(value, ensure_ascii=False)}" for sign, key, value in signed if value is not None
    ]
    return "\n".join([f"--- {first}", f"+++ {second}", *lines])
