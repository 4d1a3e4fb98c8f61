"""Configs as files: TOML with `--set` overrides, validated, written and compared; messages."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, time
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from trainer.config.data_tables import FORMS, TAGS, DatasetFile, ScheduleTable, SourceTable
from trainer.config.schema import RunConfig
from trainer.errors import UserError, UserErrors, raise_found
from trainer.files import read_bytes
from trainer.wording import few, short_repr

Model = TypeVar("Model", bound=BaseModel)
Names = tuple[str, ...]
KeyPath = tuple[str | int, ...]  # with indices in arrays of tables: ("data", "source", 0, "name")
_HEADER = re.compile(r"\s*(\[\[?)([^\[\],]+)\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"\s*([\w.\"' -]+?)\s*=")
# Quotes in a comment, or in a string of the other kind, begin none.
_STRING = re.compile(r"""#.*|"{3}(?:\\[\s\S]|[^\\])*?"{3,5}|'{3}[\s\S]*?'{3,5}|"(?:\\.|[^"\\\n])*"|'[^'\n]*'""")
# These name a run, so they always differ.
_NAMES_OF_THE_RUN: Final = ("run.name", "run.dir", "checkpoint.resume")
_RECORDED: Final = ("python", "platform", "packages", "world_size", "cpu_count", "threads", "devices", "data")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The validated config at `path`, changed by `overrides` (`table.key=value`, the later wins),
    with the sources of included files in the place of those that include them.

    Raises UserError, UserErrors: one or all mistakes, each with its override, or its file and, but
    for combined weights and an `include`, its line.
    """
    config = _load(RunConfig, path, overrides)
    data = config.data.model_copy(update={"source": [*_leaves(config.data.source, Path(path))]})
    return config.model_copy(update={"data": data})


def _leaves(tables: Sequence[SourceTable], file: Path, *including: Path) -> Iterator[SourceTable]:
    """The sources of a `file`, and of those it includes; it is itself included by `including`."""
    including = (*including, file.resolve())
    for table in tables:
        if table.include is None:
            yield table
            continue
        included = file.parent / table.include
        _read(included, str(file))  # a link to itself is refused, and cannot be resolved
        if included.resolve() in including:
            problem = f"{table.include} includes itself"
            raise UserError(f"{table.name}.include", problem, "break the circle", where=str(file))
        inner = _load(DatasetFile, included).source
        yield from _leaves([_below(table, each, included) for each in inner], included, *including)


def _below(outer: SourceTable, table: SourceTable, file: Path) -> SourceTable:
    """A source in a `file` that `outer` includes: under its full name, and with both weights."""
    name, above, own = f"{outer.name}.{table.name}", outer.weight, table.weight
    if isinstance(above, ScheduleTable):
        if isinstance(own, ScheduleTable):
            problem = f"is a schedule, and so is the weight of {outer.name} above it"
            raise UserError(f"{name}.weight", problem, "make one of them a constant", where=str(file))
        above, own = own, above
    weight: float | ScheduleTable
    if isinstance(own, ScheduleTable):
        weight = own.model_copy(update={"scale": own.scale * above})
    else:
        weight = own * above
    changed = table.model_copy(update={"name": name, "weight": weight}).model_dump(exclude_unset=True)
    return _validated(SourceTable, changed, lambda _: f"{file}: {name}")


def to_toml(config: BaseModel, *, with_defaults: bool = True) -> str:
    """The config as TOML for `load_config`, with every default or just the keys that were given."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True, exclude_unset=not with_defaults))


@contextmanager
def located(path: str | Path, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Add the file and line, or the override, to mistakes that are found in the block."""
    source = _Source(path, overrides)  # now: the block may change the working directory
    try:
        yield
    except UserError as error:
        errors = error.errors if isinstance(error, UserErrors) else [error]
        for each in errors:
            key = source.path_of(each.key)
            if not each.where and key[0] in RunConfig.model_fields:
                each.where = source.where(key)
        raise


def _load(model: type[Model], path: str | Path, overrides: Sequence[str] = ()) -> Model:
    source = _Source(path, overrides)
    return _validated(model, source.raw, source.where)


def _validated(model: type[Model], raw: Mapping[str, Any], locate: Callable[[KeyPath], str]) -> Model:
    """The `model` that `raw` describes. Raises UserError, UserErrors: its mistakes, in their order.
    `locate`: path of a key -> `file:line` or `--set ...`."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        found = []
        for details in error.errors(include_url=False):
            path = tuple(part for part in details["loc"] if part not in TAGS)
            problem, fix = _describe(details, path, model)
            found.append(UserError(_dotted(path) or "config", problem, fix, where=locate(path)))
        raise_found(found)
        raise  # for type checkers: pydantic never raises without an error


class _Source:
    """A file with its overrides applied, and where each key was written."""

    def __init__(self, path: str | Path, overrides: Sequence[str]) -> None:
        self._path = str(path)
        self._text = _read(path)
        self.raw = _parse(self._text, path)
        self._overrides = [(apply_override(self.raw, each), f"--set {each}") for each in overrides]

    def where(self, key: KeyPath) -> str:
        """`file:line` or `--set ...`."""
        line = line_of(self._text, key)
        written = self._path if line is None else f"{self._path}:{line}"
        # The latest override of the key, of a table around it, or of something in it.
        for changed, origin in reversed(self._overrides):
            if key[: len(changed)] == changed:
                return origin
            if changed[: len(key)] == key:
                return f"{origin} ({written})"
        return written

    def path_of(self, key: str) -> KeyPath:
        """The path that a mistake's key names: `table.key`, or `[eval ]source NAME: key`."""
        named = re.fullmatch(r"(eval )?source ([^:]+): (.*)", key)
        if named is None:
            return tuple(key.split("."))
        table = "eval" if named[1] else "data"
        # One of an included file has the name of the source that includes it before its own.
        indices = _named(self.raw.get(table, {}).get("source", []))
        return (table, "source", indices.get(_longest(indices, named[2]), 0), *named[3].split("."))


def line_of(text: str, key: KeyPath) -> int | None:
    """The line, from 1, of `key` or of the nearest table around it; None: the text has neither."""
    # Without what may look like either: further lines of a string.
    text = _STRING.sub(lambda found: re.sub("\n.*", "\n", found[0]), text)
    counts: Counter[KeyPath] = Counter()
    table: KeyPath = ()
    most, line = 0, None
    for number, content in enumerate(text.split("\n"), start=1):
        header, found = _HEADER.match(content), _KEY.match(content)
        if header:
            names, table = _keys(header[2]), ()
            counts[names] += header[1] == "[["
            for end, name in enumerate(names, start=1):
                table = (*table, name)
                if counts[names[:end]]:  # an array of tables: the index of its newest element
                    table = (*table, counts[names[:end]] - 1)
            path = table
        elif found:
            path = table + _keys(found[1])
        else:
            continue
        common = min(len(path), len(key))
        if path[:common] == key[:common] and common > most:
            most, line = common, number
    return line


def _keys(dotted: str) -> KeyPath:
    return tuple(part.strip(" \t\"'") for part in dotted.split("."))


def _read(path: str | Path, included_by: str = "") -> str:
    try:
        data = read_bytes(Path(path))
    except (OSError, ValueError) as error:
        problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise UserError(str(path), problem, "check the path", where=included_by) from None
    try:
        return data.decode("utf-8-sig")  # some editors begin with a byte order mark
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError("encoding", "is not UTF-8", "save the file as UTF-8", where=f"{path}:{line}") from None


def _parse(text: str, path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        problem, _, position = str(error).partition(" (at ")
        found = re.match(r"line (\d+)", position)  # otherwise: at the end of the document
        where = f"{path}:{found[1] if found else text.count(chr(10)) + 1}"
        problem = problem[:1].lower() + problem[1:]
        raise UserError("TOML", problem, "correct this line or the one before", where=where) from None
    except (ValueError, RecursionError) as error:
        # More digits, or more brackets, than Python reads.
        raise UserError("TOML", f"cannot be read: {error}", "correct it", where=str(path)) from None


def apply_override(raw: dict[str, Any], text: str) -> KeyPath:
    """Change `raw` in place by `text` (`table.key=value`); the value is TOML, or else a string.

    An element of an array of tables is named by its index or its `name`: `data.source.0.weight=2`.
    Missing tables are created. Returns the path (indices). Raises UserError: it leads nowhere.
    """
    key, separator, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not separator or not all(parts):
        fix = "write --set data.mixing.batch_size=8"
        raise UserError(f"--set {text}", "is not of the form table.key=value", fix)
    node: Any = raw
    path: KeyPath = ()
    rest = ".".join(parts)
    while rest:
        first = rest.partition(".")[0]
        steps: dict[str, Any] = {first: first}
        if isinstance(node, list):
            steps = {str(at): at for at in range(len(node))} | _named(node)
        name = _longest(steps, rest)
        if not name or not isinstance(node, dict | list):
            held, fix = short_repr(node), "use a key of a table"
            if isinstance(node, list):
                names = [*_named(node)] or ["values"]
                held, fix = f"a list of {few(names)}", "use a number from 0, or a name"
            raise UserError(f"--set {text}", f"{_dotted(path)} has no {first!r}: it is {held}", fix)
        step, rest = steps[name], rest[len(name) + 1 :]
        path = (*path, step)
        if not rest:
            node[step] = parse_value(value.strip())
        elif isinstance(node, dict):
            node = node.setdefault(step, {})
        else:
            node = node[step]
    return path


def _named(elements: Sequence[Any]) -> dict[str, int]:
    """The indices of an array's tables, by their names."""
    tables = [(at, each) for at, each in enumerate(elements) if isinstance(each, dict)]
    return {str(table["name"]): at for at, table in tables if "name" in table}


def _longest(names: Iterable[str], dotted: str) -> str:
    """The longest of the names (with their dots) that `dotted` is or begins with; empty: none."""
    return max((name for name in names if f"{dotted}.".startswith(f"{name}.")), key=len, default="")


def parse_value(text: str) -> Any:
    """`text` as a TOML value, or unchanged if it is not one."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # not TOML, or an integer of thousands of digits
        return text
    # Further keys come from a newline in the text. No key takes a date.
    is_one = parsed.keys() == {"value"} and not isinstance(parsed["value"], date | time)
    return parsed["value"] if is_one else text


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as `table.key` -> value; those of a list by `name`, else by index."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            names, elements = [each["name"] for each in value if isinstance(each.get("name"), str)], value
            if len(set(names)) == len(value):
                elements = [{k: v for k, v in element.items() if k != "name"} for element in value]
            else:
                names = list(map(str, range(len(value))))
            flat[f"{prefix}{key}[].name"] = names  # shows a change of order
            value = dict(zip(names, elements, strict=True))
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def recorded_settings(config: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    """A launch's settings, and with `env.` its versions, ranks and devices; no names."""
    recorded = {"env": {key: value for key, value in environment.items() if key in _RECORDED}}
    flat = {**flatten(config), **flatten(recorded)}
    return {key: value for key, value in flat.items() if key not in _NAMES_OF_THE_RUN}


def _describe(details: ErrorDetails, path: KeyPath, model: type[BaseModel]) -> tuple[str, str]:
    """(problem, fix) of one error."""
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    names = tuple(part for part in path if isinstance(part, str))  # without indices
    if kind == "extra_forbidden":
        return "unknown key", hint(names, model)
    if kind == "missing":
        field = next(field for keys, field in _all_keys(model) if keys == names)
        header = f"[{_dotted(path)}]"
        if get_origin(field.annotation) is list:
            header = f"[{header}]"
        is_table = bool(_models_in(field.annotation))
        return "is required but missing", f"add a table {header}" if is_table else f"add {path[-1]}"
    if kind == "list_type" and isinstance(value, Mapping) and any(names == keys[:-1] for keys, _ in _all_keys(model)):
        return f"must be a list, got {shown(value)}", f"write [[{_dotted(path)}]]"
    if kind == "literal_error":  # in TOML's spelling, not Python's
        allowed = str(context["expected"]).replace("'", "").replace(" or ", ", ")
        allowed = allowed.replace("True", "true").replace("False", "false")
        return f"must be one of {allowed}; got {shown(value)}", ""
    if kind in ("dict_type", "model_type", "model_attributes_type"):
        return f"must be a table, got {shown(value)}", ""
    if kind == "string_pattern_mismatch":
        return f"must be {FORMS[context['pattern']]}; got {shown(value)}", ""
    if kind == "value_error":  # raised by a validator of ours
        return details["msg"].removeprefix("Value error, "), ""
    must, plain = re.subn(r"^\w+ should (.*?)( after validation.*)?$", r"must \1", details["msg"])
    return f"{must}, got {shown(value)}" if plain else f"cannot be {shown(value)}", ""


def shown(value: Any) -> str:
    """A value in JSON's spelling, which is mostly TOML's, cut to a readable length."""
    if isinstance(value, Mapping):
        return "a table"
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except ValueError:  # an integer of thousands of digits
        text = short_repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def hint(names: Names, model: type[BaseModel]) -> str:
    """The fix for an unknown key below `model`: the keys that may be meant (of this name in other
    tables, or the closest of this one), or all of this table."""
    keys = [each for each, _ in _all_keys(model)]
    known = sorted({each[-1] for each in keys if each[:-1] == names[:-1]})
    found = [".".join(each) for each in keys if each[-1] == names[-1]]
    found = found or difflib.get_close_matches(names[-1], known, n=1)
    if 0 < len(found) <= 2:
        return f"did you mean {' or '.join(found)}?"
    return f"known keys: {', '.join(known)}" if known else ""


def _all_keys(model: type[BaseModel], prefix: Names = ()) -> Iterator[tuple[Names, FieldInfo]]:
    """Every table and key below `model`: its path without indices, and its field."""
    for name, field in model.model_fields.items():
        yield (*prefix, name), field
        for table in _models_in(field.annotation):
            yield from _all_keys(table, (*prefix, name))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that an annotation mentions, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for argument in get_args(annotation) for found in _models_in(argument)]


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))
