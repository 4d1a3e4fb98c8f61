"""A run under a launcher, `train --nproc` or torchrun, in real processes, whose ranks can be watched after its death."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.ranks import PATIENCE_SEC, last_logged
from tests.support.runs import ROOT, command, environment

FAULTY = ("--set", "model.target=tests.support.faulty_model:build", "--set", "model.contract=false")


class Launched:
    """The launcher (`train --nproc`, or torchrun) and its ranks. Leaving the context kills what is left of them. `fault`: see
    `tests.support.faulty_model`."""

    def __init__(
        self,
        config: Path,
        run_dir: Path,
        *more: object,
        nproc: int = 2,
        is_torchrun: bool = False,
        fault: Mapping[str, Any] | None = None,
    ) -> None:
        self.metrics = run_dir / "metrics.jsonl"
        self.temporary = run_dir.with_name("temporary")
        self.temporary.mkdir()
        own = ["--config", config, "--run-dir", run_dir, "--steps", 100_000, "--stdout", "off", *FAULTY, *more]
        line = command(own, nproc=nproc) if is_torchrun else command(["--nproc", nproc, *own])
        extra = {"TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT), "FAULT": json.dumps(fault or {})}
        # A session of its own, as a terminal gives it.
        self.process = subprocess.Popen(
            line, env=environment(extra), stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.ranks: list[int] = []

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for rank in filter(_is_there, self.ranks):
            os.kill(rank, 9)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def wait_for_step(self, step: int) -> None:
        """Wait until the step is logged; from then on the ranks are known."""
        while last_logged(self.metrics) < step:
            assert self.process.poll() is None, self.process.stderr and self.process.stderr.read()
            time.sleep(0.01)
        self.ranks = children(self.process.pid)

    def wait_for_ranks(self, timeout: float = PATIENCE_SEC) -> None:
        """Wait until all ranks have ended."""
        wait_for_end(self.ranks, timeout)


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == pid:
            found.append(int(status.parent.name))
    return found


def wait_for_end(processes: Sequence[int], timeout: float = PATIENCE_SEC) -> None:
    """Wait until processes that need not be children of this one have ended."""
    end = time.monotonic() + timeout
    while left := [process for process in processes if _is_there(process)]:
        assert time.monotonic() < end, f"processes {left} go on"
        time.sleep(0.01)


def _is_there(pid: int) -> bool:
    """Whether it has not ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
