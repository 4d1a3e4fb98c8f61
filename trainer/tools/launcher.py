"""`train --nproc`: starts the ranks of a run on this machine, and waits for them."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time

from trainer.cli.main import IS_LAUNCHED
from trainer.cli.terminal import echo
from trainer.ending import STOP_SIGNALS
from trainer.errors import UserError
from trainer.import_path import PROGRAM
from trainer.wording import counted

POLL_SEC = 0.1
KILL_AFTER_SEC = 30.0  # of ranks that are still running after one has failed


def launch_ranks(nproc: int) -> int:
    """Run this command line on `nproc` ranks. Returns the first failure's code (a signal: 1), or 0.

    The signals that stop a run are passed on. Once a rank has failed, the others are asked to stop,
    and killed after `KILL_AFTER_SEC`. Raises UserError: under torchrun.
    """
    if "RANK" in os.environ:
        problem = "this process is already a rank of torchrun"
        raise UserError("--nproc", problem, "use torchrun or --nproc, not both")
    echo(f"starting {counted(nproc, 'rank')}", err=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // nproc)), **os.environ}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), IS_LAUNCHED: "1"}
    environ |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
    command = [sys.executable, "-u", str(PROGRAM), *sys.argv[1:]]
    ranks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: object) -> None:
        for rank in ranks:
            rank.send_signal(number)

    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # by nohup
            signal.signal(number, pass_on)
    for rank in range(nproc):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(subprocess.Popen(command, env={**environ, **own}))
    return _wait(ranks)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all ranks, and end them once one has failed. Returns as `launch_ranks`."""
    codes: list[int | None] = [None]
    code, kill_at = 0, math.inf
    while None in codes:
        time.sleep(POLL_SEC)
        codes = [rank.poll() for rank in ranks]
        failed = [each for each in codes if each]
        if failed and not code:
            first = min(failed)  # one that a signal ended has taken the others with it
            code, kill_at = max(first, 1), time.monotonic() + KILL_AFTER_SEC
            if first < 0:  # it could leave no message itself
                echo(f"train: rank {codes.index(first)} was ended by {signal.Signals(-first).name}", err=True)
            for rank in ranks:
                rank.terminate()
        if time.monotonic() > kill_at:
            for rank in ranks:
                rank.kill()
    return code
