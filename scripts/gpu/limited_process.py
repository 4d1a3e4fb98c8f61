"""A process with a time limit, which is ended with everything that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GRACE_SEC = 3.0


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int | None  # its exit code; None if it ran past its limit and was killed
    stdout: str
    stderr: str
    seconds: float

    @property
    def last_error(self) -> str:
        """The last line of its error, or its exit code if it wrote none."""
        return (self.stderr.strip().splitlines() or [f"exit code {self.code}"])[-1].strip()


def run_process(command: Sequence[str], *, limit_sec: float, environ: Mapping[str, str], cwd: Path) -> Ended:
    """Run it to its end, or to its limit. Nothing of its session outlives it."""
    began = time.monotonic()
    code: int | None = None
    # Files and not pipes: a process that got away would keep a pipe open, and whoever reads it waiting.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environ, cwd=cwd, start_new_session=True
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_sec)
        finally:
            seconds = time.monotonic() - began
            process.terminate()  # a launcher ends its ranks, which have sessions of their own
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SEC)
            _end_session(process.pid)
            process.wait()
        out.seek(0)
        err.seek(0)
        return Ended(code, out.read(), err.read(), seconds)


def _end_session(session: int) -> None:
    """Kill its processes, whatever their groups are, and wait until they are gone with the memory of the device they held."""
    deadline = time.monotonic() + GRACE_SEC
    is_left = True
    while is_left and time.monotonic() < deadline:
        is_left = False
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                # The name, in parentheses, may hold anything; after it come state, parent, process group and session.
                fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    is_left = True
                    os.kill(int(entry.name), signal.SIGKILL)
        time.sleep(0.01 * is_left)
