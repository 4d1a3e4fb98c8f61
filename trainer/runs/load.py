"""Reads a run back from its directory, or from a metrics.jsonl alone: tolerant of what happens to such files in life.

A line that is cut off, damaged or of another schema version is passed over, and `Run.notes` says how many were and why. What is
no record of a run at all is refused.
"""

from __future__ import annotations

import json
import math
import textwrap
import tomllib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic_core import from_json

from trainer.errors import UserError
from trainer.metrics.payload_contract import (
    MODES,
    SCHEMA_VERSION,
    Payload,
    PayloadError,
    Restart,
    parse_line,
    strip_launcher_prefix,
)
from trainer.runs.table import RowTable

METRICS_NAME: Final = "metrics.jsonl"
ENDED_STATES: Final = {"failed": "failed", "stopped": "was stopped", "done": "ended"}
"""States of status.json after which nothing more is written, in the past tense."""
SHOWN_REASON: Final = 300
_NUMBERS: Final = frozenset({int, float})
_PLAIN_KEYS: Final = ("schema_version", "mode", "global_step", "metrics")


@dataclass
class Run:
    """One run as it lies on disk.

    Attributes:
        path: what was read: a run directory, or a file of payloads.
        train, evals: the rows of the two modes.
        restarts: in the order of the file; rows after one may repeat steps above its `global_step`.
        steps_redone: for each restart, the steps between it and the last row before it, which were done again.
        events: the lines of events.jsonl, `restart` included.
        status, config, environment: status.json, config.resolved.toml and env.json as plain dicts; empty if absent.
        notes: what a reader of the numbers should know: lines that were passed over, rows that were replaced.
    """

    path: Path
    train: RowTable
    evals: RowTable
    restarts: list[Restart] = field(default_factory=list)
    steps_redone: list[int] = field(default_factory=list)
    events: list[Mapping[str, Any]] = field(default_factory=list)
    status: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For people: the directory's name, or the file's."""
        return self.path.absolute().name

    @property
    def steps(self) -> array[int]:
        """The logged training steps, ascending."""
        return self.train.steps

    @property
    def keys(self) -> list[str]:
        """All keys of training and evaluation rows."""
        return list(dict.fromkeys([*self.train.keys, *self.evals.keys]))

    def column(self, key: str) -> tuple[array[int], array[float]]:
        """(steps, values) of a key, ascending, each step once; both empty if the run has no such key.

        A key of evaluation rows is found like one of training rows. Values may be NaN or infinite.
        """
        steps, values = self.train.column(key)
        return (steps, values) if steps else self.evals.column(key)

    def setting(self, key: str, default: Any = None) -> Any:
        """A value of the resolved config by its dotted key, `default` if it is unknown."""
        found: Any = self.config
        for part in key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return default
            found = found[part]
        return found

    @property
    def world_size(self) -> int | None:
        """Ranks of the run; None if env.json does not say."""
        size = self.environment.get("world_size")
        return size if isinstance(size, int) and size >= 1 else None


class _Reader:
    """Takes the lines of one file and keeps count of those that it could not use."""

    def __init__(self) -> None:
        self.train = RowTable(rows_complete_each_other=False)
        self.evals = RowTable(rows_complete_each_other=True)
        self.restarts: list[Restart] = []
        self.steps_redone: list[int] = []
        self.num_lines = 0
        self.num_other_versions = 0
        self.num_bad = 0
        self.first_error: tuple[int, PayloadError] | None = None
        self.num_falls = 0
        self._last_step = 0

    def read(self, path: Path) -> bool:
        """Read a whole file; True if its last line was cut off."""
        with path.open("rb") as lines:
            line = b""
            for line in lines:
                if line.isspace():
                    continue
                self.num_lines += 1
                if not self._take_plain(line):
                    if not line.endswith(b"\n") and not _is_whole(line):
                        self.num_lines -= 1
                        return True
                    self._take_any(line)
        return False

    def _take_plain(self, line: bytes) -> bool:
        """The fast way for the usual line: a payload with nothing but finite numbers. False: look at it again."""
        try:
            row = from_json(line, allow_inf_nan=False, cache_strings="keys")
            metrics, step, mode = row["metrics"], row["global_step"], row["mode"]
            keys, values = tuple(metrics), metrics.values()
            is_plain = (
                tuple(row) == _PLAIN_KEYS
                and row["schema_version"] == SCHEMA_VERSION
                and type(row["schema_version"]) is type(step) is int
                and step >= 0
                and mode in MODES
                and bool(keys)
                and _NUMBERS.issuperset(map(type, values))
                and all(map(math.isfinite, values))
                # A key that stands twice is dropped by the parser; then there are more keys in the text.
                and line.count(b'":') == len(_PLAIN_KEYS) + len(keys)
                and "" not in metrics
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return False
        if is_plain:
            self._add(mode, step, keys, values)
        return is_plain

    def _take_any(self, line: bytes) -> None:
        try:
            found = parse_line(strip_launcher_prefix(line.decode("utf-8").strip()))
        except UnicodeDecodeError as error:
            self._refuse(PayloadError("line", f"not UTF-8 at byte {error.start}"))
            return
        except PayloadError as error:
            self._refuse(error)
            return
        if isinstance(found, Payload):
            row = found.values()
            self._add(found.mode, found.global_step, tuple(row), row.values())
        else:
            self.restarts.append(found)
            self.steps_redone.append(max(self._last_step - found.global_step, 0))
            self._last_step = found.global_step

    def _add(self, mode: str, step: int, keys: tuple[str, ...], values: Any) -> None:
        if step < self._last_step:
            self.num_falls += 1
        self._last_step = step
        table = self.train if mode == "train" else self.evals
        table.add(step, len(self.restarts), keys, values)

    def _refuse(self, error: PayloadError) -> None:
        if error.key == "schema_version":
            self.num_other_versions += 1
        else:
            self.num_bad += 1
        if self.first_error is None:
            self.first_error = self.num_lines, error

    def check_usable(self, path: Path) -> None:
        """Refuse a file without one row that can be used.

        Raises:
            UserError: naming the first line that is wrong.
        """
        if len(self.train) + len(self.evals):
            return
        if self.first_error is None:
            raise _no_rows(path)
        line, error = self.first_error
        problem = f"has no row that this reader can use; line {line}: {error.key}: {error.reason}"
        raise UserError(str(path), problem, f"give a metrics.jsonl of schema version {SCHEMA_VERSION}")

    def notes(self, *, is_cut: bool) -> list[str]:
        """What was passed over."""
        found = []
        if is_cut:
            found.append("the last line is cut off and was passed over: the run was killed, or is writing")
        if self.num_other_versions:
            found.append(
                f"{_count(self.num_other_versions, 'line')} of another schema version passed over "
                f"(this reader knows {SCHEMA_VERSION})"
            )
        if self.num_bad:
            assert self.first_error is not None
            line, error = self.first_error
            found.append(
                f"{_count(self.num_bad, 'damaged line')} passed over, the first at line {line}: {error.key}: {error.reason}"
            )
        replaced = self.train.num_replaced + self.evals.num_replaced
        if replaced:
            found.append(f"{_count(replaced, 'row')} replaced by later rows of the same step")
        if self.num_falls:
            found.append(
                f"global_step falls without a restart {_count(self.num_falls, 'time')}: several runs in one file?"
            )
        return found


def _no_rows(metrics: Path) -> UserError:
    """What to say of an empty record: that it ended before its first row, or that it may still get one."""
    status = _read_object(metrics.with_name("status.json"), []) if metrics.name == METRICS_NAME else {}
    state = status.get("state")
    if state not in ENDED_STATES:
        return UserError(str(metrics), "has no rows", "wait for the first logged step, or name another run")
    reason = textwrap.shorten(str(status.get("reason") or "no reason is known"), SHOWN_REASON, placeholder=" ...")
    problem = f"has no rows: the run {ENDED_STATES[state]} at step {status.get('last_step', '?')}: {reason}"
    return UserError(str(metrics), problem, "see logs/ beside it, or name another run")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _is_whole(line: bytes) -> bool:
    """Whether a line without an end is JSON all the same."""
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def load_run(path: Path | str) -> Run:
    """Read a run directory, or a file of payloads. A file called metrics.jsonl takes its directory's other files along.

    Raises:
        UserError: there is no such file, it cannot be read, or nothing in it is a payload.
    """
    path = Path(path)
    metrics = path / METRICS_NAME if path.is_dir() else path
    if not metrics.is_file():
        problem = f"has no {METRICS_NAME}" if path.is_dir() else "is neither a run directory nor a file"
        raise UserError(str(path), problem, "name a run's directory, or a metrics.jsonl")
    reader = _Reader()
    try:
        is_cut = reader.read(metrics)
    except OSError as error:
        raise UserError(str(metrics), f"cannot be read: {error.strerror}", "check the path") from None
    reader.check_usable(metrics)
    run = Run(path, reader.train, reader.evals, reader.restarts, reader.steps_redone, notes=reader.notes(is_cut=is_cut))
    if path.is_dir() or path.name == METRICS_NAME:
        _add_neighbours(run, metrics.parent)
    return run


def _add_neighbours(run: Run, directory: Path) -> None:
    run.status = _read_object(directory / "status.json", run.notes)
    run.environment = _read_object(directory / "env.json", run.notes)
    run.config = _read_toml(directory / "config.resolved.toml", run.notes)
    run.events = _read_events(directory / "events.jsonl", run.notes)


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(found, dict):
        notes.append(f"{path.name} holds no object")
        return {}
    return found


def _read_toml(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return {}


def _read_events(path: Path, notes: list[str]) -> list[Mapping[str, Any]]:
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return []
    found: list[Mapping[str, Any]] = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            found.append(event)
    if len(found) < len(lines):
        notes.append(f"{_count(len(lines) - len(found), 'line')} of {path.name} passed over")
    return found
