"""What a checkpoint holds: the parts of a run that have a state, and where the run is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from trainer.data.blend import BlendDataset
from trainer.ledger.ledger import Ledger
from trainer.metrics.aggregate import Recorder
from trainer.metrics.noise_scale.hooks import GradientNoiseScale
from trainer.metrics.tracker import MetricsTracker


@dataclass
class TrainState:
    """The parts of a run that have a state of their own; extensions have theirs besides."""

    model: nn.Module
    """Without DDP."""
    dataset: BlendDataset
    ledger: Ledger | None
    """None for a model without state."""
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    tracker: MetricsTracker
    gns: GradientNoiseScale | None = None

    def shared(self) -> dict[str, Any]:
        """The states that are the same on all ranks and fit JSON."""
        return {
            "tracker": self.tracker.state_dict(),
            "gns": self.gns.state_dict() if self.gns is not None else None,
            "state_layout": self.state_layout,
        }

    @property
    def state_layout(self) -> list[list[Any]] | None:
        """What the rows of the ledger stand for, see `StateLayout`; None for a model whose states are rows already."""
        layout = getattr(self.model, "state_layout", None)
        return None if layout is None else layout.to_json()

    def load_shared(self, saved: Mapping[str, Any]) -> None:
        """Continue from `shared`."""
        self.tracker.load_state_dict(saved["tracker"])
        if self.gns is not None and saved["gns"] is not None:
            self.gns.load_state_dict(saved["gns"])


# What the host counts itself, beside the data set's metrics: see `Position.unlogged`.
HOST_KEYS = (
    "non_finite_steps",
    "grad_scale",
    "train/micro_batches",
    "checkpoint/save_sec",
    "time/slowest_rank_sec",
    "time/fastest_rank_sec",
    "stream_mixing/masked_share",
)


@dataclass
class Position:
    """Where a run is, and what it has counted on the way."""

    data_state: Any
    """This rank's data set's, after the last batch of the last finished step."""
    unlogged: Recorder
    """What the host has counted since the last logged step."""
    step: int = 0
    """Last finished step."""
    last_step: int | None = None
    """The run's last; None: not known yet, the run's length is in tokens."""
    reached: int = 0
    """What `Length.reached_by` said of the last finished step."""
    tokens: int = 0
    """Target tokens over all ranks through the last finished step, without those of skipped steps."""
    tokens_before: int = 0
    """The same without the last finished step."""
    micro_batches: int = 0
    """Of the last finished step; 0: not known."""
    micro_batches_since: int = 1
    """The first step with so many."""
    evaluation_is_due: bool = False
    """After the last finished step, or it was cut short; a resumed run begins with it."""
    skipped_in_a_row: int = 0
    first_loss: tuple[int, float] | None = None
    """The first step that this process trained with tokens, and its loss."""
    last_loss: tuple[int, float] | None = None
    last_eval: tuple[int, dict[str, float]] | None = None
    """The step of the last evaluation, and what it found."""

    @classmethod
    def of(cls, state: TrainState, step: int = 0) -> Self:
        """The position after `step`, of which `state` holds the data set's state."""
        leave_out = state.tracker.diagnostics.best_effort("metrics").leave_out
        return cls(state.dataset.state_dict(), Recorder(leave_out=leave_out), step=step)

    def counts(self, state: TrainState) -> dict[str, Any]:
        """What this rank has counted since the last logged step, for a checkpoint between two of them."""
        counts = {"pool": self.unlogged.state_dict(), "in_a_row": self.skipped_in_a_row}
        return counts if state.ledger is None else {**counts, "ledger": state.ledger.undrained()}

    def load_counts(self, state: TrainState, saved: Mapping[str, Any]) -> None:
        """Continue from `counts`; {} where the world size has changed."""
        self.unlogged.load_state_dict(saved.get("pool", {}))
        self.skipped_in_a_row = int(saved.get("in_a_row", 0))
        if state.ledger is not None and "ledger" in saved:
            state.ledger.load_undrained(saved["ledger"])


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Of the CPU's generator and, where there is one, the device's; both are kept on the host, so nothing waits."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_generator_states(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Go on from `generator_states`."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
