"""The program in processes that are forked from a server which has imported it: most of a small run's time is imports.

Where the start of a process itself matters, tests start a fresh one. All starts are counted: most of the suite's time goes
into them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM)
LAUNCHES = Counter[str]()
"""Test file -> launches in this process. What a shared fixture starts counts for the file that asked first."""


def count_launch() -> None:
    """Count one program, or one group of ranks."""
    if test := os.environ.get("PYTEST_CURRENT_TEST"):  # not the workers of pytest-xdist
        LAUNCHES[test.partition("::")[0]] += 1


def count_subprocess(event: str, arguments: tuple[Any, ...]) -> None:
    """Count what `subprocess` starts, as an audit hook."""
    names = (os.path.basename(sys.executable), "bash", "sh", "train", "torchrun")  # shells and torchrun start the rest
    if event == "subprocess.Popen" and os.path.basename(str(arguments[0])) in names:
        count_launch()


def fork_server() -> multiprocessing.context.ForkServerContext:
    """What starts forked processes; the first one starts the server."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # which torch reads when the server imports it
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "trainer.training.main", "trainer.cli.main"])
    return context


class Member:
    """A forked process that runs the program again and again, with the part of Popen's interface that is needed here."""

    def __init__(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = fork_server().Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.returncode: int | None = 0
        self.pid = self._process.pid or 0

    @property
    def is_alive(self) -> bool:
        """Whether it can take another run."""
        return self._process.is_alive()

    def begin(self, arguments: Sequence[object], environ: Mapping[str, str], **options: Any) -> None:
        """Run `train <arguments>`. For `options` see `_serve`."""
        self.returncode = None
        self._pipe.send((list(map(str, arguments)), dict(environ), options))

    def poll(self) -> int | None:
        """The exit code of its last run, None while it runs; the negated signal if one ended it."""
        if self.returncode is None:
            code = self._process.exitcode
            with contextlib.suppress(EOFError, ConnectionError):
                if self._pipe.poll():
                    code = self._pipe.recv()
            self.returncode = code
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        """Wait for the end of the run; raises subprocess.TimeoutExpired if it still runs."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("train", timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its server has waited for it since
                os.kill(self.pid, number)

    def end(self) -> None:
        """End it: it runs nothing, or nothing that is waited for."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


class Forked(Member):
    """A forked process of `train <arguments>`, which ends with it. For `options` see `_serve`."""

    def __init__(self, arguments: Sequence[object], environ: Mapping[str, str], **options: Any) -> None:
        if environ.get("RANK", "0") == "0":
            count_launch()
        super().__init__()
        self.begin(arguments, environ, is_last=True, **options)


def wait_as_torchrun(processes: Sequence[Member], timeout: float) -> int:
    """Wait for all ranks; the first one that fails ends the others.

    Returns 0, or the code of a failure. A rank also fails because another one has left it, and may be seen to end first: a
    mistake's 2 and a kill count before what was seen first. Raises subprocess.TimeoutExpired if some still run.
    """
    end, first = time.monotonic() + timeout, 0
    while any(process.poll() is None for process in processes):
        if not first and (first := next((code for p in processes if (code := p.poll())), 0)):
            for process in processes:
                process.send_signal(signal.SIGTERM)
        if time.monotonic() > end:
            for process in processes:
                process.send_signal(signal.SIGKILL)
            raise subprocess.TimeoutExpired("train", timeout)
        time.sleep(0.005)
    codes = [code for process in processes if (code := process.wait())]
    return next((code for code in (2, -signal.SIGKILL, first) if code in codes), max(codes, default=0))


def _serve(jobs: Connection) -> None:
    """In the fork: one run after another."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # tests that are killed leave no process behind (Linux)
    os.setpgid(0, 0)
    path, modules = list(sys.path), set(sys.modules)
    own = tuple(filter(None, path))
    while True:
        arguments, environ, options = jobs.recv()
        sys.path[:] = [*filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
        for name in set(sys.modules) - modules:  # a test's own, of which the next one may have another
            if not str(getattr(sys.modules[name], "__file__", None) or sys.prefix).startswith(own):
                del sys.modules[name]
        modules |= set(sys.modules)
        if options.pop("is_last", False):
            jobs.close()
            _run_program(arguments, environ, **options, is_last=True)
            return
        jobs.send(_run_program(arguments, environ, **options))


def _run_program(
    arguments: list[str],
    environ: Mapping[str, str],
    *,
    cwd: Path,
    out: Path,
    err: Path,
    code: str = "",
    is_last: bool = False,
) -> int:
    """Become what a fresh process of the program would be, and run it; gives its exit code.

    Args:
        environ: its environment. Only what Python reads before it runs anything has no effect.
        out, err: files that its output is appended to.
        code: Python that runs in the program's place.
        is_last: end as the program ends.
    """
    from trainer.cli.main import main

    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, place in ((1, out), (2, err)):
        target = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, descriptor)
        os.close(target)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    sys.argv = ["train", *arguments]
    ended: object = 1
    try:
        if code:
            exec(code, {"__name__": "__main__"})
        else:
            main()
        ended = 0
    except SystemExit as end:
        if is_last:
            raise
        ended = end.code or 0
    except BaseException:
        if is_last:
            raise
        traceback.print_exc()
    finally:
        if is_last:
            atexit._run_exitfuncs()  # the end of a fork leaves them out
    sys.stdout.flush()
    sys.stderr.flush()
    gc.collect()  # what a failed run's exception held, a process group among it
    return ended if isinstance(ended, int) else 1
