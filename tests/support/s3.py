"""A real S3-compatible server on the loopback (`rclone serve s3` over a directory), and a proxy in front of it that fails on
purpose."""

from __future__ import annotations

import ctypes
import http.client
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.forks import PR_SET_PDEATHSIG
from tests.support.runs import free_port

BUCKET = "bucket"
KEY, SECRET = "AKIATEST", "not a secret"
START_SEC = 120
OF_THE_CONNECTION = ("content-length", "connection", "transfer-encoding")


def rclone() -> str:
    """The path of rclone, beside this Python or on the PATH; skips the test without it."""
    found = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")
    if found is None:
        pytest.skip("rclone is not installed (the extra dev has it)")
    return found


class S3Server:
    """The server; what it stores is in `root`, so that it is there again after a kill and a start."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / BUCKET).mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def bucket(self) -> Path:
        """The directory of the bucket."""
        return self.root / BUCKET

    def start(self) -> None:
        """Start the process, and wait until it answers."""
        line = [rclone(), "serve", "s3", str(self.root), "--addr", f"127.0.0.1:{self.port}"]
        line += ["--auth-key", f"{KEY},{SECRET}", "--config", "", "--log-level", "ERROR"]
        line += ["--no-cleanup"]  # with it, deleting the last file of a directory may be answered with an error
        log = (self.root.parent / "rclone.log").open("ab")
        self._process = subprocess.Popen(line, stdout=log, stderr=log, preexec_fn=_die_with_parent)
        log.close()
        end = time.monotonic() + START_SEC
        while time.monotonic() < end:
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert self._process.poll() is None, (self.root.parent / "rclone.log").read_text()
            time.sleep(0.02)
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        """End the process at once, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        assert self._process is not None
        self._process.send_signal(number)

    def restart(self) -> None:
        """Have it see what was changed in its directory behind its back: it keeps listings."""
        self.kill()
        self.start()

    def environment(self, port: int | None = None) -> dict[str, str]:
        """What a client needs in its environment. `port`: of a proxy in front of the server."""
        endpoint = f"http://127.0.0.1:{port or self.port}"
        return {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}


Fault = Callable[[str, str], float | None]
"""(method, path) -> seconds to wait before the request is passed on, or None."""


class FaultyProxy:
    """Passes requests on to a server, but for what `fault` says; `requests` has the method and path of each."""

    def __init__(self, upstream: int) -> None:
        self.fault: Fault = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                proxy.requests.append((self.command, self.path))
                time.sleep(proxy.fault(self.command, self.path) or 0.0)
                connection = http.client.HTTPConnection("127.0.0.1", upstream, timeout=30)
                try:
                    connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                    for name, value in self.headers.items():
                        connection.putheader(name, value)
                    connection.endheaders(body)
                    answer = connection.getresponse()
                    content = answer.read()
                except OSError:
                    return self._answer(503, [], b"")
                finally:
                    connection.close()
                headers = [(n, v) for n, v in answer.getheaders() if n.lower() not in OF_THE_CONNECTION]
                if self.command == "HEAD":
                    headers.append(("Content-Length", answer.getheader("Content-Length") or "0"))
                return self._answer(answer.status, headers, content)

            def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
                self.send_response_only(status)
                for name, value in headers:
                    self.send_header(name, value)
                if self.command != "HEAD":
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = _QuietServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is no news."""


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
