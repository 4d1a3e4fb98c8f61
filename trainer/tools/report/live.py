"""A page that follows its runs: made anew when their files have changed, and served to this machine's browser.

Reads only, takes no lock, and reads nothing while no page is open.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from trainer.errors import UserError
from trainer.metrics.run_status import run_state
from trainer.tools.diagnostics.diagnose import diagnose
from trainer.tools.report.page import render_page, render_parts
from trainer.tools.report.run_summary import with_distinct_names
from trainer.tools.runs.load import METRICS_NAME, RunRecord, load_run
from trainer.tools.runs.table import RowTable

SHORTEST_PAUSE_SEC: Final = 1.0
BUSY_FACTOR: Final = 10.0
"""Reading pauses at least this many times as long as it took: a long run's record costs at most a tenth of a core."""
LOOPBACK: Final = "127.0.0.1"
_HOSTS: Final = (LOOPBACK, "localhost")
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
_NICENESS: Final = 10


@dataclass
class _Followed:
    """One run: what was last read of it, and why nothing newer could be read."""

    path: Path
    run: RunRecord
    signature: Any = None
    problem: str = ""

    def is_changed(self) -> bool:
        """Whether its files have changed; then it was read again. What cannot be read leaves the record as it was."""
        signature = _signature(self.path)  # taken before reading: what is written meanwhile is read next time
        if signature == self.signature:
            return False
        self.signature = signature
        try:
            self.run, self.problem = load_run(self.path, allow_empty=True), ""
        except UserError as error:
            self.problem = f"{error.message if self.path.exists() else 'is gone'}; the page shows what was read before"
            if not self.run.keys and not self.path.exists():
                self.problem = f"waiting for {self.path}, which does not exist yet"
        return True

    def line(self, name: str) -> str:
        """How the run stood when it was read, in words."""
        if self.problem:
            return f"{name}: {self.problem}"
        state, reason = self.run.status.get("state", "state not known"), self.run.status.get("reason")
        step = f" at step {self.run.steps[-1]:,}" if self.run.steps else ", no row yet"
        if self.run.has_ended:
            return f"{name} has ended{step}: {state}{f', {reason}' if reason else ''}"
        return f"{name}: {state}{step}, read at {time.strftime('%H:%M:%S')}"


def _signature(path: Path) -> Any:
    """Changes whenever the page would. status.json is rewritten without any news, so its words count, not its time."""
    directory, metrics = (path.parent, path) if path.is_file() else (path, path / METRICS_NAME)
    status, stamps = run_state(directory), []
    for file in (metrics, *(directory / name for name in ("events.jsonl", "env.json", "config.resolved.toml"))):
        with suppress(OSError):
            found = file.stat()
            stamps.append((file, found.st_mtime_ns, found.st_size, found.st_ino))
    return stamps, status.get("state"), status.get("reason"), path.exists()


class Follower:
    """The page about some runs, as new as it can cheaply be. Its methods may be called from several threads.

    Args:
        paths: run directories, with or without rows, or metrics.jsonl files; they need not exist yet.
        clock: seconds.

    Raises:
        UserError: neither a path nor the directory that would hold it exists.
    """

    def __init__(self, paths: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._runs = []
        for path in map(Path, paths):
            empty = RunRecord(path, RowTable(merge_same_step=False), RowTable(merge_same_step=True))
            awaited = not path.exists() and path.parent.is_dir()
            self._runs.append(_Followed(path, empty if awaited else load_run(path, allow_empty=True)))
        self._first = time.time_ns()  # the pages of an earlier server had other versions
        self._count, self._due = 0, -float("inf")
        self._refresh()

    def _refresh(self) -> None:
        """Read again if a file has changed and the pause is over."""
        start = self._clock()
        if start < self._due or not [followed for followed in self._runs if followed.is_changed()]:
            return
        records = with_distinct_names([followed.run for followed in self._runs])
        self._names = [run.name for run in records]
        self._parts = render_parts([diagnose(run) for run in records])
        self._line = " · ".join(each.line(run.name) for each, run in zip(self._runs, records, strict=True))
        self._count += 1
        end = self._clock()
        self._due = end + max(SHORTEST_PAUSE_SEC, BUSY_FACTOR * (end - start))

    def version(self) -> str:
        """Of the page, as an ETag."""
        with self._lock:
            self._refresh()
            return f'"{self._first}-{self._count}"'

    def page(self, *, plotly: str) -> str:
        """The whole page, which reloads itself when the version is another."""
        version = self.version()
        with self._lock:
            return render_page(self._names, self._parts, plotly=plotly, version=version, line=self._line)


class ReportServer(ThreadingHTTPServer):
    """Serves the page of a `Follower` on the loopback, and nothing else.

    Args:
        port: 0 takes a free one.

    Raises:
        UserError: the port cannot be had.
    """

    daemon_threads = True

    def __init__(self, follower: Follower, *, plotly: str, port: int) -> None:
        self.follower = follower
        self.plotly = plotly
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise UserError("--port", f"{port}: {error.strerror}", "name another, or 0 for a free one") from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no error; of others the traceback goes to stderr, and the server goes on."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    server_version = "train-report"
    sys_version = ""
    timeout = 30  # s; for a client that never ends its request

    def do_GET(self) -> None:
        """Answer `/`."""
        hosts = self.headers.get_all("Host") or []
        # Another site's name may lead here (DNS rebinding), and then its scripts could read the answer.
        if len(hosts) != 1 or hosts[0].partition(":")[0].lower() not in _HOSTS:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "open the page by 127.0.0.1 or localhost\n")
        elif self.path.partition("?")[0] != "/":
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "not found\n")
        elif self.command == "HEAD":
            self._send(HTTPStatus.OK, "text/html", "", self.server.follower.version())
        else:
            self._send(HTTPStatus.OK, "text/html", self.server.follower.page(plotly=self.server.plotly))

    do_HEAD = do_GET  # what the page asks every two seconds

    def _send(self, status: HTTPStatus, kind: str, text: str, etag: str = "") -> None:
        body = text.encode("utf-8", "backslashreplace")  # names of files may hold any bytes
        self.send_response(status)
        own = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        own |= {"ETag": etag} if etag else {}
        for name, value in (own | _HEADERS).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if self.command == "GET" else b"")

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: there is one every two seconds."""


def serve(runs: Sequence[str], *, plotly: str, port: int, say: Callable[[str], None]) -> None:
    """Serve the page about some runs until Ctrl-C.

    Raises:
        UserError: see `Follower` and `ReportServer`.
    """
    with ReportServer(Follower(runs), plotly=plotly, port=port) as server:
        os.nice(_NICENESS)  # a run on the same machine goes first
        try:
            say(f"following {', '.join(runs)} at http://{LOOPBACK}:{server.server_port}/ (end with Ctrl-C)")
            server.serve_forever()
        except KeyboardInterrupt:
            say("no longer following")
