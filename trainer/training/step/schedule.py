"""The length of a run, in steps or tokens, and the learning rate over it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch

from trainer.config.schema import RunConfig, SchedulerTable
from trainer.errors import UserError
from trainer.import_path import refuse_arguments, resolve_target, users_code
from trainer.options import ONE, MicroBatches

TRIED = 1000  # steps at which a custom schedule is tried before the run
LR_SCALE = "lr_scale"
"""Key of a parameter group: its learning rate over that of the run."""
Schedule = Callable[[int], float]
"""Maps the progress after a step (see `Length`: 1 .. `train.steps`, or tokens) to its learning rate."""


@dataclass(frozen=True)
class Length:
    """The length of a run, and the unit in which progress is measured: steps or tokens.

    In tokens, a step has reached the tokens through the last but one (without those of skipped
    steps), plus two full steps: the counts of the last two steps are not known when it is launched.
    The run thus ends within two steps of `total`, and its end depends neither on which steps are
    read early nor on where it was resumed.

    Args:
        total: steps, or tokens.
        micro_tokens: most tokens of a micro-batch over all ranks; 0: the length is in steps.
        micro_batches: by steps, for forecasts.
    """

    total: int
    micro_tokens: int
    micro_batches: MicroBatches = ONE

    @classmethod
    def of(cls, config: RunConfig, micro_tokens: int) -> Self:
        """As `[train]` sets it."""
        if not config.train.tokens:
            return cls(config.train.steps, 0)
        return cls(config.train.tokens, micro_tokens, config.micro_batches.by_steps(micro_tokens))

    @property
    def is_in_tokens(self) -> bool:
        """False: the length is in steps."""
        return self.micro_tokens > 0

    def in_full_steps(self, steps: int) -> int:
        """The progress after so many steps of full batches; may be beyond the end."""
        if not self.is_in_tokens:
            return steps
        return self.micro_batches.batches_before(steps + 1) * self.micro_tokens


def make_schedule(config: RunConfig, length: Length) -> Schedule:
    """The schedule of `[scheduler]`, over this length. A UserError if a custom one fails."""
    table, steps, peak = config.scheduler, length.total, config.optimizer.lr
    if table.target is None:
        warmup = table.warmup_tokens or length.in_full_steps(table.warmup_steps)
        table = table.model_copy(update={"warmup_steps": warmup})
        return partial(lr_at, steps=steps, peak=peak, table=table)
    function = resolve_target(table.target, "scheduler.target")
    given = {"steps": steps, "peak": peak, **table.args}
    refuse_arguments(partial(function, 1), f"{table.target} with a step, and", given, key="scheduler.args")
    schedule = partial(_custom_lr, table.target, partial(function, **given))
    # Refused now, not after days: a sample of all steps, the last included.
    first = min(length.in_full_steps(1), steps)
    for reached in [*range(first, steps, max((steps - first) // TRIED, 1)), steps]:
        schedule(reached)
    return schedule


def lr_at(step: int, *, steps: int, peak: float, table: SchedulerTable) -> float:
    """Learning rate of step `step` (1 .. `steps`); with a length in tokens, all three are tokens.

    Warm-up is linear and reaches `peak` at step `warmup_steps`. What follows is a function of t =
    (step - start) / (steps - start), where start is the end of the warm-up (for wsd, of the stable
    phase): constant: 1; linear: 1 - t; cosine: (1 + cos(pi t)) / 2 (Loshchilov and Hutter, 2017);
    wsd: 1, then 1 - t; each scaled to end at `min_lr_ratio` of the peak. A run shorter than its
    warm-up ends on the ramp.
    """
    if step <= table.warmup_steps:  # also the whole of a shorter run
        return peak * step / table.warmup_steps
    if table.name == "constant":
        return peak
    start = table.warmup_steps
    if table.name == "wsd":
        start = max(start, steps - math.ceil(table.decay_fraction * steps))
    progress = min(max(step - start, 0) / max(steps - start, 1), 1.0)
    height = 1 - progress
    if table.name == "cosine":
        height = (1 + math.cos(math.pi * progress)) / 2
    return peak * (table.min_lr_ratio + (1 - table.min_lr_ratio) * height)


def _custom_lr(target: str, function: Callable[[int], float], step: int) -> float:
    """The rate that a custom function returns. A UserError if it fails, or returns no rate."""
    with users_code("scheduler.target", f"{target} fails at step {step}"):
        found: Any = function(step)
        # float("0.1") would pass a text on as a number.
        rate = math.nan if isinstance(found, str) else float(found)
    if not 0 <= rate < math.inf:
        problem = f"{target} gave {found!r} at step {step}, which is no learning rate"
        raise UserError("scheduler.target", problem, "return a finite number that is not negative")
    return rate


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` in the next step, in every parameter group, times the group's own scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(LR_SCALE, 1.0)
