"""Reads the record of a run: from its directory, or from a metrics.jsonl alone.

Damaged and unknown lines are skipped and counted; a run without rows yet has a record, too. Without
numpy, which reading a run must not take.
"""

from __future__ import annotations

import math
import os
import tomllib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from trainer.errors import UserError
from trainer.files import is_count, parse_json, read_bytes, read_json, read_lines, within_depth
from trainer.metrics.payload_contract import (
    RESTART,
    SCHEMA_VERSION,
    PayloadError,
    Restart,
    parse_payload,
    strip_launcher_prefix,
)
from trainer.metrics.run_status import STATUS_NAME, judged, usable
from trainer.wording import counted, error_text

METRICS_NAME: Final = "metrics.jsonl"
Column = tuple["array[int]", "array[float]"]
Losses = dict[tuple[str, str, int], tuple[float, int]]
"""Source, stream and number of a document: the sum of its losses in nats, and its targets."""


class RowTable:
    """The rows of one mode (`train` or `eval`), by key.

    Rows of one step are merged, the later value counts: a loop may evaluate a step twice.
    """

    def __init__(self) -> None:
        self.steps = array("q")
        """The logged steps, ascending and unique."""
        self._columns: dict[str, Column] = {}

    def add(self, step: int, row: Mapping[str, float]) -> None:
        """Add one row."""
        place = bisect_left(self.steps, step)
        if place == len(self.steps) or self.steps[place] != step:
            self.steps.insert(place, step)
        for key, value in row.items():
            if key not in self._columns:
                self._columns[key] = array("q"), array("d")
            steps, values = self._columns[key]
            place = bisect_left(steps, step)
            if place < len(steps) and steps[place] == step:
                values[place] = value
            else:
                steps.insert(place, step)
                values.insert(place, value)

    def drop_after(self, step: int) -> None:
        """Forget the rows of later steps: a run was continued from here."""
        del self.steps[bisect_right(self.steps, step) :]
        for steps, values in self._columns.values():
            place = bisect_right(steps, step)
            del steps[place:], values[place:]

    @property
    def keys(self) -> list[str]:
        """The keys of all rows, in order of first appearance."""
        return [key for key, (steps, _) in self._columns.items() if steps]

    def column(self, key: str) -> Column:
        """(steps, values) of one key, steps ascending and unique; empty if no row has it.

        Values may be NaN or infinite. Both arrays are the table's own: treat them as read-only.
        """
        return self._columns.get(key, (array("q"), array("d")))


@dataclass
class RunRecord:
    """The files of one run, read back from its directory, or from a file of payloads."""

    path: Path
    train: RowTable = field(default_factory=RowTable)
    evals: RowTable = field(default_factory=RowTable)
    # In order; rows after a restart may repeat steps above its `global_step`. Those of events.jsonl
    # have details, and are there also if the run ended before its next row.
    restarts: list[Restart] = field(default_factory=list)
    steps_redone: int = 0  # of all restarts: the steps back from the last row before each
    events: list[Mapping[str, Any]] = field(default_factory=list)  # lines of events.jsonl
    status: Mapping[str, Any] = field(default_factory=dict)  # status.json, as `judged`
    config: Mapping[str, Any] = field(default_factory=dict)  # config.resolved.toml
    environment: Mapping[str, Any] = field(default_factory=dict)  # env.json
    notes: list[str] = field(default_factory=list)  # lines skipped, settings that a resume changed
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
        """The keys of training and evaluation rows; those of both begin with `eval_` for the latter."""
        taken = self.train.keys
        return list(dict.fromkeys([*taken, *("eval_" * (key in taken) + key for key in self.evals.keys)]))

    def column(self, key: str) -> Column:
        """(steps, values) of one of `keys`, as `RowTable.column`; empty if the run has none."""
        places = ((self.train, key), (self.evals, key), (self.evals, key.removeprefix("eval_")))
        columns = [table.column(name) for table, name in places]
        return next((column for column in columns if column[0]), columns[0])

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
        size: int | None = self.environment.get("world_size", self.status.get("world_size"))
        return size or None

    @cached_property
    def document_losses(self) -> tuple[dict[str, Losses], str]:
        """Of the last evaluation, by the key of their mean; and in words why there are none."""
        if not self.evals.steps:
            return {}, ""
        found: dict[str, Losses] = {}
        step = self.evals.steps[-1]
        directory = self.path if self.path.is_dir() else self.path.parent  # of a metrics.jsonl
        path = directory / "evaluations" / f"step_{step:08d}.jsonl"
        try:
            for each in map(parse_json, read_lines(path)):
                where, nats = (str(each["source"]), str(each["stream"]), int(each["document"])), float(each["nats"])
                if not is_count(each["tokens"]) or 1e60 < abs(nats) < math.inf:  # whose squares are no floats
                    raise ValueError(f"{nats} nats of {each['tokens']} tokens")
                found.setdefault(str(each["key"]), {})[where] = nats, each["tokens"]
        except (FileNotFoundError, NotADirectoryError):
            return {}, "no losses of documents are recorded"
        except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
            return {}, f"evaluations/{path.name} is damaged: {error_text(error)}"
        # With further parts of the objective, a logged loss is not the mean of these.
        parts = [self.setting(f"objective.{part}") for part in ("z_loss", "coord", "losses")]
        logged_parts = {key for key in self.evals.keys if key.startswith("eval_objective/")}
        parts.append(logged_parts - {"eval_objective/token_ce", "eval_objective/own"})
        is_mean = not any(parts) and self.setting("objective.token_ce", 1) == 1
        for key, losses in found.items():
            logged = dict(zip(*self.evals.column(key), strict=True)).get(step, math.nan)
            mean = sum(nats for nats, _ in losses.values()) / max(sum(tokens for _, tokens in losses.values()), 1)
            if is_mean and abs(mean - logged) > 1e-4 * abs(logged):
                return {}, f"evaluations/{path.name} does not give the logged {key}"
        return found, ""


def _read_rows(run: RunRecord, path: Path) -> str:
    """Add the rows and restarts of a file, and note how many lines could not be used. Returns what
    is wrong with the first."""
    num_skipped, first_error, last_step = 0, "", 0
    for number, line in enumerate(read_lines(path), start=1):
        if line.isspace():
            continue
        try:
            found = parse_payload(strip_launcher_prefix(line.decode("utf-8", "replace").strip()))
            if not is_count(found.global_step):  # columns hold steps in 64 bits
                raise PayloadError("global_step", "must be below 2^63")
        except PayloadError as error:
            if line[:1] == b"{" and line[-1:] != b"\n":  # the run was killed or is still writing
                continue
            num_skipped += 1
            first_error = first_error or f"line {number}: {error}"
            continue
        if found.restart is not None:
            run.restarts.append(found.restart)
            run.steps_redone += max(last_step - found.restart.global_step, 0)
            for rows in (run.train, run.evals):
                rows.drop_after(found.restart.global_step)
        last_step = found.global_step
        {"train": run.train, "eval": run.evals}[found.mode].add(found.global_step, found.values())
    if num_skipped:
        run.notes.append(f"skipped {counted(num_skipped, 'damaged line')}, the first at {first_error}")
    return first_error


def load_run(path: Path | str, *, is_one_of_many: bool = False) -> RunRecord:
    """Read a run directory, or a file of payloads; beside a metrics.jsonl, the others too.

    A run that has logged no row yet gives a record without rows.
    Raises UserError: there is no run, it cannot be read, or none of its lines is a payload. Of a
    directory that `is_one_of_many` this becomes a note: the others are looked at all the same.
    """
    path = metrics = Path(path)
    is_directory = os.path.isdir(path)  # also where it may not be entered
    if is_directory:
        metrics = path / METRICS_NAME
    run, first_error, problem, fix = RunRecord(path), "", "", ""
    try:
        first_error = _read_rows(run, metrics)
    except OSError as error:
        # Only a run that has logged nothing yet may do without; what a link leads to may be gone.
        if os.path.lexists(metrics) or not os.path.isfile(path / STATUS_NAME):
            problem = f"cannot be read: {error.strerror}"
            fix = f"pass a run directory (train ls DIR lists them) or a {METRICS_NAME}"
    if first_error and not run.keys:
        problem = f"has no row that this reader can use; {first_error}"
        fix = f"pass a metrics.jsonl of schema version {SCHEMA_VERSION}"
    if problem and not (is_one_of_many and is_directory):
        raise UserError(str(metrics), problem, fix)
    if problem:
        run.notes.insert(0, f"{METRICS_NAME} {problem}")
    if metrics.name == METRICS_NAME:  # another file is a captured stdout, beside which anything may lie
        _read_others(run, metrics.parent)
    reached = run.status.get("last_step")
    if reached and not run.steps:
        run.notes.append(f"{METRICS_NAME} is missing or has no training row, though the run reached step {reached:,}")
    for restart in run.restarts:
        if restart.details.get("changed"):
            changes = _changes(restart.details["changed"])
            run.notes.append(f"settings changed after step {restart.global_step:,}: {changes}")
    return run


def _changes(changed: Any) -> str:
    """`optimizer.lr: 0.01 -> 0.5`, of each setting; as it stands if somebody edited the event."""
    try:
        return ", ".join(f"{key}: {pair['before']} -> {pair['after']}" for key, pair in changed.items())
    except (AttributeError, KeyError, TypeError):
        return str(changed)


def _read_others(run: RunRecord, directory: Path) -> None:
    """Read the files beside metrics.jsonl; what cannot be read becomes a note."""

    def read(name: str, how: Callable[[Path], Any]) -> Any:
        """The content of a file; empty if it is absent, or cannot be read."""
        try:
            return how(directory / name)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            run.notes.append(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}")
        return {}

    lines = read("events.jsonl", lambda path: [*map(_json_or_none, read_lines(path))])
    run.events = [line for line in lines if isinstance(line, Mapping)]
    if len(run.events) < len(lines):
        run.notes.append(f"skipped {counted(len(lines) - len(run.events), 'line')} of events.jsonl")
    resumes = [each for each in run.events if each.get("event") == RESTART and is_count(each.get("global_step"))]
    run.restarts = [Restart(each["global_step"], each) for each in resumes] or run.restarts
    run.status = judged(usable(read(STATUS_NAME, read_json)), directory)
    run.environment = usable(read("env.json", read_json))
    run.config = read("config.resolved.toml", read_toml)


def _json_or_none(line: bytes) -> Any:
    try:
        return parse_json(line)
    except ValueError:
        return None


def read_toml(path: Path) -> dict[str, Any]:
    """The TOML in a file, within the bounds of `parse_json`.
    Raises OSError, ValueError: as `read_json`."""
    found: dict[str, Any] = within_depth(tomllib.loads, read_bytes(path).decode())
    return found
