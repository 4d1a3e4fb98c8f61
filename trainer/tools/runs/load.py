"""Reads the record of a run: from its directory, or from a metrics.jsonl alone.

Damaged and unknown lines are skipped and counted; a file without a usable row is refused.
"""

from __future__ import annotations

import math
import textwrap
import tomllib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic_core import from_json

from trainer.errors import UserError
from trainer.files import did_you_mean, is_count, parse_json, read_bytes, read_json, read_lines, within_bounds
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
from trainer.tools.runs.table import RowTable
from trainer.wording import counted

METRICS_NAME: Final = "metrics.jsonl"
ENDED_STATES: Final = {"failed": "failed", "stopped": "was stopped", "done": "ended", "died": "died"}
"""Final states of a run, in the past tense."""
SHOWN_REASON: Final = 300
MAX_STEP: Final = 2**63 - 1  # columns hold steps in 64 bits
_NUMBERS: Final = frozenset({int, float})
_PLAIN_KEYS: Final = ("schema_version", "mode", "global_step", "metrics")


@dataclass(frozen=True)
class RunRecord:
    """The files of one run, read back from its directory, or from a file of payloads."""

    path: Path
    train: RowTable
    evals: RowTable
    # In order; rows after a restart may repeat steps above its `global_step`.
    restarts: list[Restart] = field(default_factory=list)
    # For each restart, the number of steps between it and the last row before it.
    steps_redone: list[int] = field(default_factory=list)
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
        self._restarts: list[tuple[Restart, int]] = []  # each with the step of the row before
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
        self._restarts.append((restart, self._last_step))
        self._last_step = restart.global_step

    def _add(self, mode: str, step: int, keys: tuple[str, ...], values: Iterable[float]) -> None:
        # Only a restart goes back: otherwise several runs may have been appended to one file.
        if step < self._last_step:
            self._num_decreases += 1
        self._last_step = step
        tables = {"train": self.train, "eval": self.evals}
        tables[mode].add(step, len(self._restarts), keys, values)

    def _skip(self, error: PayloadError) -> None:
        self._num_skipped += 1
        self._first_error = self._first_error or (self._num_lines, error)

    def restarts(self, events: Iterable[Mapping[str, Any]]) -> tuple[list[Restart], list[int]]:
        """All restarts, and for each the number of steps between it and the last row before it.

        Those of events.jsonl have details, and are there also if the run ended before its first
        row. A row follows the latest event of its step.
        """
        known = list(filter(None, map(_restart_of, events)))
        by_step = defaultdict[int, list[int]](list)
        for number, each in enumerate(known):
            by_step[each.global_step].append(number)
        ends, end = [], len(known)
        for found, _ in reversed(self._restarts):
            numbers = by_step[found.global_step]
            while numbers and numbers[-1] >= end:
                numbers.pop()
            if numbers:
                end = numbers[-1]
                ends.append(end + 1)
            else:  # events.jsonl does not have it
                ends.append(0)
        done, groups = 0, list[tuple[list[Restart], int]]()
        for (found, reached), end in zip(self._restarts, reversed(ends), strict=True):
            groups.append((known[done:end] or [found], reached))
            done = max(done, end)
        ordered, redone = list[Restart](), list[int]()
        for group, reached in [*groups, (known[done:], self._last_step)]:
            for each in group:
                ordered.append(each)
                redone.append(max(reached - each.global_step, 0))
                reached = each.global_step
        return ordered, redone

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
        fix = f"pass a metrics.jsonl of schema version {SCHEMA_VERSION}"
        return UserError(str(metrics), problem, fix)
    status = run_state(metrics.parent) if metrics.name == METRICS_NAME else {}
    ended = ENDED_STATES.get(str(status.get("state")))
    if ended is None:
        fix = "wait for the first logged step, or name another run"
        return UserError(str(metrics), "has no rows", fix)
    if status.get("last_step") is not None:
        ended += f" at step {status['last_step']}"
    reason = str(status.get("reason") or "unknown reason")
    problem = f"has no rows: the run {ended}: "
    problem += textwrap.shorten(reason, SHOWN_REASON, placeholder=" ...")
    return UserError(str(metrics), problem, "see logs/ in the run directory")


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
    restarts, redone = reader.restarts(others.get("events", []))
    return RunRecord(path, reader.train, reader.evals, restarts, redone, notes=notes, **others)


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


def mix_changes(run: RunRecord) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """The changes by `train mix`: the first step, the key, and its values `before` and `after`."""
    for event in run.events:
        with suppress(AttributeError, KeyError, TypeError, ValueError):  # a damaged line
            if event["event"] == "mix" and is_count(event["global_step"]):
                for key, pair in event["changed"].items():
                    yield event["global_step"], key, {name: pair[name] for name in ("before", "after")}


def settings_by_step(run: RunRecord) -> dict[str, Any]:
    """For each setting that a restart or `train mix` changed, its value for the rows that count.

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
        changed = restart.details.get("changed")
        if not isinstance(changed, Mapping):
            continue
        for key, pair in changed.items():
            if isinstance(pair, Mapping) and {"before", "after"} <= pair.keys():
                found.setdefault(key, {1: pair["before"]})[restart.global_step + 1] = pair["after"]
    for step, key, pair in mix_changes(run):  # which hold on every branch
        found.setdefault(key, {1: pair["before"]})[step] = pair["after"]
    settings: dict[str, Any] = {}
    for key, values in sorted(found.items()):
        counting = {step: value for step, value in values.items() if step <= max(reached, 1)}
        settings[key] = counting
        if len(counting) == 1:
            settings[key] = counting[1]
    return settings
