"""`train --config x.toml`: train in this process, or on ranks of this machine (`--nproc`)."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from trainer.cli.parts import PARTS, TOOLS
from trainer.cli.terminal import refuse, uncollected
from trainer.config.load import load_config, located
from trainer.config.rules import check_sharding
from trainer.config.schema import RunConfig
from trainer.errors import UserError
from trainer.files import write_file
from trainer.training.signals import StopRequest, say_stopping, stop_with_parent
from trainer.wording import counted

REPORT_FOLDER = "TRAINER_REPORT_FOLDER"
EXIT_CODE, RUN_DIR = "exit_code", "run_dir"
# Launchers whose processes are no ranks of torchrun: the variables with their number, and the
# number of this one.
OTHER_LAUNCHERS = {
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mpiexec": ("PMI_SIZE", "PMI_RANK"),
}
# Mapping each smaller block anew would cost time, and so would returning the end of the heap after
# each step.
MALLOC_OPTIONS = {"M_MMAP_THRESHOLD": (-3, 4 * 2**20), "M_TRIM_THRESHOLD": (-1, 64 * 2**20)}


def run_training(
    config_path: str,
    overrides: list[str],
    *,
    run_dir: str | None,
    nproc: int | None,
    verify_data: bool,
    accept_data_change: bool,
) -> int:
    """Train in this process, or in `nproc` new ones; returns the run's exit code.

    Raises:
        UserError: the config or the launch is wrong.
        SystemExit: another mistake was found in this process, and printed.
    """
    began = time.monotonic()
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed
        # A signal that ends the process (SIGBUS: a mapped file was cut; SIGSEGV) then leaves a
        # stack.
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
        say("starting")
    if config.metrics.profile:
        # Read when torch is imported: its profiler would say when it starts.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # Before torch is imported, so that a signal during the import stops the run instead of killing
    # it.
    stop = StopRequest(say_stopping)
    stop.install()
    timeout = config.distributed.timeout_sec
    stop_with_parent(lambda: stop.request("the end of its launcher"), within_sec=timeout, end=stop.end)
    with uncollected():
        importlib.import_module("torch._dynamo")  # which the optimizer's first step imports
        from trainer.training.checkpointing.restore import DataPolicy
        from trainer.training.main import train
        from trainer.training.setup.open_run import Launch

    # The user's code, which is imported from here on, may change the working directory.
    launch = Launch(
        stop=stop,
        config_path=Path(config_path).absolute(),
        run_dir=run_dir and os.path.abspath(run_dir),
        parts=PARTS,
        data_policy=DataPolicy(verify_whole=verify_data, accept_change=accept_data_change),
        on_run_dir=lambda path: report_to_launcher(RUN_DIR, str(path)),
        moments={"": began, "imports": time.monotonic()},
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
        say(f"starting {counted(nproc, 'rank')}")
    code: int = TOOLS.find("launch ranks")(nproc, uses_cuda=config.train.device != "cpu")
    return code


def _warn_of_runs_apart(environ: Mapping[str, str] = os.environ) -> None:
    """Warn of several processes of another launcher, each of which trains its own run."""
    for launcher, (size, rank) in OTHER_LAUNCHERS.items():
        number = environ.get(size, "")
        if number.isdecimal() and int(number) > 1 and environ.get(rank) == "0":
            apart = "each trains a run of its own; start torchrun with it (docs/cli.md)"
            say(f"{launcher} started {number} of this: {apart}")


def give_back_freed_blocks(environ: Mapping[str, str] = os.environ) -> None:
    """Have glibc return freed blocks of 4 MiB and more to the system, unless the user has set its
    threshold.

    Its own threshold rises to 32 MiB with the blocks that are freed, and smaller ones stay in the
    process.
    """
    if "MALLOC_MMAP_THRESHOLD_" in environ or "mmap_threshold" in environ.get("GLIBC_TUNABLES", ""):
        return
    with suppress(OSError, AttributeError):  # another C library
        for option in MALLOC_OPTIONS.values():
            ctypes.CDLL(None).mallopt(*option)


def say(text: str) -> None:
    """Print a message for people."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - a message for people


def report_to_launcher(what: str, value: str, environ: Mapping[str, str] = os.environ) -> None:
    """Pass the exit code, or the run's directory, to the launcher of `--nproc`, if any."""
    if REPORT_FOLDER in environ:
        path = Path(environ[REPORT_FOLDER], f"{what}_{environ.get('RANK')}")
        with suppress(OSError):  # the launcher is gone
            write_file(path, os.fsencode(value), sync=False)
