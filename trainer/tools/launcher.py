"""`train --nproc N`: starts the ranks on this machine with torchrun's own elastic launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.cli.launch import EXIT_CODE, REPORT_FOLDER, RUN_DIR, say
from trainer.cli.terminal import uncollected
from trainer.ending import STOP_SIGNALS
from trainer.errors import UserError
from trainer.import_path import PROGRAM
from trainer.training.signals import PARENT
from trainer.wording import counted


def launch_ranks(nproc: int, *, uses_cuda: bool) -> int:
    """Run this command line on `nproc` ranks and return the exit code of the run.

    torchrun turns every failure into 1; this returns the first failed rank's own code. If a signal
    stopped the run, it is the ranks' own code, 0 with a checkpoint; or 128 + the signal if one was
    ended before it had one. A rank that exits with 0 without saying that its run is over has
    failed.

    Args:
        uses_cuda: a rank takes a CUDA device, if there are any.

    Raises:
        UserError: there are CUDA devices, but fewer than ranks.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        # torchrun never removes the directory of its logs, which stays empty here.
        # The loopback address: the name of this host need not resolve.
        own = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={nproc}", f"--log-dir={folder}"]
        # The signals that ask ranks to stop; nohup's ignored SIGHUP stays ignored.
        passed_on = [each.name for each in STOP_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        own += [f"--signals-to-handle={','.join(passed_on)}", str(PROGRAM), *_without_nproc(sys.argv[1:])]
        os.environ.update({REPORT_FOLDER: folder, PARENT: str(os.getpid())})
        try:
            return _launch(own, nproc, uses_cuda=uses_cuda)
        finally:
            del os.environ[REPORT_FOLDER], os.environ[PARENT]  # later runs of the same caller have no launcher


def _launch(own: list[str], nproc: int, *, uses_cuda: bool) -> int:
    """Start the ranks that torchrun's arguments `own` describe, and wait for their end; returns
    the exit code."""
    with uncollected():
        import torch
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    devices = torch.cuda.device_count() if uses_cuda else 0
    if 0 < devices < nproc:
        problem = f"{nproc} ranks, but this machine has {counted(devices, 'CUDA device')}"
        raise UserError("--nproc", problem, f'lower it to {devices}, or train on the CPU: --set train.device="cpu"')
    for part in ("agent.server.api", "multiprocessing.api"):  # what they log of an end, the ranks and we say ourselves
        logging.getLogger(f"torch.distributed.elastic.{part}").setLevel(logging.CRITICAL)
    try:
        launcher: Any = torchrun  # it has no types
        launcher.run(launcher.get_args_parser().parse_args(own))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        reason = f"rank {rank} {_ending(failure.exitcode)}"
        if not _leave_status(reason) and failure.exitcode < 0:  # killed: it could say nothing itself
            say(f"train: {reason}")
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as error:
        codes = [_reported(EXIT_CODE, rank) for rank in range(nproc)]
        if None in codes:
            _leave_status(f"ended by {error.sigval.name} before it could save")
        say(f"train: stopped by {error.sigval.name}")
        return max(int(code or 128 + error.sigval) for code in codes)
    silent = [str(rank) for rank in range(nproc) if _reported(EXIT_CODE, rank) is None]
    if silent:
        reason = f"rank {', '.join(silent)} exited with 0 before the run was over"
        if not _leave_status(reason):
            say(f"train: {reason}")
    return int(bool(silent))


def _reported(what: str, rank: int = 0) -> str | None:
    try:
        return os.fsdecode(Path(os.environ[REPORT_FOLDER], f"{what}_{rank}").read_bytes())
    except OSError:
        return None  # killed before it reported


def _leave_status(reason: str) -> bool:
    """Say in status.json why the run ended, if no rank was left to do it. False: one did, or
    the run had not begun."""
    from trainer.training.run_dir import RunDir

    path = _reported(RUN_DIR)
    if path is None:
        return False
    run_dir = RunDir(Path(path))
    status = run_dir.status()
    if status.get("state") not in ("running", "died"):
        return False
    say(f"train: {reason}")
    wandb_run_id, step = status.get("wandb_run_id"), status.get("last_step", 0)
    with suppress(OSError):
        run_dir.write_status("failed", reason=reason, step=step, wandb_run_id=wandb_run_id)
    return True


def _ending(exit_code: int) -> str:
    """How a failed rank ended."""
    if exit_code > 0:
        return f"exited with {exit_code}"
    hints = {
        signal.SIGBUS: "; a data file was cut while it was read, or its disk failed",
        signal.SIGKILL: ", perhaps for want of memory",
    }
    number = signal.Signals(-exit_code)
    return f"was ended by {number.name}{hints.get(number, '')}"


def _without_nproc(arguments: list[str]) -> list[str]:
    """The command line of the ranks. torchrun's parser rejects `--nproc` even there, as an
    ambiguous option of its own."""
    kept = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--nproc":
            next(rest, None)
        elif not argument.startswith("--nproc="):
            kept.append(argument)
    return kept
