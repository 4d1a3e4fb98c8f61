"""Tiny real runs of `train` on the device of the tests marked `cuda`, in this process or in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.support import in_process
from tests.support.runs import overrides, run, write_tiny_config
from trainer.training import loop
from trainer.training.run import Run, StepInFlight


def settings(device: torch.device, *sets: str) -> list[str]:
    """The overrides of a run on the device."""
    return [f'train.device="{device.type}"', 'train.precision="fp32"', 'metrics.stdout="off"', *sets]


def train_here(folder: Path, device: torch.device, *sets: str, extra: str = "") -> Path:
    """Train in this process; gives the run's directory."""
    folder.mkdir(parents=True, exist_ok=True)
    in_process.train_here(write_tiny_config(folder, extra), folder / "run", *settings(device, *sets))
    return folder / "run"


def train_apart(
    folder: Path, device: torch.device, *sets: str, extra: str = "", environ: dict[str, str] | None = None
) -> Path:
    """Train in a process of its own, to the end; gives the run's directory."""
    folder.mkdir(parents=True, exist_ok=True)
    words = overrides(*settings(device, *sets))
    ended = run("--config", write_tiny_config(folder, extra), "--run-dir", folder / "run", *words, extra=environ)
    assert ended.returncode == 0, ended.stderr
    return folder / "run"


def around_steps(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[Run, int], None], after: Callable[[Run, int], None]
) -> None:
    """Call `before` and `after` around each iteration of the loop, with the step that it launches."""
    take_step = loop.take_step

    def watched(run: Run, previous: StepInFlight | None) -> tuple[str | None, StepInFlight | None]:
        step = run.position.step + (1 if previous is None else 2)
        before(run, step)
        try:
            return take_step(run, previous)
        finally:
            after(run, step)

    monkeypatch.setattr(loop, "take_step", watched)


@contextmanager
def synchronization_forbidden(device: torch.device) -> Iterator[None]:
    """On CUDA, whatever makes the host wait for the device raises; on the CPU there is nothing to wait for."""
    forbid_synchronization(device, is_forbidden=True)
    try:
        yield
    finally:
        forbid_synchronization(device, is_forbidden=False)


def forbid_synchronization(device: torch.device, *, is_forbidden: bool) -> None:
    """For all threads from now on; see `synchronization_forbidden`."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error" if is_forbidden else "default")
