"""The runs of one worker of the suite in one group of ranks: `run` and `train` as those of `tests.support.runs`, without a
launch for each; and verbs in the worker's own process, for whose runs that group stands in too."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Protocol

import pytest

from tests.support import runs
from tests.support.in_process import Ended, program
from tests.support.many_runs import Group
from trainer.import_path import PROGRAM
from trainer.tools.branching import run_branches
from trainer.training.signals import PARENT

_group = Group(4)
atexit.register(_group.__exit__)  # before multiprocessing waits for them
run = _group.run
train = partial(runs.train, by=run)


class _Finished:
    """In the place of `subprocess.Popen`: a run that a verb starts has ended when this is made."""

    def __init__(self, command: list[str], *, env: Mapping[str, str], stdout: IO[bytes], **_: Any) -> None:
        assert command[:2] == [sys.executable, str(PROGRAM)]
        nproc = int(command[-1]) if command[-2] == "--nproc" else None
        extra = {key: value for key, value in env.items() if key != PARENT}  # the group's processes have another one
        done = run(*command[2 : None if nproc is None else -2], nproc=nproc, extra=extra)
        stdout.write((done.stdout + done.stderr).encode())
        self.returncode = done.returncode

    def poll(self) -> int:
        """Its exit code."""
        return self.returncode


class Verb(Protocol):
    """`train <arguments>` in this process."""

    def __call__(self, *arguments: object, cwd: Path | None = None) -> Ended: ...


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Verb]:
    """Runs a verb here; the runs that it starts (`train replay`, `train bisect`) are taken by the group."""
    monkeypatch.setattr(run_branches, "subprocess", SimpleNamespace(Popen=_Finished, DEVNULL=None))

    def call(*arguments: object, cwd: Path | None = None) -> Ended:
        with monkeypatch.context() as patch:
            if cwd is not None:
                patch.chdir(cwd)
                patch.syspath_prepend(cwd)
            return program(arguments, capsys)

    yield call
    logging.disable(logging.NOTSET)
