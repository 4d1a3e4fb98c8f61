"""Read a config: TOML, `--set` overrides, included dataset files; one frozen `RunConfig` or every mistake at once."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError

from trainer.config.data_tables import DatasetFile
from trainer.config.lines import KeyPath, key_lines, line_of
from trainer.config.messages import user_errors
from trainer.config.overrides import apply_override
from trainer.config.schema import RunConfig
from trainer.errors import UserError, UserErrors

Model = TypeVar("Model", bound=BaseModel)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The validated config at `path`, changed by `overrides` (`table.key=value`, the later one wins).

    Raises:
        UserError: the file cannot be read, is not TOML, or holds mistakes; several are reported together
            (`UserErrors`), each with file and line (or the override) that made it.
    """
    raw, lines = read_toml(path)
    raw = copy.deepcopy(raw)
    origins: dict[KeyPath, str] = {}
    for text in overrides:
        origins[apply_override(raw, text)] = f"--set {text}"

    def locate(key: KeyPath) -> str:
        # The override that set the key, or something in the table that the mistake is about; the later one wins.
        for path_set, origin in reversed(origins.items()):
            if key and (key[: len(path_set)] == path_set or path_set[: len(key)] == key):
                return origin
        line = line_of(lines, key)
        # A required key may be missing from a table that an override made.
        made = [origin for path_set, origin in origins.items() if len(key) > 1 and path_set[: len(key) - 1] == key[:-1]]
        return f"{path}:{line}" if line is not None else (made[0] if made else str(path))

    return _validate(RunConfig, raw, locate)


def load_dataset_file(path: str | Path) -> DatasetFile:
    """The validated dataset file that a source's `include` names.

    Raises:
        UserError: as `load_config`.
    """
    raw, lines = read_toml(path)

    def locate(key: KeyPath) -> str:
        line = line_of(lines, key)
        return f"{path}:{line}" if line is not None else str(path)

    return _validate(DatasetFile, raw, locate)


def read_toml(path: str | Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """The file's tables, and the line of each key.

    Raises:
        UserError: not readable, not UTF-8, not TOML.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}", "check the path") from None
    except ValueError as error:
        raise UserError(repr(str(path)), f"cannot be a path: {error}", "check the path") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError("encoding", "is not UTF-8", "save the file as UTF-8", where=f"{path}:{line}") from None
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)", str(error))
        line = int(found[1]) if found and found[1] else text.count("\n") + 1
        problem = str(error).partition(" (at ")[0]
        problem = problem[:1].lower() + problem[1:]
        raise UserError("TOML", problem, "correct the line, or the one before it", where=f"{path}:{line}") from None
    except RecursionError:
        raise UserError("TOML", "is nested too deeply", "take brackets away", where=str(path)) from None
    return raw, key_lines(text)


def to_toml(config: BaseModel) -> str:
    """The config with every default filled in, as TOML that `load_config` reads back as the same config."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _validate(model: type[Model], raw: dict[str, Any], locate: Any) -> Model:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        found = user_errors(error, model, locate)
    except RecursionError:
        raise UserError("TOML", "is nested too deeply", "take brackets away", where=locate(())) from None
    raise found[0] if len(found) == 1 else UserErrors(found)
