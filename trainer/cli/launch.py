"""`train --config x.toml`: train in this process, or on ranks of this machine (`--nproc`)."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.cli.parts import PARTS
from trainer.cli.terminal import refuse, uncollected
from trainer.config.load import load_config, located
from trainer.config.rules import check_sharding
from trainer.config.schema import RunConfig
from trainer.ending import PARENT, STOP_SIGNALS, stop_with_parent
from trainer.errors import UserError
from trainer.files import write_file
from trainer.import_path import PROGRAM
from trainer.training.signals import StopRequest, say_stopping
from trainer.wording import counted

REPORT_FOLDER = "TRAINER_REPORT_FOLDER"
EXIT_CODE, RUN_DIR = "exit_code", "run_dir"
# Smaller blocks would be mapped anew, and the heap's end be returned, in each step.
MALLOC_OPTIONS = {"M_MMAP_THRESHOLD": (-3, 4 * 2**20), "M_TRIM_THRESHOLD": (-1, 64 * 2**20)}


def run_training(
    config_path: str,
    overrides: list[str],
    *,
    run_dir: str | None,
    nproc: int | None,
) -> int:
    """Train in this process, or in `nproc` new ones; returns the run's exit code.

    Raises:
        UserError, SystemExit: a mistake, which in the latter case has been printed.
    """
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed
        # A signal that ends the process (SIGBUS, SIGSEGV) then leaves a stack.
        faulthandler.enable()
    config = load_config(config_path, overrides)
    give_back_freed_blocks()
    is_rank = "RANK" in os.environ
    if not is_rank:
        _warn_of_runs_apart()
    if nproc is not None:
        with located(config_path, overrides):
            return _train_on_ranks(config, nproc)
    if not is_rank and "torch" not in sys.modules:  # whose import takes seconds
        _say("starting")
    if config.metrics.profile:
        # Read when torch is imported: its profiler would say when it starts.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # Before torch is imported, whose import a signal would otherwise kill.
    stop = StopRequest(say_stopping)
    stop.install()
    timeout = config.distributed.timeout_sec
    stop_with_parent(lambda: stop.request("the end of its launcher"), within_sec=timeout, end=stop.end)
    with uncollected():
        importlib.import_module("torch._dynamo")  # which the optimizer's first step imports
        from trainer.training.main import train
        from trainer.training.setup.open_run import Launch

    # The user's code, which is imported from here on, may change the working directory.
    launch = Launch(
        stop=stop,
        config_path=Path(config_path).absolute(),
        run_dir=run_dir and os.path.abspath(run_dir),
        parts=PARTS,
        on_run_dir=lambda path: report_to_launcher(RUN_DIR, str(path)),
    )
    try:
        with located(config_path, overrides):
            code = train(config, launch)
    except UserError as error:
        refuse(error.message, speaker=error.speaker, is_told_to_end=stop.requested)
    report_to_launcher(EXIT_CODE, str(code))
    return code


def _train_on_ranks(config: RunConfig, nproc: int) -> int:
    timeout = config.distributed.timeout_sec
    stop_with_parent(lambda: os.kill(os.getpid(), signal.SIGTERM), within_sec=timeout)
    if "RANK" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        problem = "this process is already a rank of torchrun"
        raise UserError("--nproc", problem, "use torchrun or --nproc, not both")
    check_sharding(config, nproc)
    if "torch" not in sys.modules:
        _say(f"starting {counted(nproc, 'rank')}")
    return launch_ranks(nproc, uses_cuda=config.train.device != "cpu")


def _warn_of_runs_apart() -> None:
    """Warn of several processes of srun, each of which trains its own run."""
    number = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if number != "1" and os.environ.get("SLURM_PROCID") == "0":
        _say(f"srun started {number} of this: each trains a run of its own; start torchrun with it (docs/cli.md)")


def give_back_freed_blocks(environ: Mapping[str, str] = os.environ) -> None:
    """Have glibc return freed blocks of 4 MiB and more, unless the user has set its threshold."""
    # Its own threshold rises to 32 MiB with the blocks that are freed, and smaller ones stay.
    if "MALLOC_MMAP_THRESHOLD_" in environ or "mmap_threshold" in environ.get("GLIBC_TUNABLES", ""):
        return
    with suppress(OSError, AttributeError):  # another C library
        for option in MALLOC_OPTIONS.values():
            ctypes.CDLL(None).mallopt(*option)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - a message for people


def report_to_launcher(what: str, value: str, environ: Mapping[str, str] = os.environ) -> None:
    """Pass the exit code, or the run's directory, to the launcher of `--nproc`, if any."""
    if REPORT_FOLDER in environ:
        path = Path(environ[REPORT_FOLDER], f"{what}_{environ.get('RANK')}")
        with suppress(OSError):  # the launcher is gone
            write_file(path, os.fsencode(value), sync=False)


def launch_ranks(nproc: int, *, uses_cuda: bool) -> int:
    """Run this command line on `nproc` ranks and return the exit code of the run.

    It is the first failed rank's own code (torchrun turns it into 1); after a stop signal the
    ranks' own, 0 with a checkpoint, or 128 + the signal if one was ended without. A rank that exits
    with 0 without saying that its run is over has failed.

    Raises:
        UserError: the run `uses_cuda`, and there are CUDA devices, but fewer than ranks.
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
    """Start ranks by torchrun's arguments `own`, and wait for their end; returns the exit code."""
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
            _say(f"train: {reason}")
        return max(failure.exitcode, 1)  # below 0: a signal ended it
    except SignalException as error:
        codes = [_reported(EXIT_CODE, rank) for rank in range(nproc)]
        if None in codes:
            _leave_status(f"ended by {error.sigval.name} before it could save")
        _say(f"train: stopped by {error.sigval.name}")
        return max(int(code or 128 + error.sigval) for code in codes)
    silent = [str(rank) for rank in range(nproc) if _reported(EXIT_CODE, rank) is None]
    if silent:
        reason = f"rank {', '.join(silent)} exited with 0 before the run was over"
        if not _leave_status(reason):
            _say(f"train: {reason}")
    return int(bool(silent))


def _reported(what: str, rank: int = 0) -> str | None:
    try:
        return os.fsdecode(Path(os.environ[REPORT_FOLDER], f"{what}_{rank}").read_bytes())
    except OSError:
        return None  # killed before it reported


def _leave_status(reason: str) -> bool:
    """Write into status.json why the run ended, and return True, if no rank was left to do it."""
    from trainer.training.run_dir import RunDir

    path = _reported(RUN_DIR)
    if path is None:
        return False
    run_dir = RunDir(Path(path))
    status = run_dir.status()
    if status.get("state") not in ("running", "died"):
        return False
    _say(f"train: {reason}")
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
    """The command line of the ranks."""
    # torchrun's parser rejects `--nproc` even there, as an ambiguous option of its own.
    kept = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--nproc":
            next(rest, None)
        elif not argument.startswith("--nproc="):
            kept.append(argument)
    return kept
