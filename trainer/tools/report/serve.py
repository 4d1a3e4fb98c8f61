"""A server of one page for this machine's browser: two fixed routes on the loopback."""

from __future__ import annotations

import os
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs

from trainer.errors import UserError
from trainer.tools.report.follow import Follower

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


class ReportServer(ThreadingHTTPServer):
    """Serves the page of a `Follower` on the loopback.

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

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{LOOPBACK}:{self.server_port}/"

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
        """Answer `/` and `/parts`, and nothing else."""
        path, _, query = self.path.partition("?")
        if not self._is_for_us():
            # Another site's name may lead here (DNS rebinding), and then its scripts could read the answer.
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "open the page by 127.0.0.1 or localhost\n")
        elif path == "/":
            self._send(HTTPStatus.OK, "text/html", self.server.follower.page(plotly=self.server.plotly))
        elif path == "/parts":
            since = parse_qs(query).get("since", [""])[0]
            self._send(HTTPStatus.OK, "application/json", self.server.follower.answer(since))
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "not found\n")

    def do_HEAD(self) -> None:
        """Answer as GET, without the body."""
        self.do_GET()

    def _is_for_us(self) -> bool:
        """Whether the one Host header names this machine; any port, which a tunnel may change."""
        hosts = self.headers.get_all("Host") or []
        return len(hosts) == 1 and hosts[0].partition(":")[0].lower() in _HOSTS

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode("utf-8", "backslashreplace")  # names of files may hold any bytes
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            **_HEADERS,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: there is one every two seconds."""


def yield_to_the_run() -> None:
    """Lower this process's priority for good, so that a run on the same machine goes first."""
    os.nice(_NICENESS)
