"""Senseless values for every key of the schema are refused."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.support.runs import write_tiny_config
from trainer.config.load import load_config
from trainer.config.schema import RunConfig
from trainer.errors import UserError


def schema_keys(
    schema: Mapping[str, Any], node: Mapping[str, Any] | None = None, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Mapping[str, Any]]]:
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


# TOML values. The first make no sense for any key but the text of a prompt.
LONG = f"1{'0' * 39}", "1" * 6000, f"0x{'f' * 6000}", f'"{"x" * 5000}"'
SENSELESS = ["-1", "-1.0", "1e39", "1e308", "inf", '"a\\u0000b"', *LONG]
SCHEMA = RunConfig.model_json_schema()
KEYS = [(".".join(map(str, path)), node) for path, node in schema_keys(SCHEMA)]


def test_every_number_and_text_of_the_schema_is_bounded():
    numbers = [(key, node) for key, node in KEYS if node.get("type") in ("integer", "number")]
    texts = [(key, node) for key, node in KEYS if node.get("type") == "string"]
    assert len(numbers) > 60
    assert len(texts) > 30
    assert not [k for k, n in numbers if not ({"maximum", "exclusiveMaximum"} & n.keys())]
    assert not [k for k, n in numbers if not ({"minimum", "exclusiveMinimum"} & n.keys())]
    assert not [k for k, n in texts if not ({"enum", "const", "maxLength"} & n.keys())]


@pytest.mark.parametrize("values", [3, pytest.param(len(SENSELESS), marks=pytest.mark.faults)])
def test_no_senseless_value_of_any_key_is_accepted(tmp_path, values):
    config, accepted, draw = write_tiny_config(tmp_path), set(), random.Random(7)
    for key in sorted({key for key, _ in KEYS if not key.endswith(".some")}):
        for value in draw.sample(SENSELESS, values):
            with contextlib.suppress(UserError):
                load_config(config, [f"{key}={value}"])
                accepted.add(key)
    assert accepted <= {"sample.prompt"}
