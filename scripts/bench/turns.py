"""Processes that take turns, a block of steps each: other load on the machine falls on all alike; each has its own memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from bench_table import peak_mb
from trainer_run import LOG_INTERVAL, StepWatcher


@dataclass(frozen=True)
class Block:
    """LOG_INTERVAL steps of a process."""

    seconds: float
    first_step_sec: float
    """From the start of the process to the end of its first step."""
    peak_mb: float
    losses: Sequence[float]
    """Of each step."""
    tokens: int
    """If they are known."""


class Turn(StepWatcher):
    """In such a process: gets each of its steps, reports a block of them, and waits for its next turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")  # the loop may print, too
        self._losses: list[Any] = []
        self._tokens = 0
        self._first = 0.0
        self._began = float(os.environ["BEGAN"])  # of the process; time.monotonic() is the machine's

    def update(self, step: int, loss: float | torch.Tensor, tokens: int = 0) -> None:
        """A step is finished, or queued on the device."""
        self._losses.append(loss)
        self._tokens += tokens
        if not self._first:
            self._first = time.monotonic() - self._began
        if step % LOG_INTERVAL:
            return
        losses = [float(each) for each in self._losses]  # waits for the device
        seconds = time.monotonic() - self._began
        block = Block(seconds, self._first, peak_mb(self._device.type), losses, self._tokens)
        print(json.dumps(vars(block)), file=self._out, flush=True)
        sys.stdin.readline()
        self._losses, self._tokens, self._began = [], 0, time.monotonic()


def run_in_turns(processes: Mapping[str, Sequence[str]], steps: int) -> dict[str, list[Block]]:
    """The blocks of each process of this program, started with these further arguments; its first one warms up.

    Raises:
        RuntimeError: one failed.
    """
    found: dict[str, list[Block]] = {name: [] for name in processes}
    with ExitStack() as stack:
        running = {}
        for turn in range(steps // LOG_INTERVAL):
            for name, arguments in processes.items():
                if turn == 0:
                    running[name] = _start(arguments, stack)
                found[name].append(_next_block(name, *running[name], is_first=turn == 0))
    return found


def _start(arguments: Sequence[str], stack: ExitStack) -> tuple[subprocess.Popen[str], Any]:
    errors = stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115 - it is one
    command = [sys.executable, *sys.argv, *arguments]
    environ = {**os.environ, "BEGAN": str(time.monotonic())}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ
    )
    stack.enter_context(process)  # closes its pipes, upon which it ends, and waits
    return process, errors


def _next_block(name: str, process: subprocess.Popen[str], errors: Any, *, is_first: bool) -> Block:
    assert process.stdin is not None
    assert process.stdout is not None
    if not is_first:
        process.stdin.write("\n")
        process.stdin.flush()
    if line := process.stdout.readline():
        return Block(**json.loads(line))
    process.wait()
    errors.seek(0)
    raise RuntimeError(f"{name}: {(errors.read().strip() or f'exit code {process.returncode}').splitlines()[-1]}")
