"""The optimizer, its state by parameter name; a run's length, and the learning rate over it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from trainer.config.schema import OptimizerTable, RunConfig, SchedulerTable
from trainer.distributed.strategy import layout_of
from trainer.errors import UserError
from trainer.import_path import refuse_arguments, resolve_target, users_code, with_own
from trainer.model.protocol import Role, parameter_roles
from trainer.options import ONE, MicroBatches
from trainer.training import NO_PARTS, Parts, need
from trainer.wording import short_repr

TRIED = 1000  # points, at most, at which a custom schedule is tried before the run, and its end
LR_SCALE = "lr_scale"
"""Key of a parameter group: its learning rate over that of the run."""
ParameterGroup = dict[str, Any]
Schedule = Callable[[int], float]
"""Maps the progress after a step (see `Length`: steps from 1, or tokens) to its rate."""


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
        micro_batches: of the steps.
    """

    total: int
    micro_tokens: int
    micro_batches: MicroBatches = ONE

    @classmethod
    def of(cls, config: RunConfig, micro_tokens: int) -> Self:
        """As `[train]` sets it."""
        if not config.train.tokens:
            return cls(config.train.steps, 0)
        return cls(config.train.tokens, micro_tokens, config.micro_batches)

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
    given = with_own({"steps": steps, "peak": peak}, table.args, "scheduler.args")
    refuse_arguments(partial(function, 1), f"{table.target} with a step, and", given, key="scheduler.args")
    schedule = partial(_custom_lr, table.target, partial(function, **given))
    # Refused now, not after days: a sample of all steps, the last included.
    first = min(length.in_full_steps(1), steps)
    for reached in [*range(first, steps, (steps - first) // TRIED + 1), steps]:
        schedule(reached)
    return schedule


def lr_at(step: int, *, steps: int, peak: float, table: SchedulerTable) -> float:
    """Learning rate of step `step` (1 .. `steps`); with a length in tokens, all three are tokens.

    Warm-up is linear and reaches `peak` at step `warmup_steps`. What follows is a function of t =
    (step - start) / (steps - start), where start is the end of the warm-up (for wsd, of the stable
    phase): constant: 1; linear: 1 - t; cosine: (1 + cos(pi t)) / 2 (Loshchilov and Hutter, 2017);
    wsd: 1, then 1 - t; the last three scaled to end at `min_lr_ratio` of the peak. A run shorter
    than its warm-up ends on the ramp.
    """
    if step <= table.warmup_steps:  # also the whole of a shorter run
        return peak * step / table.warmup_steps
    if table.name == "constant":
        return peak
    start = table.warmup_steps
    if table.name == "wsd":
        decay = round(table.decay_fraction * steps, 6)  # 0.07 * 100 is above 7
        start = max(start, steps - math.ceil(decay))
    progress = min(max(step - start, 0) / max(steps - start, 1), 1.0)
    height = 1 - progress
    if table.name == "cosine":
        height = (1 + math.cos(math.pi * progress)) / 2
    return peak * (table.min_lr_ratio + (1 - table.min_lr_ratio) * height)


def _custom_lr(target: str, function: Callable[[int], float], reached: int) -> float:
    """The rate that a custom function returns. A UserError if it fails, or returns no rate."""
    with users_code("scheduler.target", f"{target} fails for {reached}"):
        found: Any = function(reached)
        # float("0.1") would pass a text on as a number.
        rate = math.nan if isinstance(found, str) else float(found)
    if not 0 <= rate < math.inf:
        problem = f"{target} gave {found!r} for {reached}, which is no learning rate"
        raise UserError("scheduler.target", problem, "return a finite number that is not negative")
    return rate


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` in the next step, in every parameter group, times the group's own scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(LR_SCALE, 1.0)


def build_optimizer(
    model: nn.Module, table: OptimizerTable, parts: Parts = NO_PARTS, roles: Mapping[str, Role] | None = None
) -> torch.optim.Optimizer:
    """The optimizer that `[optimizer]` names, for the parameters that are trained.

    Vectors (norms, biases, decay rates of a recurrence) are not decayed. `parts` make Muon and
    custom optimizers. `roles`: of the parameters, where the model is sharded by now. A UserError if
    a group has no parameter, one is complex, or a custom optimizer is missing or cannot be made.
    """
    groups = parameter_groups(model, table, roles)
    if table.target is not None or table.name == "muon":
        key = "optimizer.name" if table.target is None else "optimizer.target"
        return need(parts.models, key).build_optimizer(model, groups, table)
    if table.name == "adamw":
        betas = table.betas[0], table.betas[1]
        return torch.optim.AdamW(groups, lr=table.lr, betas=betas, eps=table.eps, fused=True)
    # The fused one does not take shards (torch 2.13); a step of the other waits for the device.
    is_whole = layout_of(parameter for group in groups for parameter in group["params"]) is None
    optimizer = torch.optim.SGD(groups, table.lr, table.momentum, nesterov=table.momentum > 0, fused=is_whole)
    if table.momentum:
        keep_buffers(optimizer)
    return optimizer


def keep_buffers(optimizer: torch.optim.Optimizer) -> None:
    """Make momentum buffers, for a dampening of 0: torch 2.13 leaves them uninitialized if the first
    step is skipped."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one; its state dict holds that of each part, by the part's name."""

    parts: dict[str, torch.optim.Optimizer]


def optimizer_parts(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """The parts of a combined optimizer by name; of another one itself, without a name."""
    return optimizer.parts if isinstance(optimizer, CombinedOptimizer) else {"": optimizer}


def named_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    """The optimizer's state of each parameter, by the parameter's name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, dict[str, Any]] = {}
    for part in optimizer_parts(optimizer).values():
        with users_code("optimizer.target", "its state cannot be saved", "keep it with a parameter"):
            for key, state in part.state.items():
                if id(key) not in names:
                    raise TypeError(f"{short_repr(key)} is no parameter of the model")
                found[names[id(key)]] = dict(state)
    return found


def plain_values(group: ParameterGroup) -> dict[str, Any]:
    """The numbers and words of a group, but for the rate, which the schedule sets."""
    return {key: own for key, own in group.items() if type(own) in (bool, int, float, str) and key != "lr"}


def group_counters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What a custom optimizer's groups hold that they were not built with, such as counts: the
    `plain_values` that differ, and all tensors."""
    found = []
    for group, built in zip(optimizer.param_groups, getattr(optimizer, "built_groups", ()), strict=False):
        tensors = {key: own for key, own in group.items() if isinstance(own, torch.Tensor) and key != "lr"}
        found.append(dict(plain_values(group).items() - built.items()) | tensors)
    return found


def load_named_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: Mapping[str, Mapping[str, Any]]
) -> None:
    """Restore the result of `named_state`. The settings stay those of the config, and what is not
    saved, such as buffers of a momentum that was 0 before, stays as it was built."""
    saved = {**named_state(optimizer, model), **saved}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states: dict[str, Any] = {}
    for name, part in optimizer_parts(optimizer).items():
        order = [names[id(parameter)] for group in part.param_groups for parameter in group["params"]]
        # torch numbers parameters in the order of the groups.
        numbered = {number: dict(saved[each]) for number, each in enumerate(order) if each in saved}
        states[name] = {"state": numbered, "param_groups": part.state_dict()["param_groups"]}
    optimizer.load_state_dict(states.get("", states))
    for part in optimizer_parts(optimizer).values():
        for parameter, state in part.state.items():
            for key, value in saved.get(names[id(parameter)], {}).items():
                # torch has converted all but `step` to the type of the parameter.
                if isinstance(value, torch.Tensor) and state[key].dtype != value.dtype:
                    state[key] = value.to(state[key].device)


def parameter_groups(
    model: nn.Module, table: OptimizerTable, roles: Mapping[str, Role] | None = None
) -> list[ParameterGroup]:
    """A group for each role of parameters in each `[[optimizer.group]]`, and in the rest.

    A group has its `role`, for optimizers of one's own; `roles`: see `build_optimizer`.
    """
    found: dict[tuple[int, Role], ParameterGroup] = {}
    roles = roles or parameter_roles(model)
    sparse = {
        id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse
    }
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if (parameter.is_complex() or id(parameter) in sparse) and table.target is None:
            with users_code("optimizer.name", f"{table.name} cannot train {name}", "name an optimizer.target that can"):
                raise TypeError("it is complex, or its gradient is sparse")
        # The first group that matches; -1: none.
        number = next((n for n, group in enumerate(table.group) if fnmatchcase(name, group.match)), -1)
        role = roles[name]
        settings = {"role": role, "weight_decay": 0.0 if role == "vector" else table.weight_decay, LR_SCALE: 1.0}
        if number >= 0:
            own = table.group[number]
            settings[LR_SCALE] = own.lr_scale
            if own.weight_decay is not None:  # a group's own decay holds for its vectors too
                settings["weight_decay"] = own.weight_decay
        found.setdefault((number, role), {"params": [], **settings})["params"].append(parameter)
    # A pattern with a typing error would train everything with the defaults.
    used = {number for number, _ in found}
    unused = [repr(group.match) for number, group in enumerate(table.group) if number not in used]
    if unused:
        names = ", ".join(list(dict(model.named_parameters()))[:3])
        problem = f"{', '.join(unused)} is the first match of no parameter that is trained"
        raise UserError("optimizer.group", problem, f"names are such as {names}")
    return [found[key] for key in sorted(found)]
