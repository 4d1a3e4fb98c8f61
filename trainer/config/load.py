"""Reading a config: TOML, `--set` overrides and included dataset files, validated; all mistakes are reported at once."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError

from trainer.config.data_tables import DatasetFile
from trainer.config.lines import KeyOrigins, KeyPath, key_lines
from trainer.config.messages import toml_problem, user_errors
from trainer.config.overrides import apply_override
from trainer.config.schema import RunConfig
from trainer.errors import UserError, UserErrors
from trainer.files import did_you_mean

Model = TypeVar("Model", bound=BaseModel)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The validated config at `path`, changed by `overrides` (`table.key=value`, the later one wins).

    Raises:
        UserError: the file cannot be read, is not TOML, or has mistakes; several are reported together (`UserErrors`),
            each with its file and line, or its override.
    """
    return _load(RunConfig, path, overrides)


def load_dataset_file(path: str | Path) -> DatasetFile:
    """The validated dataset file that a source's `include` names.

    Raises:
        UserError: as `load_config`.
    """
    return _load(DatasetFile, path)


def to_toml(config: BaseModel, *, with_defaults: bool = True) -> str:
    """The config as TOML from which `load_config` gives the same config.

    Args:
        with_defaults: every default filled in; otherwise the keys alone that were given.
    """
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True, exclude_unset=not with_defaults))


def _load(model: type[Model], path: str | Path, overrides: Sequence[str] = ()) -> Model:
    raw, origins = _read_keys(path, overrides)
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        found = user_errors(error, model, origins.where)
    except RecursionError:
        raise UserError("TOML", "is nested too deeply", "remove brackets", where=str(path)) from None
    raise found[0] if len(found) == 1 else UserErrors(found)


@contextmanager
def located(path: str | Path, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Adds the file and line, or the override, of their key to the mistakes that are found in the block."""
    raw, origins = _read_keys(path, overrides)  # now: the block may change the working directory
    try:
        yield
    except UserError as error:
        for each in error.errors if isinstance(error, UserErrors) else [error]:
            key = _path_of(each.key, raw)
            if not each.where and key[0] in RunConfig.model_fields:
                each.where = origins.where(key)
        raise


def _path_of(key: str, raw: Mapping[str, Any]) -> KeyPath:
    """The path that a mistake's key names: `table.key`, or `source NAME: key` of `[[data.source]]` or `[[eval.source]]`."""
    named = re.fullmatch(r"(eval )?source ([^:]+): (.*)", key)
    if named is None:
        return tuple(key.split("."))
    table = "eval" if named[1] else "data"
    names = [source.get("name") for source in raw.get(table, {}).get("source", [])]
    index = (names.index(named[2]),) if named[2] in names else ()
    return (table, "source", *index, *named[3].split("."))


def _read_keys(path: str | Path, overrides: Sequence[str]) -> tuple[dict[str, Any], KeyOrigins]:
    """The file with the overrides, and where each key was written."""
    text = _read(path)
    raw = _parse(text, path)
    overridden = {apply_override(raw, override): f"--set {override}" for override in overrides}
    return raw, KeyOrigins(str(path), key_lines(text), overridden)


def _read(path: str | Path) -> str:
    try:
        if Path(path).exists() and not Path(path).is_file():  # a pipe or a device may never end
            raise UserError(str(path), "is not a file", "name a TOML file")
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(
            str(path), f"cannot be read: {error.strerror}", did_you_mean(path) or "check the path"
        ) from None
    except ValueError as error:
        raise UserError(repr(str(path)), f"cannot be a path: {error}", "check the path") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError("encoding", "is not UTF-8", "save the file as UTF-8", where=f"{path}:{line}") from None


def _parse(text: str, path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r" \(at line (\d+), column \d+\)", str(error))  # otherwise: at the end of the document
        where = f"{path}:{found[1] if found else text.count(chr(10)) + 1}"
        raise UserError("TOML", toml_problem(error), "correct this line or the one before", where=where) from None
    except ValueError:  # more digits than Python reads
        raise UserError("TOML", "has an integer of thousands of digits", "write a number", where=str(path)) from None
    except RecursionError:
        raise UserError("TOML", "is nested too deeply", "remove brackets", where=str(path)) from None
