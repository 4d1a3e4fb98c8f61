"""Every key of every table, given each type of value that TOML has: what is refused is refused in our own words."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from trainer.config.messages import user_errors
from trainer.config.schema import RunConfig

PYDANTIC = re.compile(
    r"Input|should|valid|dictionary|instance|unable|parse|Extra|Field|constraint|pydantic|Value error|datetime", re.I
)
VALUES = [
    *("", "x", "a b:c"),
    *(0, 1, -3, 10**30, 2.5, -2.5, float("inf"), float("nan"), True),
    *(
        [],
        [1],
        ["x"],
        [2.5, "x", []],
        [1, 2, 3],
        {},
        {"x": 1},
        {"x": "y"},
        {"-1": 1.0},
        {"schedule": 3},
        [{}],
        [{"x": 1}],
    ),
    *(datetime.date(2020, 1, 1), datetime.time(1, 2), datetime.datetime(2020, 1, 1)),
]
Path = tuple[str | int, ...]


def keys_below(schema: Mapping[str, Any], node: Mapping[str, Any], path: Path = ()) -> Iterator[Path]:
    """The path of every table, key, list element and entry of a free table."""
    if path:
        yield path
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    for option in (*node.get("anyOf", ()), *(each for each in node.get("oneOf", ()) if "required" not in each)):
        yield from keys_below(schema, option, path)
    for name, child in node.get("properties", {}).items():
        yield from keys_below(schema, child, (*path, name))
    if "items" in node:
        yield from keys_below(schema, node["items"], (*path, 0))
    if isinstance(node.get("additionalProperties"), Mapping):
        yield from keys_below(schema, node["additionalProperties"], (*path, "some"))


SCHEMA = RunConfig.model_json_schema()
PATHS = sorted(set(keys_below(SCHEMA, SCHEMA)), key=str)


def config_with(path: Path, value: Any) -> dict[str, Any]:
    """A small config in which the table of `path` holds nothing but `value`."""
    for part in reversed(path):
        value = [value] if part == 0 else {part: value}
    return {"train": {"steps": 3}, "data": {"source": [{"name": "one", "root": "corpus"}]}} | value


@pytest.mark.parametrize("table", sorted({path[0] for path in PATHS}))
def test_no_message_has_the_words_of_the_validator(table):
    messages = []
    for path in (path for path in PATHS if path[0] == table):
        for value in VALUES:
            try:
                RunConfig.model_validate(config_with(path, value))
            except ValidationError as error:
                messages += [each.message for each in user_errors(error, RunConfig, lambda _: "x.toml:1")]
    assert len(messages) > 20
    assert {("data", "source", 0, "weight", "points", "some"), ("optimizer", "betas", 0)} < set(PATHS)
    assert [text for text in messages if PYDANTIC.search(text)] == []
