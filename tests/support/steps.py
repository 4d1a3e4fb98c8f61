"""A training step on the CPU, for tests that lay rows over ranks and micro-batches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from trainer.distributed.strategy import Strategy
from trainer.objective.loss import Objective
from trainer.training.step import TrainStep


def make_step(model: nn.Module, strategy: Strategy, **changes: Any) -> TrainStep:
    """By plain SGD, in which the change of a weight is its gradient; `changes` replace the settings here."""
    settings = {
        "ledgers": (),
        "objective": Objective(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=1.0),
        "gns": None,
        "scaler": torch.amp.GradScaler("cpu", enabled=False),
        "max_tokens_per_micro": 50,
        "clip_grad_norm": 0.0,
        "world_size": 1,
        "autocast": nullcontext,
    }
    given = {**settings, **changes}
    return TrainStep(model=strategy.wrap(model, model), strategy=strategy, device=torch.device("cpu"), **given)
