"""The optimizer and the learning rate over the run."""

from __future__ import annotations

import math

import torch
from torch import nn

from trainer.config.schema import OptimizerTable, SchedulerTable


def build_optimizer(model: nn.Module, table: OptimizerTable) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices alone: norms, biases and decay rates of the recurrence are not decayed."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": table.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=table.lr,
        betas=(table.betas[0], table.betas[1]),
        eps=table.eps,
        fused=True,
    )


def lr_at(step: int, *, steps: int, peak: float, table: SchedulerTable) -> float:
    """Learning rate of optimizer step `step` (1 .. `steps`).

    Warm-up is linear and reaches `peak` at step `warmup_steps`. What follows is a function of
    t = (step - start) / (steps - start), start being the end of the warm-up (or, for wsd, of the stable phase):
    constant: 1; linear: 1 - t; cosine: (1 + cos(pi t)) / 2 (Loshchilov and Hutter, 2017); wsd: 1, then 1 - t; each scaled
    to end at `min_lr_ratio` of the peak.
    """
    if step <= table.warmup_steps:
        return peak * step / table.warmup_steps
    if table.name == "constant":
        return peak
    start = table.warmup_steps
    if table.name == "wsd":
        start = max(start, steps - math.ceil(table.decay_fraction * steps))
    progress = min(max(step - start, 0) / max(steps - start, 1), 1.0)
    height = (1 + math.cos(math.pi * progress)) / 2 if table.name == "cosine" else 1 - progress
    return peak * (table.min_lr_ratio + (1 - table.min_lr_ratio) * height)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` in the next step, in every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
