"""The runs behind a live page, read again when their files have changed. Reads only, and takes no lock."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainer.errors import UserError
from trainer.metrics.run_status import run_state
from trainer.tools.diagnostics.diagnose import diagnose
from trainer.tools.report.names import with_distinct_names
from trainer.tools.report.page import render_page, render_parts
from trainer.tools.runs.load import METRICS_NAME, RunRecord, load_run
from trainer.tools.runs.table import RowTable

SHORTEST_PAUSE_SEC: Final = 1.0
BUSY_FACTOR: Final = 10.0
"""Reading pauses at least this many times as long as it took: a long run's record costs at most a tenth of a core."""
_OTHER_FILES: Final = ("events.jsonl", "env.json", "config.resolved.toml")


@dataclass
class _Followed:
    """One run: where it is, what was last read of it, whether it has yet to appear, and why nothing newer could be read."""

    path: Path
    run: RunRecord
    is_awaited: bool = False
    problem: str = ""

    def read(self) -> None:
        """Read it again; what cannot be read leaves the record as it was."""
        try:
            self.run, self.is_awaited, self.problem = load_run(self.path, allow_empty=True), False, ""
        except UserError as error:
            self.problem = error.message if self.path.exists() else "is gone"

    def line(self, name: str, signature: Any) -> str:
        """How the run stood when it was read, in words."""
        if self.is_awaited:
            return f"{name}: waiting for {self.path}, which does not exist yet"
        if self.problem:
            return f"{name}: {self.problem}; the page shows what was read before"
        state, reason = str(self.run.status.get("state", "")), self.run.status.get("reason")
        step = f" at step {self.run.steps[-1]:,}" if self.run.steps else " before its first row"
        if self.run.has_ended:
            return f"{name} has ended{step}: {state}{f', {reason}' if reason else ''}"
        if not self.run.steps:
            return f"{name}: no row yet"
        stamp = signature[0]
        when = time.strftime("%H:%M:%S", time.localtime(stamp[0] / 1e9)) if stamp else "?"
        return f"{name}: {state or 'state not known'}{step}, last row at {when}"


def _follow(path: Path) -> _Followed:
    """Of a run that is still to be made, an empty record; that a mistyped path waits too is the price.

    Raises:
        UserError: the directory that the run would be made in does not exist, or what is there cannot be read.
    """
    if path.exists() or not path.parent.is_dir():
        return _Followed(path, load_run(path, allow_empty=True))
    empty = RunRecord(path, RowTable(merge_same_step=False), RowTable(merge_same_step=True))
    return _Followed(path, empty, is_awaited=True)


def _signature(path: Path) -> Any:
    """Changes whenever the page would. status.json is rewritten without any news, so its words count, not its time."""
    directory = path.parent if path.is_file() else path
    metrics = path if path.is_file() else path / METRICS_NAME
    status = run_state(directory)
    stamps = [_stamp(file) for file in (metrics, *(directory / name for name in _OTHER_FILES))]
    return [*stamps, status.get("state"), status.get("reason"), path.exists()]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class Follower:
    """The page about some runs, as new as it can cheaply be. Its methods may be called from several threads.

    Nothing is read between two calls: a page that nobody has open costs nothing.

    Args:
        paths: run directories, with or without rows, or metrics.jsonl files; they need not exist yet.
        clock: seconds.

    Raises:
        UserError: neither a path nor the directory that would hold it exists.
    """

    def __init__(self, paths: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        start = clock()
        self._signatures = [_signature(Path(path)) for path in paths]
        self._runs = [_follow(Path(path)) for path in paths]
        self._first = time.time_ns()  # a page of an earlier server asks with versions of that one
        self._count = 0
        self._render(start)

    @property
    def names(self) -> list[str]:
        """The paths, and of which of them nothing exists yet."""
        waiting = " (waiting: it does not exist yet)"
        return [f"{followed.path}{waiting if followed.is_awaited else ''}" for followed in self._runs]

    def _refresh(self) -> None:
        """Read and render again if a file has changed and the pause is over."""
        start = self._clock()
        if start < self._due:
            return
        # Taken before reading: what is written meanwhile is read next time.
        signatures = [_signature(followed.path) for followed in self._runs]
        changed = [pair for pair in zip(self._runs, signatures, self._signatures, strict=True) if pair[1] != pair[2]]
        if changed:
            self._signatures = signatures
            for followed, _, _ in changed:
                followed.read()
            self._render(start)

    def _render(self, start: float) -> None:
        records = with_distinct_names([followed.run for followed in self._runs])
        self._diagnoses = [diagnose(run) for run in records]
        self._parts = render_parts(self._diagnoses)
        self._count += 1
        end = self._clock()
        self._due = end + max(SHORTEST_PAUSE_SEC, BUSY_FACTOR * (end - start))

    @property
    def _version(self) -> str:
        return f"{self._first}-{self._count}"

    def _line(self) -> str:
        rows = zip(self._runs, self._diagnoses, self._signatures, strict=True)
        return " · ".join(followed.line(diagnosis.run.name, signature) for followed, diagnosis, signature in rows)

    def page(self, *, plotly: str) -> str:
        """The whole page, with a script that asks for newer parts."""
        with self._lock:
            self._refresh()
            return render_page(
                self._diagnoses, plotly=plotly, parts=self._parts, version=self._version, line=self._line()
            )

    def answer(self, since: str) -> str:
        """JSON: how the runs stand and the version; the parts too, if that is not the version `since`."""
        with self._lock:
            self._refresh()
            head = {"version": self._version, "line": self._line()}
            if since == self._version:
                return json.dumps(head)
            return json.dumps({**head, "html": dict(self._parts.html)})[:-1] + f', "data": {self._parts.data}}}'
