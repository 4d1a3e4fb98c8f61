"""Ranks of the program as plain processes, without torchrun above them: nobody but themselves ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import content
from tests.support.forks import Forked
from tests.support.runs import PROGRAM, ROOT, environment, free_port, rank_environment

PATIENCE_SEC = 600


class Ranks:
    """A process group of `train <arguments>`; what they print is in files below `logs`.

    Leaving the context kills what is left of them.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        *,
        logs: Path,
        world_size: int = 2,
        extra: Mapping[str, str] | None = None,
        fault: Mapping[str, Any] | None = None,
        is_fresh: bool = False,
        max_file_bytes: int | None = None,
    ) -> None:
        """Start them, to print into `logs`, with `extra` in their environment. `fault`: see `tests.support.faulty_model`;
        `is_fresh`: start new processes rather than fork; `max_file_bytes`: a limit on the size of a file (forks only)."""
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = logs
        port = free_port()
        self.processes: list[subprocess.Popen[bytes] | Forked] = []
        for rank in range(world_size):
            own = {
                "PYTHONPATH": str(ROOT),
                **rank_environment(rank, world_size, port),
                "FAULT": json.dumps(fault or {}),
                **(extra or {}),
            }
            paths = {what: self._file(f"std{what}", rank) for what in ("out", "err")}
            for path in paths.values():
                path.touch()
            if not is_fresh:
                self.processes.append(
                    Forked(arguments, environment(own), cwd=ROOT, **paths, max_file_bytes=max_file_bytes)
                )
                continue
            with paths["out"].open("ab") as out, paths["err"].open("ab") as err:
                line = [sys.executable, str(PROGRAM), *map(str, arguments)]
                self.processes.append(
                    subprocess.Popen(line, env=environment(own), stdout=out, stderr=err, cwd=ROOT, process_group=0)
                )

    def _file(self, what: str, rank: int) -> Path:
        return self.logs / f"{what}_{rank}"

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to some ranks (None: all of them)."""
        for rank, process in enumerate(self.processes):
            if (ranks is None or rank in ranks) and process.poll() is None:
                process.send_signal(number)

    @property
    def is_running(self) -> bool:
        """Whether any rank is."""
        return any(process.poll() is None for process in self.processes)

    def wait(self, timeout: float = PATIENCE_SEC) -> list[int]:
        """The exit codes by rank, once all have ended; raises AssertionError if some still run."""
        end = time.monotonic() + timeout
        for rank, process in enumerate(self.processes):
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {rank} goes on after {timeout:.0f} s\n{self.said()}") from None
        return [process.wait() for process in self.processes]

    def until(self, happens: Callable[[], bool], *, poll_sec: float = 0.001) -> bool:
        """Wait until it happens (True), or until a rank ends first (False)."""
        end = time.monotonic() + PATIENCE_SEC
        while time.monotonic() < end:
            if happens():
                return True
            if any(process.poll() is not None for process in self.processes):
                return False
            time.sleep(poll_sec)
        raise AssertionError(f"it did not come\n{self.said()}")

    def said(self, rank: int | None = None) -> str:
        """What the ranks (or one) wrote to stderr."""
        ranks = range(len(self.processes)) if rank is None else [rank]
        return "\n".join(self._file("stderr", r).read_text(encoding="utf-8", errors="replace") for r in ranks)


def status(run_dir: Path) -> dict[str, Any]:
    """status.json."""
    found: dict[str, Any] = json.loads((run_dir / "status.json").read_text(encoding="utf-8"))
    return found


def wait_while_starting(ranks: Ranks, run_dir: Path, seconds: float) -> None:
    """Wait until a rank handles SIGTERM, then that long, but no longer than until the ranks have logged their first step."""
    ranks.until(lambda: any(handles(process.pid, signal.SIGTERM) for process in ranks.processes))
    before, end = last_logged(run_dir / "metrics.jsonl"), time.monotonic() + seconds
    ranks.until(lambda: time.monotonic() >= end or last_logged(run_dir / "metrics.jsonl") > before)


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    caught = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").partition("SigCgt:")[2].split()[0]
    return bool(int(caught, 16) >> (number - 1) & 1)


def last_logged(metrics: Path) -> int:
    """The last training step in metrics.jsonl; 0 if there is none yet."""
    if not metrics.exists():
        return 0
    last = 0
    for line in metrics.read_bytes().splitlines()[-6:]:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row.get("mode") == "train":
            last = int(row["global_step"])
    return last


def is_saving(run_dir: Path) -> bool:
    """Whether a checkpoint is being written right now (or was, when its writer died)."""
    directory = run_dir / "checkpoints"
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return False
    return any(
        name.startswith(".tmp_step_") or (name.startswith("step_") and not (directory / name / "COMPLETE").exists())
        for name in names
    )


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two nested values of tensors and plain things are not the same, bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [where]
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return [f"{where}: {sorted(map(str, one.keys() ^ other.keys()))}"]
        return [d for key in one for d in differences(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return [f"{where}: {len(one)} and {len(other)}"]
        return [d for i, (a, b) in enumerate(zip(one, other, strict=True)) for d in differences(a, b, f"{where}[{i}]")]
    return [] if one == other else [f"{where}: {one!r} and {other!r}"[:300]]


def checkpoint_differences(one: Path, other: Path) -> list[str]:
    """Where two checkpoints differ: weights, optimizer, and of every rank cursors, ledger and generators."""
    found = differences(content(one), content(other), where="checkpoint")
    states = [json.loads((path / "state.json").read_text(encoding="utf-8")) for path in (one, other)]
    for key in ("step", "world_size", "gns", "extensions"):
        found += differences(states[0][key], states[1][key], f"state.{key}")
    return found
