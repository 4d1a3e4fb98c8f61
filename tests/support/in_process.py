"""The program in the process of the tests: its own `main`, without the seconds that a new process takes to import torch."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainer.cli.main import main
from trainer.cli.parts import PARTS
from trainer.config.load import load_config
from trainer.ending import STOP_SIGNALS
from trainer.training import Parts
from trainer.training.main import train
from trainer.training.open_run import Launch
from trainer.training.plan import Plan, make_plan


@dataclass(frozen=True)
class Ended:
    """How the program ended, as a process would have."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def mistake(self) -> str:
        """The one line of a refusal."""
        assert (self.returncode, self.stderr.count("\n")) == (2, 1), self.stderr
        return self.stderr


def program(arguments: Sequence[object], capsys: pytest.CaptureFixture[str]) -> Ended:
    """Run `train <arguments>`; to train, there is `train_here`."""
    return Ended(exit_code(arguments), *capsys.readouterr())


def exit_code(arguments: Sequence[object]) -> int:
    """Run `train <arguments>`; what it prints goes where this process prints, which gets its signal handlers back."""
    before, sys.argv = sys.argv, ["train", *map(str, arguments)]
    code: object = None
    try:
        with own_signal_handlers():
            main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = before
        logging.disable(logging.NOTSET)  # which verbs that print JSON leave behind
        logging.getLogger("trainer").propagate = True
    assert isinstance(code, int), code
    return code


def train_here(config: Path, run_dir: Path, *sets: str, code: int = 0, parts: Parts = PARTS) -> None:
    """A run of one rank, with an exit code."""
    with own_signal_handlers():
        launch = Launch(config_path=config, run_dir=str(run_dir), parts=parts)
        assert train(load_config(config, list(sets)), launch) == code


def plan_of(config: Path, *sets: str, ranks: int = 1) -> Plan:
    return make_plan(load_config(config, sets), ranks, parts=PARTS)


@contextmanager
def own_signal_handlers() -> Iterator[None]:
    """This process gets its signal handlers back."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """`train <arguments>` here, in a working directory `cwd`. For all tests: this module is a plugin of pytest."""

    def call(*arguments: object, cwd: Path | None = None) -> Ended:
        with monkeypatch.context() as patch:
            if cwd is not None:
                patch.chdir(cwd)
                patch.syspath_prepend(cwd)
            return program(arguments, capsys)

    return call
