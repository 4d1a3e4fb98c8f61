"""Turns pydantic's validation errors into messages with file, line, key, value and fix."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from datetime import date, time
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trainer.config.base import FORMS, TAGS
from trainer.config.hints import hint, keys_of
from trainer.config.lines import KeyPath
from trainer.errors import UserError
from trainer.wording import counted

_BOUNDS = {
    "greater_than_equal": ">= {ge}",
    "greater_than": "> {gt}",
    "less_than_equal": "<= {le}",
    "less_than": "< {lt}",
}
_TYPES = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    # Of the command line, whose values are texts.
    "int_parsing": "an integer",
    "int_parsing_size": "a smaller integer",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
}

_LENGTHS = {
    "too_short": ("at least", "min_length", "item"),
    "too_long": ("at most", "max_length", "item"),
    "string_too_short": ("at least", "min_length", "character"),
    "string_too_long": ("at most", "max_length", "character"),
}


def user_errors(error: ValidationError, model: type[BaseModel], locate: Callable[[KeyPath], str]) -> list[UserError]:
    """One `UserError` per mistake, in the order of the tables.

    Args:
        error: what pydantic found.
        model: the model that was validated, whose keys the fixes name.
        locate: path of a key -> `file:line` (or `--set ...`).
    """
    found = []
    for details in error.errors(include_url=False):
        path = tuple(part for part in details["loc"] if part not in TAGS)
        problem, fix = _describe(details, path, model)
        found.append(UserError(_dotted(path) or "config", problem, fix, where=locate(path)))
    return found


def _describe(details: ErrorDetails, path: KeyPath, model: type[BaseModel]) -> tuple[str, str]:
    """(problem, fix) of one error."""
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return "unknown key", hint(path, model)
    if kind == "missing":
        return "is required but missing", _how_to_add(path, model)
    if kind == "literal_error":
        allowed = str(context["expected"]).replace("'", "").replace(" or ", ", ")
        return f"must be one of {allowed}; got {shown(value)}", ""
    if kind in _BOUNDS:
        return f"must be {_BOUNDS[kind].format(**context)}, got {shown(value)}", ""
    if kind == "list_type" and isinstance(value, Mapping) and keys_of(model, path):
        return "is a single table, and must be a list of them", f"write [[{_dotted(path)}]] with double brackets"
    if kind in _TYPES:
        if _TYPES[kind] in ("a list", "a table") and (problem := _broken_toml(value)):
            return (
                f"{shown(value)} is not valid TOML: {problem}",
                f"write {_TYPES[kind]} as TOML does, brackets closed",
            )
        return f"must be {_TYPES[kind]}, got {shown(value)}", ""
    if kind == "string_pattern_mismatch":
        return f"must be {FORMS[context['pattern']]}; got {shown(value)}", ""
    if kind in _LENGTHS:
        bound, number, what = _LENGTHS[kind]
        return f"must have {bound} {counted(context[number], what)}, got {shown(value)}", ""
    if kind == "value_error":  # of a validator of ours, which says it in its own words
        return _lowered(details["msg"].removeprefix("Value error, ")), ""
    return f"cannot be {shown(value)}", ""


def option_problem(error: ValidationError) -> str:
    """What is wrong with the value of an option of the command line, in the words of a config's mistakes."""
    return _describe(error.errors(include_url=False)[0], (), BaseModel)[0]


def _how_to_add(path: KeyPath, model: type[BaseModel]) -> str:
    if path[-1] == "source":
        return f'add a table [[{_dotted(path)}]] with name = "..." and root = "..."'
    return f"add a table [{_dotted(path)}]" if keys_of(model, path) else f"add {path[-1]} = ..."


def _broken_toml(value: Any) -> str:
    """Why `--set` took what looks like a table or list for a string; empty if it does not look like one."""
    if not isinstance(value, str) or not value.startswith(("{", "[")):
        return ""
    try:
        tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError as error:
        return toml_problem(error)
    except ValueError:
        return "an integer of thousands of digits"
    except RecursionError:
        return "nested too deeply"
    return ""


def toml_problem(error: tomllib.TOMLDecodeError) -> str:
    """The parser's message without the position."""
    return _lowered(str(error).partition(" (at ")[0])


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def shown(value: Any) -> str:
    """A value in TOML's spelling, cut to a readable length."""
    if isinstance(value, list):
        text = f"[{', '.join(map(shown, value))}]"
        return text if len(text) <= 80 else text[:77] + "..."
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length():,} bits"
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
