"""Differences between two configs, key by key, with all defaults filled in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

# These name a run, so they always differ.
_NAMES_OF_THE_RUN: Final = ("run.name", "run.dir", "checkpoint.resume")
_RECORDED: Final = ("python", "platform", "packages", "world_size", "cpu_count", "devices")


class Difference(NamedTuple):
    """One key. None: that config does not have the key (an absent optional key, another number of sources)."""

    key: str
    first: Any
    second: Any


def differences(first: BaseModel, second: BaseModel) -> list[Difference]:
    """The keys whose values differ, sorted. Elements of arrays of tables are matched by their `name` where they have one."""
    one, other = (flatten(config.model_dump(mode="json", exclude_none=True)) for config in (first, second))
    keys = sorted(one.keys() | other.keys())
    return [Difference(key, one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)]


def render_differences(found: list[Difference], first: str, second: str) -> str:
    """Two lines per key in the manner of `diff`, with values in JSON's spelling, which is TOML's as well."""
    lines = [f"--- {first}", f"+++ {second}"]
    for key, *values in found:
        pairs = zip("-+", values, strict=True)
        lines += [
            f"{sign}{key} = {json.dumps(value, ensure_ascii=False)}" for sign, value in pairs if value is not None
        ]
    return "\n".join(lines)


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as `table.key` -> value; tables in a list by their `name`, or by index if one has none or they repeat."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, list) and value and all(isinstance(element, Mapping) for element in value):
            names = [element.get("name") for element in value]
            if None in names or len(set(names)) < len(names):
                names = list(map(str, range(len(value))))
            flat[f"{prefix}{key}[].name"] = names  # shows a change of order
            value = {name: {k: v for k, v in e.items() if k != "name"} for name, e in zip(names, value, strict=True)}
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def recorded_settings(config: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a launch and, prefixed with `env.`, its versions, ranks and devices; without the names of the run."""
    recorded = {"env": {key: value for key, value in environment.items() if key in _RECORDED}}
    flat = {**flatten(config), **flatten(recorded)}
    return {key: value for key, value in flat.items() if key not in _NAMES_OF_THE_RUN}
