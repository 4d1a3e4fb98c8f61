"""The config's documentation, generated from its models: docs/config.md and the JSON Schema that editors use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainer.config.base import ScheduleTable
from trainer.config.data_tables import MixingOverride
from trainer.config.messages import models_in
from trainer.config.schema import RunConfig

_INTRODUCTION = """\
<!-- Generated from trainer/config by `make docs`. -->
# Configuration

A run is one TOML file; `train check --config x.toml` prints it with every default and what follows from it. Unknown keys,
values of another type (numbers are not made from strings, 2.9 is not an integer), NaN and infinity are refused, with the
file, the line, the key and what to do. `--set table.key=value` changes a value on the command line; an element of
`data.source` is named by its index or its name (`--set data.source.python.weight=2`). Paths of data and runs are relative
to the working directory, the path of an included dataset file to the file that includes it.

Editors complete and check the file with docs/config.schema.json: begin it with `#:schema ../docs/config.schema.json`.
"""


def render_config_markdown() -> str:
    """docs/config.md: every table and key with its type, default and meaning."""
    parts = [_INTRODUCTION]
    for title, model in _tables("", RunConfig):
        parts.append(f"\n## {title}\n\n{_summary(model)}\n")
        parts.append("\n| key | type | default | meaning |\n|---|---|---|---|\n")
        parts.extend(_row(name, field) for name, field in model.model_fields.items() if not _is_own_section(field))
    return "".join(parts)


def render_config_schema() -> str:
    """docs/config.schema.json: JSON Schema (2020-12) of a config."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}
    return json.dumps(schema, indent=1) + "\n"


def _tables(prefix: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Tables in the order of the file, each with its TOML header."""
    for name, field in model.model_fields.items():
        for table in models_in(field.annotation):
            is_array = "list[" in str(field.annotation)
            path = f"{prefix}{name}"
            if _is_own_section(field) or table is ScheduleTable:
                yield (f"`[[{path}]]`" if is_array else f"`[{path}]`"), table
                yield from _tables(f"{path}.", table)


def _summary(model: type[BaseModel]) -> str:
    text = (model.__doc__ or "").split("`: ", 1)[-1].strip()
    return text[:1].upper() + text[1:]


def _is_own_section(field: FieldInfo) -> bool:
    tables = models_in(field.annotation)
    return bool(tables) and tables[0] not in (ScheduleTable, MixingOverride)


def _row(name: str, field: FieldInfo) -> str:
    meaning = (field.description or "").replace("|", "\\|").replace("\n", " ")
    return f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {meaning} |\n"


def _type(annotation: Any) -> str:
    tables = models_in(annotation)
    if tables == [ScheduleTable]:
        return "number or schedule"
    if tables == [MixingOverride]:
        return "table"
    choices = next((get_args(each) for each in (annotation, *get_args(annotation)) if get_origin(each) is Literal), ())
    if choices:
        return " \\| ".join(choices)
    text = str(annotation)
    names = (
        ("dict[", "table"),
        ("list[str", "list of strings"),
        ("list[", "list of numbers"),
        ("bool", "true or false"),
    )
    for start, word in (*names, ("int", "integer"), ("float", "number"), ("str", "string")):
        if start in text:
            return word
    return text


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None:
        return "absent"
    if isinstance(value, BaseModel) or value == {}:
        return "`{}`"
    return f"`{json.dumps(value)}`"
