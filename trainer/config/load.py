"""Reading a config: TOML, `--set` overrides and included dataset files, validated; all mistakes are reported at once."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError

from trainer.config.data_tables import DatasetFile
from trainer.config.lines import KeyPath, key_lines, line_of
from trainer.config.messages import toml_problem, user_errors
from trainer.config.overrides import apply_override
from trainer.config.schema import RunConfig
from trainer.errors import UserError, UserErrors

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


def to_toml(config: BaseModel) -> str:
    """The config with every default filled in, as TOML from which `load_config` gives the same config."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _load(model: type[Model], path: str | Path, overrides: Sequence[str] = ()) -> Model:
    text = _read(path)
    raw = _parse(text, path)
    lines = key_lines(text)
    origins = {apply_override(raw, override): f"--set {override}" for override in overrides}

    def locate(key: KeyPath) -> str:
        # The latest override of the key, of something in it, or of a table around it.
        for changed, origin in reversed(origins.items()):
            if key and (key[: len(changed)] == changed or changed[: len(key)] == key):
                return origin
        line = line_of(lines, key)
        if line is not None:
            return f"{path}:{line}"
        # A key may be missing from a table that an override created.
        siblings = (
            origin for changed, origin in origins.items() if len(key) > 1 and key[:-1] == changed[: len(key) - 1]
        )
        return next(siblings, str(path))

    try:
        return model.model_validate(raw)
    except ValidationError as error:
        found = user_errors(error, model, locate)
    except RecursionError:
        raise UserError("TOML", "is nested too deeply", "remove brackets", where=str(path)) from None
    raise found[0] if len(found) == 1 else UserErrors(found)


def _read(path: str | Path) -> str:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}", "check the path") from None
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
    except RecursionError:
        raise UserError("TOML", "is nested too deeply", "remove brackets", where=str(path)) from None
