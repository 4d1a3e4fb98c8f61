"""The learning rate over the run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial

from trainer.config.schema import RunConfig, SchedulerTable
from trainer.errors import UserError
from trainer.import_path import format_error, resolve_target

Schedule = Callable[[int], float]
"""The learning rate of an optimizer step, 1 .. `train.steps`."""


def make_schedule(config: RunConfig) -> Schedule:
    """What `[scheduler]` names.

    Raises:
        UserError: a target of the user's own does not exist, does not take its arguments, or fails at the first or last step.
    """
    table, steps, peak = config.scheduler, config.train.steps, config.optimizer.lr
    if table.target is None:
        return partial(lr_at, steps=steps, peak=peak, table=table)
    function, given = resolve_target(table.target, "scheduler.target"), {"steps": steps, "peak": peak, **table.args}
    try:
        inspect.signature(function).bind(1, **given)
    except ValueError:  # something written in C may have no signature to look at
        pass
    except TypeError as error:
        problem = f"cannot call {table.target} with a step, and steps, peak and the keys of args by name: {error}"
        raise UserError("scheduler.args", problem, "see its signature") from error
    schedule = partial(_own, table.target, partial(function, **given))
    for step in (1, steps):
        schedule(step)
    return schedule


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


def _own(target: str, function: Callable[[int], float], step: int) -> float:
    """The rate that a function of the user's own gives.

    Raises:
        UserError: it fails, or gives no rate.
    """
    try:
        rate = float(function(step))
    except Exception as error:  # what the user's own function does may raise anything
        raise UserError(
            "scheduler.target", f"{target} fails at step {step}: {format_error(error)}", "fix it"
        ) from error
    if not 0 <= rate < math.inf:
        problem = f"{target} gave {rate} at step {step}, which is no learning rate"
        raise UserError("scheduler.target", problem, "return a finite number that is not negative")
    return rate
