"""The program in processes that are forked from a server which has imported it: most of a small run's time is imports.

Where the start of a process itself matters, tests start a fresh one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.launches import count_launch

PR_SET_PDEATHSIG = 1


def fork_server() -> multiprocessing.context.ForkServerContext:
    """What starts forked processes; the first one starts the server."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # which torch reads when the server imports it
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "trainer.training.main", "trainer.cli.main"])
    return context


class Forked:
    """A process of `train <arguments>`, with the part of Popen's interface that is needed here.

    Args:
        environ: its environment. Only what Python reads before it runs anything has no effect.
        out, err: files that its output is appended to.
        max_file_bytes: a limit on the size of a file.
        code: Python that runs in the program's place.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        environ: Mapping[str, str],
        *,
        cwd: Path,
        out: Path,
        err: Path,
        max_file_bytes: int | None = None,
        code: str = "",
    ) -> None:
        if environ.get("RANK", "0") == "0":
            count_launch()
        self._process = fork_server().Process(
            target=_run_program,
            args=(list(map(str, arguments)), dict(environ), cwd, out, err, max_file_bytes, code),
            daemon=True,
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; the negated signal if one ended it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """As `returncode`."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises subprocess.TimeoutExpired if it still runs."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("train", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self._process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):  # its server has waited for it since
                os.kill(self.pid, number)


def wait_as_torchrun(processes: Sequence[Forked], timeout: float) -> int:
    """Wait for all ranks; the first one that fails ends the others.

    Returns 0, or the code of a failure. A rank also fails because another one has left it, and may be seen to end first: a
    mistake's 2 and a kill count before what was seen first. Raises subprocess.TimeoutExpired if some still run.
    """
    end, first = time.monotonic() + timeout, 0
    while any(process.poll() is None for process in processes):
        if not first and (first := next((p.returncode for p in processes if p.returncode), 0)):
            for process in processes:
                process.send_signal(signal.SIGTERM)
        if time.monotonic() > end:
            for process in processes:
                process.send_signal(signal.SIGKILL)
            raise subprocess.TimeoutExpired("train", timeout)
        time.sleep(0.005)
    codes = [code for process in processes if (code := process.wait())]
    return next((code for code in (2, -signal.SIGKILL, first) if code in codes), max(codes, default=0))


def _run_program(
    arguments: list[str],
    environ: Mapping[str, str],
    cwd: Path,
    out: Path,
    err: Path,
    max_file_bytes: int | None,
    code: str,
) -> None:
    """In the fork: become what a fresh process of the program would be. KILL_AT, "module:function", ends rank 0 there."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # tests that are killed leave no process behind (Linux)
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, path in ((1, out), (2, err)):
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, descriptor)
        os.close(target)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    sys.path[:0] = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = ["train", *arguments]
    main = importlib.import_module("trainer.cli.main").main
    if environ.get("KILL_AT") and environ.get("RANK") == "0":
        module, _, function = environ["KILL_AT"].partition(":")
        setattr(importlib.import_module(module), function, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    if max_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    try:
        exec(code, {"__name__": "__main__"}) if code else main()
    finally:
        atexit._run_exitfuncs()  # the end of a fork leaves them out
