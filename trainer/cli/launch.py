"""`train --nproc N`: start N ranks on this machine with torchrun's own elastic launcher, in standalone mode."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import UserError

EXIT_CODE_FILE = "TRAINER_EXIT_CODE_FILE"


def launch_ranks(nproc: int, arguments: list[str]) -> int:
    """Run `trainer <arguments>` on `nproc` ranks and return the exit code of the run.

    torchrun turns every failure into 1; here the first failed rank's own code is returned. A run that a signal stopped
    with a checkpoint has ended well, though its launcher was interrupted: then rank 0's own code, 0, is returned.

    Raises:
        UserError: this process is itself a rank of a launcher.
    """
    if "RANK" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError("--nproc", "this process is a rank of torchrun already", "give --nproc to one of them alone")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    package_parent = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
    own = ["--standalone", f"--nproc-per-node={nproc}", "-m", "trainer", *arguments]
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        os.environ[EXIT_CODE_FILE] = str(Path(folder, "exit_code"))
        return _launch(own)


def report_exit_code(code: int, environ: Mapping[str, str] = os.environ) -> None:
    """Tell a launcher of `launch_ranks`, if there is one, how the run ended (rank 0)."""
    if EXIT_CODE_FILE in environ and environ.get("RANK") == "0":
        Path(environ[EXIT_CODE_FILE]).write_text(str(code), encoding="ascii")


def _reported_exit_code() -> int | None:
    try:
        return int(Path(os.environ[EXIT_CODE_FILE]).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None  # it was killed before it could say anything


def _launch(own: list[str]) -> int:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launcher: Any = torchrun  # torch leaves it without types
        launcher.run(launcher.get_args_parser().parse_args(own))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as error:
        print(f"train: stopped by {error.sigval.name}", file=sys.stderr)  # noqa: T201 - a message for people
        return 0 if _reported_exit_code() == 0 else 128 + error.sigval
    return 0


def without_nproc(arguments: list[str]) -> list[str]:
    """The command line without `--nproc N` (or `--nproc=N`), for the ranks."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--nproc":
            next(rest, None)
        elif not argument.startswith("--nproc="):
            kept.append(argument)
    return kept
