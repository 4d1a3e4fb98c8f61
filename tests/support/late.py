"""Steps that are settled late, on the CPU, which otherwise settles at once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.fault_runs import row_differences
from tests.support.faulty_model import Fault
from tests.support.ranks import checkpoint_differences
from trainer.training.setup import assembly
from trainer.training.step.step import TrainStep


@dataclass
class Settled:
    """What the steps of a run in this process did."""

    late: int = 0
    """Steps that were settled when another had begun."""
    undone: list[int] = field(default_factory=list)
    """Steps whose first window was taken back."""


def settle_late(monkeypatch: pytest.MonkeyPatch) -> Settled:
    """From here on runs of this process and of its forks settle late on the CPU."""
    seen = Settled()
    monkeypatch.setattr(assembly, "LATE_DEVICES", frozenset({"cpu"}))
    settle, forward_backward = TrainStep.settle, TrainStep.forward_backward
    last = [0]

    def note_step(self: TrainStep, step: int, *args: Any, **kwargs: Any) -> None:
        last[0] = step
        forward_backward(self, step, *args, **kwargs)

    def note(self: TrainStep) -> Any:
        seen.late += self._later is not None
        outcome = settle(self)
        if outcome.is_later_undone:
            seen.undone.append(last[0])
        return outcome

    monkeypatch.setattr(TrainStep, "forward_backward", note_step)
    monkeypatch.setattr(TrainStep, "settle", note)
    return seen


def strike_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faulty model's `step` then is the global step, also where a window is run twice."""
    now = {"step": 0, "micro": 0}
    forward_backward, strikes = TrainStep.forward_backward, Fault.strikes

    def note_step(self: TrainStep, step: int, *args: Any, **kwargs: Any) -> None:
        now.update(step=step, micro=0)
        forward_backward(self, step, *args, **kwargs)

    def strikes_now(self: Fault, mode: str) -> bool:
        if mode == "train":
            self.count[mode] = (now["step"] - 1) * self.micro_batches + now["micro"]
            now["micro"] += 1
        return strikes(self, mode)

    monkeypatch.setattr(TrainStep, "forward_backward", note_step)
    monkeypatch.setattr(Fault, "strikes", strikes_now)


def events(run_dir: Path) -> list[dict[str, Any]]:
    """events.jsonl without times."""
    lines = (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "time"} for line in lines]


def run_differences(one: Path, other: Path) -> list[str]:
    """Where two runs differ: numbers, events, checkpoints and how they ended; times apart."""
    found = row_differences(one, other)
    if events(one) != events(other):
        found.append(f"events: {events(one)} and {events(other)}")
    names = [sorted(path.name for path in (run / "checkpoints").glob("step_*")) for run in (one, other)]
    if names[0] != names[1]:
        return [*found, f"checkpoints: {names}"]
    for name in names[0]:
        found += checkpoint_differences(one / "checkpoints" / name, other / "checkpoints" / name)
    ends = [json.loads((run / "status.json").read_text(encoding="utf-8")) for run in (one, other)]
    found += [f"status: {ends}" for key in ("state", "reason", "last_step") if ends[0][key] != ends[1][key]]
    return found
