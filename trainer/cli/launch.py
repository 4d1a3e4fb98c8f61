"""`train --config x.toml`: train in this process, or on ranks of this machine (`--nproc`)."""

from __future__ import annotations

import faulthandler
import importlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli.parts import PARTS
from trainer.cli.terminal import refuse, uncollected
from trainer.config.load import located
from trainer.ending import STOP_SIGNALS
from trainer.errors import UserError
from trainer.import_path import PROGRAM
from trainer.training.signals import StopRequest, say_stopping
from trainer.wording import counted

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig
    from trainer.training.open_run import Launch

IS_LAUNCHED = "TRAINER_IS_LAUNCHED"  # set for the ranks of `--nproc`
POLL_SEC = 0.1
KILL_AFTER_SEC = 30.0  # of ranks that go on after another one has failed


def starts_ranks() -> bool:
    """Whether `--nproc` starts ranks here: not in those ranks, which are given it too. Raises
    UserError: under torchrun."""
    if IS_LAUNCHED in os.environ:
        return False
    if "RANK" in os.environ:
        raise UserError("--nproc", "this process is already a rank of torchrun", "use torchrun or --nproc, not both")
    return True


@contextmanager
def prepared(
    config_path: str, overrides: list[str], run_dir: str | None
) -> Iterator[tuple[Callable[[RunConfig, Launch], int], Launch]]:
    """What trains in this process, and what it is given. A mistake inside is printed, and ends the process."""
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed
        # A signal that ends the process (SIGBUS, SIGSEGV) then leaves a stack.
        faulthandler.enable()
    if "RANK" not in os.environ and "torch" not in sys.modules:  # whose import takes seconds
        _say("starting")
    # Before torch is imported, whose import a signal would otherwise kill.
    stop = StopRequest(say_stopping)
    stop.install()
    with uncollected():
        importlib.import_module("torch._dynamo")  # which the optimizer's first step imports
        from trainer.training.main import train
        from trainer.training.open_run import Launch

    # The user's code, which is imported from here on, may change the working directory.
    launch = Launch(
        stop=stop, config_path=Path(config_path).absolute(), run_dir=run_dir and os.path.abspath(run_dir), parts=PARTS
    )
    try:
        with located(config_path, overrides):
            yield train, launch
    except UserError as error:
        refuse(error.message, speaker=error.speaker, is_told_to_end=stop.requested)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - a message for people


def launch_ranks(nproc: int) -> int:
    """Run this command line on `nproc` ranks; returns the exit code of the first that failed, or 0.

    The signals that stop a run are passed on. Once a rank has failed, the others are asked to stop,
    and killed after `KILL_AFTER_SEC`.
    """
    _say(f"starting {counted(nproc, 'rank')}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // nproc)), **os.environ}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), IS_LAUNCHED: "1"}
    environ |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
    command = [sys.executable, "-u", str(PROGRAM), *sys.argv[1:]]
    ranks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: object) -> None:
        for rank in ranks:
            rank.send_signal(number)

    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
            signal.signal(number, pass_on)
    for rank in range(nproc):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(subprocess.Popen(command, env={**environ, **own}))
    return _wait(ranks)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all ranks, and end them once one has failed. Returns its exit code, or 0."""
    running, kill_at = ranks, math.inf
    first: subprocess.Popen[bytes] | None = None
    while running:
        time.sleep(POLL_SEC)
        running = [rank for rank in running if rank.poll() is None]
        if first is None:
            first = next((rank for rank in ranks if rank.returncode), None)
            if first is not None:
                kill_at = time.monotonic() + KILL_AFTER_SEC
                for rank in running:
                    rank.terminate()
        if time.monotonic() > kill_at:
            for rank in running:
                rank.kill()
    if first is None:
        return 0
    if first.returncode < 0:  # it could leave no message itself
        _say(f"train: rank {ranks.index(first)} was ended by {signal.Signals(-first.returncode).name}")
    return max(first.returncode, 1)
