"""A real S3-compatible server on the loopback (`rclone serve s3` over a directory)."""

from __future__ import annotations

import ctypes
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.forks import PR_SET_PDEATHSIG
from tests.support.runs import free_port

BUCKET = "bucket"
KEY, SECRET = "AKIATEST", "not a secret"
START_SEC = 120


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

    def restart(self) -> None:
        """Have it see what was changed in its directory behind its back: it keeps listings."""
        self.kill()
        self.start()

    def environment(self) -> dict[str, str]:
        """What a client needs in its environment."""
        endpoint = f"http://127.0.0.1:{self.port}"
        return {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
