"""Many runs of the program in one group of processes, one after another: what the first has imported, the others have."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.forks import PR_SET_PDEATHSIG, fork_server, wait_as_torchrun
from tests.support.launches import count_launch
from tests.support.runs import TIMEOUT_SEC, environment, free_port, rank_environment


class Group:
    """Processes that wait for runs; a run takes the first `nproc` of them. Leaving the context ends them.

    Each run has its own environment, working directory, command line, output, modules of a test's own, and port. What else a
    process keeps (random generators that nobody seeds, caches, threads left behind) stays from run to run: where that matters,
    and for runs that are to be killed, see `tests.support.runs.run`.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._members: list[_Member] = []

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            member.end()

    def run(
        self,
        *arguments: object,
        nproc: int | None = None,
        cwd: Path | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """As `tests.support.runs.run`. A member that has ended meanwhile is replaced before."""
        if not self._members or not all(member.is_alive for member in self._members):
            count_launch()
            alive = [member for member in self._members if member.is_alive]
            self._members = alive + [_Member() for _ in range(self._size - len(alive))]
        world_size, port = nproc or 1, free_port()
        line = list(map(str, arguments))
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            out.touch()
            err.touch()
            taking_part: list[Any] = self._members[:world_size]  # in the place of forks
            for rank, member in enumerate(taking_part):
                own = environment({**(rank_environment(rank, world_size, port) if nproc else {}), **(extra or {})})
                member.begin(line, own, cwd or Path.cwd(), out, err)
            status = wait_as_torchrun(taking_part, TIMEOUT_SEC)
            return subprocess.CompletedProcess(line, status, out.read_text(), err.read_text())


class _Member:
    """One process of a group, with the interface that `wait_as_torchrun` needs; its return code is that of its last run."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        self._process = fork_server().Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.returncode: int | None = 0

    @property
    def is_alive(self) -> bool:
        """Whether it can take another run."""
        return self._process.is_alive()

    def begin(self, *job: Any) -> None:
        """Have it run the program."""
        self.returncode = None
        self._pipe.send(job)

    def poll(self) -> int | None:
        """None while it runs."""
        if self.returncode is None:
            is_over = not self._process.is_alive()
            with contextlib.suppress(EOFError, ConnectionError):
                if self._pipe.poll():
                    self.returncode = self._pipe.recv()
            if is_over and self.returncode is None:
                self.returncode = self._process.exitcode
        return self.returncode

    def wait(self) -> int:
        """Wait for the end of the run."""
        while (code := self.poll()) is None:
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid or 0, number)

    def end(self) -> None:
        """End it: it runs nothing, or nothing that is waited for."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(jobs: Connection) -> None:
    """In the fork: one run after another."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgid(0, 0)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    path, modules = list(sys.path), set(sys.modules)
    while True:
        arguments, environ, cwd, out, err = jobs.recv()
        sys.path[:] = [*filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
        for name in set(sys.modules) - modules:  # a test's own, of which the next one may have another
            if not str(getattr(sys.modules[name], "__file__", None) or sys.prefix).startswith(
                tuple(filter(None, path))
            ):
                del sys.modules[name]
        modules |= set(sys.modules)
        jobs.send(_run_program(arguments, environ, cwd, out, err))


def _run_program(arguments: list[str], environ: Mapping[str, str], cwd: Path, out: Path, err: Path) -> int:
    """The program, in a process that goes on; returns its exit code."""
    from trainer.cli.main import run

    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    for stream, path in ((sys.stdout, out), (sys.stderr, err)):
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, stream.fileno())
        os.close(target)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    sys.argv = ["train", *arguments]
    code: object = 1
    try:
        run()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001 - what would end the process
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    gc.collect()  # what a failed run's exception held, a process group among it
    return code if isinstance(code, int) else 1
