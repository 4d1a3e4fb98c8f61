"""Verbs in the process of the tests. A plugin of pytest: a fixture for all parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.in_process import Ended, program


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ended]]:
    """`train <arguments>` here, in a working directory `cwd`."""

    def call(*arguments: object, cwd: Path | None = None) -> Ended:
        with monkeypatch.context() as patch:
            if cwd is not None:
                patch.chdir(cwd)
                patch.syspath_prepend(cwd)
            return program(arguments, capsys)

    yield call
    logging.disable(logging.NOTSET)
