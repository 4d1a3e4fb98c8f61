"""Processes that take turns, step by step: other load on the machine falls on all alike, and each has its own memory.

On a device, which nothing else uses and whose memory may not hold all of them, they run one after another, some steps a turn.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from operator import itemgetter
from typing import Any

import torch
from bench_table import peak_mb
from trainer_run import LOG_INTERVAL, StepWatcher

TOLERANCE = {"cpu": 1e-3, "cuda": 5e-2}


@dataclass(frozen=True)
class Block:
    """LOG_INTERVAL steps of a process, or one."""

    seconds: float
    first_step_sec: float  # from the start of the process to the end of its first step
    peak_mb: float
    losses: Sequence[float]  # of each step
    tokens: int  # if they are known


class Turn(StepWatcher):
    """In such a process: gets each of its steps, reports a block of them, and waits for its next turn."""

    def __init__(self, device: str, connection: Connection) -> None:
        self.connection = connection
        self._device, self._every = device, steps_of_a_turn(device)
        self._losses: list[Any] = []
        self._tokens = 0
        self._first = 0.0
        self._began = time.monotonic()  # in the parent, which is about to start the process

    def update(self, step: int, loss: float | torch.Tensor, tokens: int = 0) -> None:
        """A step is finished, or queued on the device."""
        self._losses.append(loss)
        self._tokens += tokens
        if not self._first:
            float(loss)
            self._first = time.monotonic() - self._began
        if step % self._every:
            return
        losses = [float(each) for each in self._losses]  # waits for the device
        seconds = time.monotonic() - self._began
        self.connection.send(Block(seconds, self._first, peak_mb(self._device), losses, self._tokens))
        self.connection.recv()
        self._losses, self._tokens, self._began = [], 0, time.monotonic()


def steps_of_a_turn(device: str) -> int:
    """To wait for a device after each step would leave it idle until it is given the next one."""
    return LOG_INTERVAL if device == "cuda" else 1


def run_in_turns(processes: Mapping[str, Callable[[Turn], None]], device: str, steps: int) -> dict[str, list[Block]]:
    """The blocks of a process for each function; its first one warms up. Losses must agree at every
    step. Raises RuntimeError: one failed."""
    found: dict[str, list[Block]] = {name: [] for name in processes}
    spawn, connections = get_context("spawn"), {}
    each = steps_of_a_turn(device)
    turns = [(turn, name) for name in processes for turn in range(steps // each)]
    if device != "cuda":
        turns.sort(key=itemgetter(0))
    with ExitStack() as stack:
        for turn, name in turns:
            if turn == 0:
                connections[name], theirs = spawn.Pipe()
                given = (processes[name], Turn(device, theirs), torch.get_num_threads())
                process = spawn.Process(target=_run, args=given)
                process.start()
                theirs.close()
                stack.callback(process.join)
                stack.enter_context(connections[name])
            else:
                connections[name].send(None)
            found[name].append(_next_block(name, connections[name]))
            if turn == steps // each - 1:
                connections[name].send(None)
                if device == "cuda":
                    process.join()
    losses = {name: torch.tensor([loss for block in own for loss in block.losses]) for name, own in found.items()}
    for each_losses in losses.values():
        torch.testing.assert_close(each_losses, next(iter(losses.values())), rtol=TOLERANCE[device], atol=0.0)
    size, joined = LOG_INTERVAL // each, {}
    for name, own in found.items():
        joined[name] = [_joined(own[at : at + size]) for at in range(0, len(own), size)]
    return joined


def _joined(steps: Sequence[Block]) -> Block:
    """Logged steps are read at once and the others one step later: only a whole block's time is that of its steps."""
    losses = [loss for each in steps for loss in each.losses]
    seconds, tokens = sum(each.seconds for each in steps), sum(each.tokens for each in steps)
    return replace(steps[-1], seconds=seconds, losses=losses, tokens=tokens)


def _next_block(name: str, connection: Connection) -> Block:
    try:
        found = connection.recv()
    except EOFError:
        found = "it was killed"
    if isinstance(found, Block):
        return found
    raise RuntimeError(f"{name}: {found}")


def _run(run: Callable[[Turn], None], turn: Turn, num_threads: int) -> None:
    os.dup2(2, 1)  # stdout is for the figures, and the loop may print, too
    torch.set_num_threads(num_threads)
    try:
        run(turn)
    except Exception as error:
        turn.connection.send(f"{type(error).__name__}: {error}")
        raise
