"""What a validation error says to a person: file, line, key, value and what to do."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trainer.config.base import FORMS, NUMBER_TAG, SCHEDULE_TAG
from trainer.config.lines import KeyPath
from trainer.errors import UserError

_TAGS = {NUMBER_TAG, SCHEDULE_TAG}
_COMPARISONS = {"greater_than_equal": ("ge", ">="), "greater_than": ("gt", ">"), "less_than": ("lt", "<")}
_COMPARISONS["less_than_equal"] = ("le", "<=")
_TYPES = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}


def user_errors(error: ValidationError, model: type[BaseModel], locate: Callable[[KeyPath], str]) -> list[UserError]:
    """One `UserError` per mistake, in the order of the file's tables.

    Args:
        error: what pydantic found.
        model: the model that was validated, for the names that it knows.
        locate: path of a key -> `file:line` (or `--set ...`).
    """
    found = []
    for details in error.errors(include_url=False):
        path = tuple(part for part in details["loc"] if part not in _TAGS)
        key = name_of(path) or "config"
        problem, fix = _describe(details, path, model)
        found.append(UserError(key, problem, fix, where=locate(path)))
    return found


def _describe(details: ErrorDetails, path: KeyPath, model: type[BaseModel]) -> tuple[str, str]:
    """(problem, fix) of one error."""
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return "unknown key", suggestion(str(path[-1]), known_keys(model, path[:-1]))
    if kind == "missing":
        return "is required and absent", _how_to_add(path, model)
    if kind == "literal_error":
        allowed = str(context["expected"]).replace("'", "").replace(" or ", ", ")
        return f"must be one of {allowed}; got {shown(value)}", ""
    if kind in _COMPARISONS:
        name, sign = _COMPARISONS[kind]
        return f"must be {sign} {context[name]}, got {shown(value)}", ""
    if kind == "list_type" and isinstance(value, Mapping) and _is_list_of_tables(path, model):
        return "is a single table, and must be a list of them", f"write [[{name_of(path)}]] with double brackets"
    if kind in _TYPES:
        broken = _broken_toml(value) if kind.startswith(("list", "dict", "model")) else ""
        if broken:
            return f"{shown(value)} is not valid TOML: {broken}", f"write {_TYPES[kind]} as TOML does, brackets closed"
        return f"must be {_TYPES[kind]}, got {shown(value)}", ""
    if kind == "finite_number":
        return f"must be a finite number, got {shown(value)}", ""
    if kind == "string_pattern_mismatch":
        return f"must be {FORMS.get(context['pattern'], 'of the form ' + context['pattern'])}; got {shown(value)}", ""
    if kind in {"too_short", "too_long", "string_too_short", "string_too_long"}:
        return f"{details['msg'][0].lower()}{details['msg'][1:]}, got {shown(value)}", ""
    message = details["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:], ""


def name_of(path: KeyPath) -> str:
    """The dotted key."""
    return ".".join(map(str, path))


def _how_to_add(path: KeyPath, model: type[BaseModel]) -> str:
    if not any(models_in(annotation) for annotation in _annotations(model, path)):
        return f"add {path[-1]} = ..."
    if not _is_list_of_tables(path, model):
        return f"add a table [{name_of(path)}]"
    return f'add a table [[{name_of(path)}]] with name = "..." and root = "..."'


def _is_list_of_tables(path: KeyPath, model: type[BaseModel]) -> bool:
    found = _annotations(model, path)
    return any(get_origin(annotation) is list and models_in(annotation) for annotation in found)


def _broken_toml(value: Any) -> str:
    """What is wrong with a table or list that `--set` could only take for a string; empty where it is none."""
    if not isinstance(value, str) or not value.startswith(("{", "[")):
        return ""
    try:
        tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError as error:
        problem = str(error).partition(" (at ")[0]
        return problem[:1].lower() + problem[1:]
    except RecursionError:
        return "nested too deeply"
    return ""


def shown(value: Any) -> str:
    """A value as a TOML reader knows it, cut to a readable length."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = '"' + value + '"'
    elif isinstance(value, Mapping):
        text = "a table"
    else:
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def suggestion(word: str, known: list[str]) -> str:
    """`did you mean X?`, or all that is known."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return f"known are {', '.join(sorted(known))}" if known else ""


def known_keys(model: type[BaseModel], path: KeyPath) -> list[str]:
    """The keys of the table at `path` below `model`; of a union of tables all of them."""
    models = [found for annotation in _annotations(model, path) for found in models_in(annotation)]
    return sorted({name for m in models for name in m.model_fields})


def _annotations(model: type[BaseModel], path: KeyPath) -> list[Any]:
    """How the key at `path` below `model` is annotated: once for each table of a union that has it."""
    found: list[Any] = [model]
    for part in path:
        if isinstance(part, int):
            continue
        models = [each for annotation in found for each in models_in(annotation)]
        found = [m.model_fields[part].annotation for m in models if part in m.model_fields]
    return found


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models that an annotation mentions, however deep."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for argument in get_args(annotation) for found in models_in(argument)]
