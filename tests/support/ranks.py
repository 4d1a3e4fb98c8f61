"""Ranks of the program as plain processes, without torchrun above them: nobody but themselves ends them. And ranks under a
launcher, which can be watched after its death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import content
from tests.support.forks import Forked
from tests.support.runs import PROGRAM, ROOT, command, environment, free_port, overrides, rank_environment

PATIENCE_SEC = 600
FAULTY = ("model.target=tests.support.faulty_model:build", "model.contract=false")


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
        program: str = "",
    ) -> None:
        """Start them, to print into `logs`, with `extra` in their environment. `fault`: see `tests.support.faulty_model`;
        `is_fresh`: start new processes rather than fork; `program`: Python that forks run in the program's place."""
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = logs
        self.processes: list[subprocess.Popen[bytes] | Forked] = []
        shared, port = {"PYTHONPATH": str(ROOT), "FAULT": json.dumps(fault or {}), **(extra or {})}, free_port()
        for rank in range(world_size):
            own = environment({**rank_environment(rank, world_size, port), **shared})
            paths = {what: logs / f"std{what}_{rank}" for what in ("out", "err")}
            for path in paths.values():
                path.touch()
            if not is_fresh:
                self.processes.append(Forked(arguments, own, cwd=ROOT, **paths, code=program))
                continue
            with paths["out"].open("ab") as out, paths["err"].open("ab") as err:
                line = [sys.executable, str(PROGRAM), *map(str, arguments)]
                self.processes.append(
                    subprocess.Popen(line, env=own, stdout=out, stderr=err, cwd=ROOT, process_group=0)
                )

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
        return "\n".join((self.logs / f"stderr_{each}").read_text("utf-8", "replace") for each in ranks)


class Launched:
    """A launcher (`train --nproc`, or torchrun) and its ranks. Leaving the context kills what is left of them. `fault`: see
    `tests.support.faulty_model`."""

    def __init__(
        self,
        config: Path,
        run_dir: Path,
        *more: object,
        is_torchrun: bool = False,
        fault: Mapping[str, Any] | None = None,
    ) -> None:
        self.metrics, self.temporary = run_dir / "metrics.jsonl", run_dir.with_name("temporary")
        self.temporary.mkdir()
        own = ["--config", config, "--run-dir", run_dir, "--steps", 100_000, "--stdout", "off"]
        own += [*overrides(*FAULTY), *more]
        line = command(own, nproc=2) if is_torchrun else command(["--nproc", 2, *own])
        extra = {"TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT), "FAULT": json.dumps(fault or {})}
        # A session of its own, as a terminal gives it.
        self.process = subprocess.Popen(
            line, env=environment(extra), stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self.process.pid, *children(self.process.pid)):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def wait_for_step(self, step: int) -> None:
        """Wait until the step is logged."""
        while last_logged(self.metrics) < step:
            assert self.process.poll() is None, self.process.stderr and self.process.stderr.read()
            time.sleep(0.01)


def stat(pid: int) -> list[str]:
    """State, parent, process group, session of a process; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[:4]
    except OSError:
        return []


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    everyone = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [each for each in everyone if stat(each)[1:2] == [str(pid)]]


def is_there(pid: int) -> bool:
    """Whether it has not ended; one that nobody has waited for yet has."""
    return stat(pid)[:1] not in ([], ["Z"])


def wait_for_end(processes: Sequence[int], timeout: float = PATIENCE_SEC) -> None:
    """Wait until processes that need not be children of this one have ended."""
    end = time.monotonic() + timeout
    while left := list(filter(is_there, processes)):
        assert time.monotonic() < end, f"processes {left} go on"
        time.sleep(0.01)


def status(run_dir: Path) -> dict[str, Any]:
    """status.json."""
    found: dict[str, Any] = json.loads((run_dir / "status.json").read_text(encoding="utf-8"))
    return found


def wait_while_starting(ranks: Ranks, run_dir: Path, seconds: float) -> None:
    """Wait until a rank handles SIGTERM, then that long, but no longer than until the ranks have logged their first step."""

    def handles(pid: int) -> bool:
        caught = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").partition("SigCgt:")[2].split()[0]
        return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)

    ranks.until(lambda: any(handles(process.pid) for process in ranks.processes))
    before, end = last_logged(run_dir / "metrics.jsonl"), time.monotonic() + seconds
    ranks.until(lambda: time.monotonic() >= end or last_logged(run_dir / "metrics.jsonl") > before)


def last_logged(metrics: Path) -> int:
    """The last training step in metrics.jsonl; 0 if there is none yet."""
    steps = [0]
    for line in metrics.read_bytes().splitlines()[-6:] if metrics.exists() else ():
        with suppress(ValueError):  # it is being written
            row = json.loads(line)
            steps += [row["global_step"]] * (row.get("mode") == "train")
    return steps[-1]


def is_saving(run_dir: Path) -> bool:
    """Whether a checkpoint is being written right now (or was, when its writer died)."""
    found = list((run_dir / "checkpoints").glob("*step_*"))
    return any(each.name[0] == "." or not (each / "COMPLETE").exists() for each in found)


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
    for key in ("step", "gns", "extensions"):
        found += differences(states[0][key], states[1][key], f"state.{key}")
    return found
