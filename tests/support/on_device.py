"""Tiny real runs of `train` on the device of the tests marked `cuda`, in this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import in_process
from tests.support.fault_runs import MEASURED
from tests.support.runs import read_rows, write_tiny_config
from trainer.training import main as loop
from trainer.training.run import Run, StepInFlight

OF_DEVICE = (*MEASURED, "mfu", "smoothed/mfu", "gpu/")


def settings(device: torch.device, *sets: str) -> list[str]:
    """The overrides of a run on the device."""
    return [f'train.device="{device.type}"', 'train.precision="fp32"', 'metrics.stdout="off"', *sets]


def train_here(folder: Path, device: torch.device, *sets: str, extra: str = "") -> Path:
    """Train in this process; gives the run's directory."""
    in_process.train_here(write_tiny_config(folder, extra), folder / "run", *settings(device, *sets))
    return folder / "run"


def differences(one: Path, other: Path, close: float, names: Collection[str] = ()) -> dict[str, tuple[float, float]]:
    """What a run reports otherwise than another, which may have more: of the metrics named, or all but the device's own."""
    rows, others = (read_rows(run / "metrics.jsonl") for run in (one, other))
    assert rows.keys() == others.keys()
    pairs = {
        f"{at} {name}": (value, others[at][name])
        for at, row in rows.items()
        for name, value in row.items()
        if not name.startswith(OF_DEVICE) and (name in names or not names)
    }
    return {name: pair for name, pair in pairs.items() if pair[1] != pytest.approx(pair[0], rel=close, abs=1e-5)}


def around_steps(monkeypatch: pytest.MonkeyPatch, around: Callable[[Run, int], AbstractContextManager[None]]) -> None:
    """Enter `around` at each iteration of the loop, with the step that it launches."""
    take_step = loop.take_step

    def watched(run: Run, previous: StepInFlight | None, *args: Any) -> tuple[str | None, StepInFlight | None]:
        with around(run, run.position.step + (1 if previous is None else 2)):
            return take_step(run, previous, *args)

    monkeypatch.setattr(loop, "take_step", watched)


@contextmanager
def synchronization_forbidden(device: torch.device) -> Iterator[None]:
    """On CUDA, whatever makes the host wait for the device raises; on the CPU there is nothing to wait for."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
