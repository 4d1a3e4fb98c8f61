"""Memory does not grow with steps: after a warm-up a run holds no more than before, however long it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.memory import resident_bytes
from tests.support.on_device import around_steps, train_here
from trainer.training.run import Run

pytestmark = pytest.mark.cuda
STEPS = {"cuda": 500, "cpu": 60}
WARM_UP = {"cuda": 100, "cpu": 30}
MOST_MB = {"cuda": 0.1, "cpu": 16.0}  # the allocator of the CPU keeps what was freed


def test_a_long_run_holds_no_more_than_a_short_one(
    tmp_path: Path, chosen_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: dict[int, float] = {}

    def note(run: Run, step: int) -> None:
        in_use = torch.cuda.memory_allocated() if chosen_device.type == "cuda" else resident_bytes()
        # One step is always in flight, except after one that was read at once.
        held[step] = in_use / 1e6

    around_steps(monkeypatch, lambda run, step: None, note)
    sets = (f"train.steps={STEPS[chosen_device.type]}", "metrics.log_interval=10", "checkpoint.every=0")
    train_here(tmp_path, chosen_device, *sets)
    logged = [megabytes for step, megabytes in held.items() if step % 10 == 0]
    early, late = held[WARM_UP[chosen_device.type]], held[STEPS[chosen_device.type]]
    assert late - early <= MOST_MB[chosen_device.type], logged
