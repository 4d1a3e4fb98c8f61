"""A data set that gives some batches and then waits, for `[[data.source]] target`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.runs import overrides, write_tiny_config


def build(
    rank: int,
    world_size: int,
    seed: int,
    seq_len: int,
    *,
    after: int,
    how: str,
    seconds: float = 1e6,
    ranks: tuple[int, ...] = (0, 1, 2, 3),
    fifo: str = "",
) -> Stalling:
    """See `Stalling`; only the ranks named stall. `start`: never returns."""
    if how == "start":
        Path(os.environ["STARTED"], f"started_{rank}").touch()
        time.sleep(seconds)
    return Stalling(seq_len, after if rank in ranks else -1, how, seconds, fifo)


def evaluate_slowly(*, seconds: float, **_: Any) -> dict[str, float]:
    """For `[eval] target`: waits."""
    time.sleep(seconds)
    return {"slowly": 1.0}


class Stalling:
    """Batches, and before batch `after` a wait: `sleep` for some seconds, `work` for as long, `fifo` in the opening of a FIFO.

    Its state is how many batches it has given.
    """

    def __init__(self, seq_len: int, after: int, how: str, seconds: float, fifo: str) -> None:
        self._seq_len, self._after, self._how, self._seconds, self._fifo = seq_len, after, how, seconds, fifo
        self._given = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._given == self._after:
            self._stall()
        self._given += 1
        tokens = np.random.default_rng(self._given).integers(0, 50, (2, self._seq_len))
        return {"tokens": tokens, "targets": (tokens + 1) % 50}

    def state_dict(self) -> dict[str, Any]:
        return {"given": self._given}

    def load_state_dict(self, state: Any) -> None:
        self._given = (state if isinstance(state, dict) else state[0])["given"]

    def _stall(self) -> None:
        if self._how == "fifo":
            os.close(os.open(self._fifo, os.O_RDONLY))
        elif self._how == "sleep":
            time.sleep(self._seconds)
        else:
            end = time.monotonic() + self._seconds
            while time.monotonic() < end:
                pass


def stalling_arguments(
    directory: Path, run_dir: Path, *, prefetch: int, timeout_sec: float, **args: Any
) -> tuple[object, ...]:
    """The command line of a run on such a data set, of two micro-batches a step; `fifo` in `directory` is the FIFO."""
    given = {"fifo": str(directory / "fifo"), **args}
    table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in given.items())
    settings = (
        f'data.source=[{{name="own", target="tests.support.stalling_data:build", args={{{table}}}}}]',
        "data.mixing.batch_size_by_modality={}",
        f"data.prefetch={prefetch}",
        f"distributed.timeout_sec={timeout_sec}",
    )
    config = write_tiny_config(directory)
    return ("--config", config, "--run-dir", run_dir, "--steps", 12, *overrides(*settings))
