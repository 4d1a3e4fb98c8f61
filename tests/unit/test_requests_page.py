"""docs/requests.md: every name in the second column of its tables exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from inspect import signature
from typing import Any

import pytest

from tests.support.runs import ROOT
from trainer.config.schema import RunConfig
from trainer.metrics.catalog.lookup import CATALOG, is_known
from trainer.metrics.sinks import display_key

PAGE = (ROOT / "docs" / "requests.md").read_text(encoding="utf-8")
ABSENT = "none"
UNCHANGED = "same"


def rows() -> list[tuple[str, list[str]]]:
    """(section, cells) of every row below a table's head."""
    section, found = "", []
    for line in PAGE.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("|") and not line.startswith(("|---", "| requested |")):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            found.append((section, cells))
    return found


ROWS = rows()


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def find(path: str) -> Any:
    """What a dotted import path leads to; fields of a dataclass count."""
    parts = path.split(".")
    value: Any = import_module(parts[0])
    for position, part in enumerate(parts[1:], start=1):
        if is_dataclass(value) and part in {field.name for field in fields(value)}:
            return fields(value)
        if not hasattr(value, part):
            import_module(".".join(parts[: position + 1]))
        value = getattr(value, part)
    return value


def config_keys() -> set[str]:
    """`[table] key` of every key, aliases included."""
    schema = RunConfig.model_json_schema()
    found = set()

    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict) and "$ref" in node:
            yield node["$ref"].rpartition("/")[2]
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            yield from references(child)

    def walk(prefix: str, table: dict[str, Any]) -> None:
        for key, node in table["properties"].items():
            found.add(f"[{prefix}] {key}")
            for reference in references(node):
                walk(f"{prefix}.{key}".lstrip("."), schema["$defs"][reference])

    walk("", schema)
    return found


CONFIG_KEYS = config_keys()
SOURCES = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "trainer").rglob("*.py")))
BACKEND_KEYS = {display_key(key) for row in CATALOG for key in (row.name, f"eval_{row.name}")}


def missing(name: str) -> str:
    """What is wrong with a name that the page says exists here; empty if nothing is."""
    if match := re.fullmatch(r"(trainer[\w.]*)(?:\((\w+)\))?", name):
        path, argument = match.groups()
        try:
            value = find(path)
        except (ImportError, AttributeError) as error:
            return str(error)
        return "" if argument is None or argument in signature(value).parameters else f"no argument {argument}"
    if name.startswith("["):
        return "" if name in CONFIG_KEYS else "not a config key"
    if name.startswith('"'):
        return "" if name in SOURCES else "not a text of the code"
    if is_known(name) or name in BACKEND_KEYS or (ROOT / name).exists():
        return ""
    return "neither an import path, a config key, a metric, a text of the code nor a file"


@pytest.mark.parametrize(
    ("section", "cells"), ROWS, ids=lambda value: value[0][:60] if isinstance(value, list) else None
)
def test_what_a_row_names_exists(section, cells):
    requested, here, why = cells
    assert requested, section
    if here == ABSENT:
        assert why, "a name that does not exist here needs a reason"
        return
    if here == UNCHANGED:
        here = requested
    names = named(here)
    assert names, here
    assert re.sub(r"`[^`]+`|[ ,]", "", here) == "", "the second column has names only"
    assert {name: missing(name) for name in names if missing(name)} == {}


@pytest.mark.parametrize(
    "name",
    [
        "trainer.metrics.NoSuchTracker",
        "trainer.metrics.MetricsTracker(num_gpus)",
        "trainer.no_such_module.name",
        "[train] max_steps",
        '"resume reshard kept %d readers"',
        "tests/unit/no_such_test.py",
    ],
)
def test_a_name_that_does_not_exist_is_found_out(name):
    assert missing(name)


WALKS = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## One run")[1].split("## Glossary")[0]
NAMES = re.findall(r"`((?:[a-z_]+\.)+[A-Za-z_]+)`", WALKS)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"run.position", "Ledger.metric_keys"}))
def test_what_the_walks_of_the_architecture_name_exists(name: str) -> None:
    for package in ("trainer", "trainer.data", "trainer.training.setup", "trainer.contracts"):
        try:
            find(f"{package}.{name}")
        except (ImportError, AttributeError):
            continue
        return
    pytest.fail(f"{name} does not exist")
