"""Reads the record of a run: from its directory, or from a metrics.jsonl alone.

Damaged and unknown lines are skipped and counted; a file without a usable row is refused. Without
numpy, which reading a run must not take.
"""

from __future__ import annotations

import math
import textwrap
import tomllib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Final

from pydantic_core import from_json

from trainer.errors import UserError
from trainer.files import did_you_mean, parse_json, read_bytes, read_json, read_lines, within_bounds
from trainer.metrics.payload_contract import (
    MODES,
    RESTART,
    SCHEMA_VERSION,
    PayloadError,
    Restart,
    parse_line,
    strip_launcher_prefix,
)
from trainer.metrics.run_status import STATUS_NAME, judged, run_state, usable
from trainer.wording import counted

METRICS_NAME: Final = "metrics.jsonl"
ENDED_STATES: Final = {"failed": "failed", "stopped": "was stopped", "done": "ended", "died": "died"}
"""Final states of a run, in the past tense."""
SHOWN_REASON: Final = 300
MAX_STEP: Final = 2**63 - 1  # columns hold steps in 64 bits
_NUMBERS: Final = frozenset({int, float})
_PLAIN_KEYS: Final = ("schema_version", "mode", "global_step", "metrics")
Column = tuple["array[int]", "array[float]"]
_Row = tuple[int, int, tuple[str, ...], "array[float]"]  # step, number of restarts before it, keys, values


class RowTable:
    """The rows of one mode (`train` or `eval`).

    If a step was logged more than once, the latest row replaces the others. With `merge_same_step`,
    rows of one step without a restart between them are merged instead: a loop may log several
    evaluations of a step.
    """

    def __init__(self, *, merge_same_step: bool) -> None:
        self._merge = merge_same_step
        self._shapes: dict[tuple[str, ...], tuple[str, ...]] = {}  # each once
        self._rows: list[_Row] = []
        self._forget()

    def _forget(self) -> None:
        self._kept: list[_Row] | None = None
        self._blocks: list[tuple[dict[str, int], array[int], array[float]]] = []
        self._columns: dict[str, Column] = {}

    def add(self, step: int, attempt: int, keys: tuple[str, ...], values: Iterable[float]) -> None:
        """Add one row; `attempt` is the number of restarts before it."""
        self._rows.append((step, attempt, self._shapes.setdefault(keys, keys), array("d", values)))
        self._forget()

    def __len__(self) -> int:
        """Number of rows added, replaced ones included."""
        return len(self._rows)

    @property
    def keys(self) -> list[str]:
        """The keys of all rows, in order of first appearance."""
        return list(dict.fromkeys(chain.from_iterable(self._shapes)))

    @property
    def kept(self) -> list[_Row]:
        """The rows that no later row replaced, by step."""
        if self._kept is None:
            last, kept = {row[0]: row for row in self._rows}, []
            for row in self._rows:
                later = last[row[0]]
                if later is row or (self._merge and later[1] == row[1]):
                    kept.append(row)
            self._kept = sorted(kept, key=lambda row: row[0])
        return self._kept

    @property
    def num_replaced(self) -> int:
        """Number of rows that a later row of the same step replaced."""
        return len(self) - len(self.kept)

    @property
    def steps(self) -> array[int]:
        """The logged steps, ascending and unique."""
        return array("q", dict.fromkeys(row[0] for row in self.kept))

    def column(self, key: str) -> Column:
        """(steps, values) of one key, steps ascending and unique. Values may be NaN.

        Both arrays are shared with later calls: treat them as read-only.
        """
        if not self._blocks:  # rows with the same keys one after the other, their values in one array
            for keys, group in groupby(self.kept, key=lambda row: row[2]):
                rows = list(group)
                values = array("d", chain.from_iterable(row[3] for row in rows))
                places = {name: place for place, name in enumerate(keys)}
                self._blocks.append((places, array("q", (row[0] for row in rows)), values))
        if key not in self._columns:
            steps, values = array("q"), array("d")
            for places, at, values_of_rows in self._blocks:
                if key in places:
                    steps += at
                    values += values_of_rows[places[key] :: len(places)]
            if self._merge:  # of merged rows the last counts
                found = dict(zip(steps, values, strict=True))
                steps, values = array("q", found), array("d", found.values())
            self._columns[key] = steps, values
        return self._columns[key]


@dataclass(frozen=True)
class RunRecord:
    """The files of one run, read back from its directory, or from a file of payloads."""

    path: Path
    train: RowTable
    evals: RowTable
    # In order; rows after a restart may repeat steps above its `global_step`. Those of events.jsonl
    # have details, and are there also if the run ended before its next row.
    restarts: list[Restart] = field(default_factory=list)
    steps_redone: int = 0  # of all restarts: the steps back from the last row before each
    events: list[Mapping[str, Any]] = field(default_factory=list)  # lines of events.jsonl
    status: Mapping[str, Any] = field(default_factory=dict)  # status.json, as `judged`
    config: Mapping[str, Any] = field(default_factory=dict)  # config.resolved.toml
    environment: Mapping[str, Any] = field(default_factory=dict)  # env.json
    notes: list[str] = field(default_factory=list)  # lines that were skipped, rows replaced
    label: str = ""  # display name; empty: the name of the directory or file

    @property
    def name(self) -> str:
        return self.label or self.path.absolute().name

    @property
    def steps(self) -> array[int]:
        """The logged training steps, ascending."""
        return self.train.steps

    @property
    def keys(self) -> list[str]:
        """All keys of training and evaluation rows."""
        return list(dict.fromkeys([*self.train.keys, *self.evals.keys]))

    def column(self, key: str) -> tuple[array[int], array[float]]:
        """(steps, values) of a key, steps ascending and unique; empty if the run has none.

        Values may be NaN or infinite.
        """
        found = self.train.column(key)
        if not found[0]:
            found = self.evals.column(key)
        return found

    def setting(self, key: str, default: Any = None) -> Any:
        """A value of the resolved config by its dotted key."""
        found: Any = self.config
        for part in key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return default
            found = found[part]
        return found

    @property
    def world_size(self) -> int | None:
        """Number of ranks; None if neither env.json nor the status of another loop has it."""
        size = self.environment.get("world_size", self.status.get("world_size"))
        if isinstance(size, int) and size >= 1:
            return size
        return None


class _Reader:
    """Collects the rows and restarts of one file and counts the lines it could not use."""

    def __init__(self) -> None:
        self.train = RowTable(merge_same_step=False)
        self.evals = RowTable(merge_same_step=True)
        self.restarts: list[Restart] = []
        self.steps_redone = 0
        self._num_lines = 0
        self._num_skipped = 0
        self._num_decreases = 0
        self._is_truncated = False
        self._first_error: tuple[int, PayloadError] | None = None
        self._last_step = 0

    def read(self, path: Path) -> None:
        for line in read_lines(path):
            if line.isspace():
                continue
            self._num_lines += 1
            if self._take_plain(line):
                continue
            # Only the last line can lack its newline, or a piece of one beyond all measure.
            if not line.endswith(b"\n") and _json_or_none(line) is None:
                self._is_truncated = True
            else:
                self._take_any(line)

    def _take_plain(self, line: bytes) -> bool:
        """Fast path for payloads of finite numbers only; False: not such a line, or invalid."""
        try:
            row = from_json(line, allow_inf_nan=False, cache_strings="keys")
            metrics, step, mode = row["metrics"], row["global_step"], row["mode"]
            keys, values = tuple(metrics), metrics.values()
            is_plain = (
                tuple(row) == _PLAIN_KEYS
                and row["schema_version"] == SCHEMA_VERSION
                and type(row["schema_version"]) is type(step) is int
                and 0 <= step <= MAX_STEP
                and mode in MODES
                and bool(keys)
                and _NUMBERS.issuperset(map(type, values))
                and all(map(math.isfinite, values))
                # The parser drops duplicate keys silently: the text then has more of them.
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
        except UnicodeDecodeError:
            self._skip(PayloadError("line", "is not UTF-8"))
            return
        except PayloadError as error:
            self._skip(error)
            return
        if found.global_step > MAX_STEP:
            self._skip(PayloadError("global_step", f"must be at most {MAX_STEP}"))
            return
        if isinstance(found, Restart):
            self._restart(found)
            return
        if found.restart is not None:
            self._restart(found.restart)
        row = found.values()
        self._add(found.mode, found.global_step, tuple(row), row.values())

    def _restart(self, restart: Restart) -> None:
        self.restarts.append(restart)
        self.steps_redone += max(self._last_step - restart.global_step, 0)
        self._last_step = restart.global_step

    def _add(self, mode: str, step: int, keys: tuple[str, ...], values: Iterable[float]) -> None:
        # Only a restart goes back: otherwise several runs may have been appended to one file.
        if step < self._last_step:
            self._num_decreases += 1
        self._last_step = step
        tables = {"train": self.train, "eval": self.evals}
        tables[mode].add(step, len(self.restarts), keys, values)

    def _skip(self, error: PayloadError) -> None:
        self._num_skipped += 1
        self._first_error = self._first_error or (self._num_lines, error)

    def check_usable(self, path: Path, *, allow_empty: bool) -> None:
        """Refuse a file without a usable row. Raises UserError: naming the first invalid line."""
        may_be_empty = allow_empty and self._first_error is None
        if not len(self.train) and not len(self.evals) and not may_be_empty:
            raise _no_rows(path, self._first_error)

    def notes(self) -> list[str]:
        """Remarks on rows that were skipped or replaced."""
        found = []
        if self._is_truncated:
            why = "the run was killed or is still writing"
            found.append(f"skipped the last line, which is cut off: {why}")
        if self._first_error is not None:
            line, error = self._first_error
            number = counted(self._num_skipped, "damaged line")
            found.append(f"skipped {number}, the first at line {line}: {error.key}: {error.reason}")
        replaced = self.train.num_replaced + self.evals.num_replaced
        if replaced:
            found.append(f"{counted(replaced, 'row')} replaced by later rows of the same step")
        if self._num_decreases:
            note = f"global_step decreases without a restart {counted(self._num_decreases, 'time')}"
            found.append(f"{note}: does the file hold several runs?")
        return found


def _no_rows(metrics: Path, first_error: tuple[int, PayloadError] | None = None) -> UserError:
    """The error for an empty record: damaged lines, or a run that ended before its first row."""
    if first_error is not None:
        line, error = first_error
        problem = f"has no row that this reader can use; line {line}: {error.key}: {error.reason}"
        return UserError(str(metrics), problem, f"pass a metrics.jsonl of schema version {SCHEMA_VERSION}")
    status = run_state(metrics.parent) if metrics.name == METRICS_NAME else {}
    ended = ENDED_STATES.get(str(status.get("state")))
    if ended is None:
        return UserError(str(metrics), "has no rows", "wait for the first logged step, or name another run")
    if status.get("last_step") is not None:
        ended += f" at step {status['last_step']}"
    reason = textwrap.shorten(str(status.get("reason") or "unknown reason"), SHOWN_REASON, placeholder=" ...")
    return UserError(str(metrics), f"has no rows: the run {ended}: {reason}", "see logs/ in the run directory")


def load_run(path: Path | str, *, allow_empty: bool = False) -> RunRecord:
    """Read a run directory, or a file of payloads; beside a metrics.jsonl, the others too.
    `allow_empty`: a run that has logged no row yet gives a record without rows.
    Raises UserError: the file does not exist, cannot be read, or has no valid payload."""
    path = Path(path)
    metrics, has_begun, problem = path, path.is_file(), "is neither a run directory nor a file"
    if path.is_dir():
        metrics, problem = path / METRICS_NAME, f"has no {METRICS_NAME}"
        has_begun = metrics.exists()  # what is no plain file cannot be read, which is said below
    if has_begun or (allow_empty and path.is_dir()):
        problem = ""
    elif (path / STATUS_NAME).is_file():
        raise _no_rows(metrics)
    reader = _Reader()
    try:
        if has_begun:
            reader.read(metrics)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    if problem:
        where = str(metrics if has_begun else path)
        fix = did_you_mean(path) or f"pass a run directory or a {METRICS_NAME}"
        raise UserError(where, problem, fix)
    reader.check_usable(metrics, allow_empty=allow_empty)
    notes, others = reader.notes(), dict[str, Any]()
    if metrics.name == METRICS_NAME:  # another file is a captured stdout, beside which anything may lie
        others = _read_others(metrics.parent, notes)
    restarts = list(filter(None, map(_restart_of, others.get("events", [])))) or reader.restarts
    return RunRecord(path, reader.train, reader.evals, restarts, reader.steps_redone, notes=notes, **others)


def _restart_of(event: Mapping[str, Any]) -> Restart | None:
    step = event.get("global_step")
    if event.get("event") != RESTART or type(step) is not int or not 0 <= step <= MAX_STEP:
        return None
    known = ("event", "global_step", "time")
    return Restart(step, {name: value for name, value in event.items() if name not in known})


def _read_others(directory: Path, notes: list[str]) -> dict[str, Any]:
    """The fields of a `RunRecord` that come from the files beside metrics.jsonl."""
    lines = _read(directory / "events.jsonl", _read_json_lines, notes) or []
    status = judged(usable(_read(directory / STATUS_NAME, read_json, notes) or {}), directory)
    if status.get("state") in ("died", "unknown") and status.get("reason"):
        ended = ENDED_STATES.get(status["state"], "may go on")
        notes.append(f"the run {ended}: {status['reason']}")
    events = [event for event in lines if isinstance(event, dict)]
    if len(events) < len(lines):
        notes.append(f"skipped {counted(len(lines) - len(events), 'line')} of events.jsonl")
    return {
        "status": status,
        "environment": usable(_read(directory / "env.json", read_json, notes) or {}),
        "config": _read(directory / "config.resolved.toml", read_toml, notes) or {},
        "events": events,
    }


def read_toml(path: Path) -> dict[str, Any]:
    """The TOML in a file, within the bounds of `parse_json`.
    Raises OSError, ValueError: as `read_json`."""
    found: dict[str, Any] = within_bounds(tomllib.loads, read_bytes(path).decode())
    return found


def _read(path: Path, read: Callable[[Path], Any], notes: list[str]) -> Any:
    """The content of a file; None if it is absent, or cannot be read, which becomes a note."""
    try:
        return read(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}")
        return None


def _read_json_lines(path: Path) -> list[Any]:
    return list(map(_json_or_none, read_lines(path)))


def _json_or_none(line: bytes) -> Any:
    try:
        return parse_json(line)
    except ValueError:
        return None


def changes_of(restart: Restart) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The settings that a restart changed, each with its values `before` and `after`."""
    changed = restart.details.get("changed")
    if not isinstance(changed, Mapping):
        return
    for key, pair in changed.items():
        if isinstance(pair, Mapping) and {"before", "after"} <= pair.keys():
            yield key, pair


def settings_by_step(run: RunRecord) -> dict[str, Any]:
    """For each setting that a restart changed, its value for the rows that count.

    A mapping from the first step of each value to it, or the value itself where these rows have
    only one: a launch that trained no step changed nothing.
    """
    found: dict[str, dict[int, Any]] = {}
    reached = run.status.get("last_step")
    if not isinstance(reached, int):
        reached = max(run.steps, default=0)
    for restart in run.restarts:
        for values in found.values():
            # A branch that was given up.
            for step in [step for step in values if step > restart.global_step]:
                del values[step]
        for key, pair in changes_of(restart):
            found.setdefault(key, {1: pair["before"]})[restart.global_step + 1] = pair["after"]
    settings: dict[str, Any] = {}
    for key, values in sorted(found.items()):
        counting = {step: value for step, value in values.items() if step <= max(reached, 1)}
        settings[key] = counting
        if len(counting) == 1:
            settings[key] = counting[1]
    return settings
