"""Verbs in the process of the tests, for whose runs a group of ranks stands in. A plugin of pytest: a fixture for all parts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from tests.support.grouped import run
from tests.support.in_process import Ended, program
from trainer.ending import PARENT
from trainer.import_path import PROGRAM
from trainer.tools.branching import study


class _Finished:
    """In the place of `subprocess.Popen`: a run that a verb starts has ended when this is made."""

    def __init__(self, command: list[str], *, env: Mapping[str, str], stdout: IO[bytes], **_: Any) -> None:
        assert command[:2] == [sys.executable, str(PROGRAM)]
        nproc = int(command[-1]) if command[-2] == "--nproc" else None
        extra = {key: value for key, value in env.items() if key != PARENT}  # the group's processes have another one
        done = run(*command[2 : None if nproc is None else -2], nproc=nproc, extra=extra)
        stdout.write((done.stdout + done.stderr).encode())
        self.poll = lambda: done.returncode


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ended]]:
    """`train <arguments>` here, in a working directory `cwd`; the group takes the runs that it starts (cbs)."""
    monkeypatch.setattr(study, "subprocess", SimpleNamespace(Popen=_Finished, DEVNULL=None))

    def call(*arguments: object, cwd: Path | None = None) -> Ended:
        with monkeypatch.context() as patch:
            if cwd is not None:
                patch.chdir(cwd)
                patch.syspath_prepend(cwd)
            return program(arguments, capsys)

    yield call
    logging.disable(logging.NOTSET)
