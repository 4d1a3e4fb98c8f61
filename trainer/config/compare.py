"""What two configs do differently: their values with every default filled in, key by key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True)
class Difference:
    """One key. A side that does not have the key (another number of sources, an optional key left out) is None."""

    key: str
    first: Any
    second: Any


def differences(first: BaseModel, second: BaseModel) -> list[Difference]:
    """The keys whose values differ, sorted. Elements of arrays of tables are matched by their `name` where they have one."""
    one, other = flat_values(first), flat_values(second)
    keys = sorted(one.keys() | other.keys())
    return [Difference(key, one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)]


def flat_values(config: BaseModel) -> dict[str, Any]:
    """`table.key` -> value, without keys that are absent."""
    return _flatten(config.model_dump(mode="json", exclude_none=True), "")


def _flatten(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            names = [element.get("name") for element in value]
            if None in names or len(set(names)) < len(names):
                names = list(map(str, range(len(value))))
            flat[f"{prefix}{key}[].name"] = names  # also tells of another order
            value = {name: {k: v for k, v in e.items() if k != "name"} for name, e in zip(names, value, strict=True)}
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def render_differences(found: list[Difference], first: str, second: str) -> str:
    """Two lines a key, marked as `diff` marks them, with values as TOML writes them."""
    lines = [f"--- {first}", f"+++ {second}"]
    for each in found:
        if each.first is not None:
            lines.append(f"-{each.key} = {json.dumps(each.first, ensure_ascii=False)}")
        if each.second is not None:
            lines.append(f"+{each.key} = {json.dumps(each.second, ensure_ascii=False)}")
    return "\n".join(lines)
