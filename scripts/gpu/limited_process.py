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

    code: int | None
    """Its exit code; None if it ran past its limit and was killed."""
    stdout: str
    stderr: str
    seconds: float

    @property
    def last_error(self) -> str:
        """The last line of its error, or its exit code if it wrote none."""
        lines = self.stderr.strip().splitlines()
        return lines[-1].strip() if lines else f"exit code {self.code}"


def run_process(command: Sequence[str], *, limit_sec: float, environ: Mapping[str, str], cwd: Path) -> Ended:
    """Run it to its end, or to its limit. Nothing that it started outlives it."""
    began = time.monotonic()
    # Files and not pipes: a process that got away would keep a pipe open, and whoever reads it waiting.
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=dict(environ),
            cwd=cwd,
            start_new_session=True,
        )
        code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_sec)
        finally:
            _end(process)
        return Ended(code, _text(out), _text(err), time.monotonic() - began)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it, if it still runs, and all that is left of its session."""
    if process.poll() is None:
        process.terminate()  # a launcher ends its ranks, which have sessions of their own
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SEC)
    deadline = time.monotonic() + GRACE_SEC
    # Until they are gone, and with them the memory of the device that they held.
    while (members := session_members(process.pid)) and time.monotonic() < deadline:
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.01)
    process.wait()


def session_members(session: int) -> list[int]:
    """Processes of a session that run, whatever their process groups are."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            # The name, in parentheses, may hold anything; after it come state, parent, process group and session.
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def _text(file: object) -> str:
    stream = file
    stream.seek(0)  # type: ignore[attr-defined]
    return str(stream.read().decode("utf-8", "replace"))  # type: ignore[attr-defined]
