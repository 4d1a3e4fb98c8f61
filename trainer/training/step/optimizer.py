"""The optimizer, and its state by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.schema import OptimizerTable
from trainer.distributed.shards import layout_of, own_part
from trainer.errors import UserError
from trainer.import_path import NO_PARTS, Parts
from trainer.training.step.schedule import LR_SCALE

ParameterGroup = dict[str, Any]
MOMENTUM = 0.95  # Nesterov's, of muon and sgd


def build_optimizer(model: nn.Module, table: OptimizerTable, parts: Parts = NO_PARTS) -> torch.optim.Optimizer:
    """The optimizer that `[optimizer]` names, for the parameters that are trained.

    Only matrices are decayed, not norms, biases and the decay rates of the recurrence. `parts`
    contain Muon and custom optimizers. A UserError if a group matches no parameter, or the
    optimizer is missing or cannot be made.
    """
    groups = parameter_groups(model, table)
    if table.target is not None:
        custom = parts.need("own optimizer", "optimizer.target")
        made: torch.optim.Optimizer = custom(model, groups, table)
        return made
    adamw = {"betas": (table.betas[0], table.betas[1]), "eps": table.eps}
    if table.name == "muon":
        muon = parts.need("muon", "optimizer.name")
        made = muon(model, groups, lr=table.lr, momentum=MOMENTUM, adamw=adamw)
        return made
    if table.name == "adamw":
        return torch.optim.AdamW(groups, lr=table.lr, **adamw, fused=True)  # type: ignore[arg-type]
    sgd: dict[str, Any] = {"lr": table.lr, "momentum": MOMENTUM, "nesterov": True}
    optimizer: torch.optim.SGD
    if layout_of(parameter for group in groups for parameter in group["params"]) is None:
        optimizer = torch.optim.SGD(groups, fused=True, **sgd)
    else:
        optimizer = SkippingSGD(groups, **sgd)  # the fused one does not take shards
    keep_buffers(optimizer)
    return optimizer


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
        found |= {names[id(parameter)]: dict(state) for parameter, state in part.state.items()}
    return found


def load_named_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: Mapping[str, Mapping[str, Any]]
) -> None:
    """Restore the result of `named_state`; the settings stay those of the config."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states: dict[str, Any] = {}
    for name, part in optimizer_parts(optimizer).items():
        order = [names[id(parameter)] for group in part.param_groups for parameter in group["params"]]
        # torch numbers parameters in the order of the groups.
        numbered = {number: dict(saved[each]) for number, each in enumerate(order) if each in saved}
        states[name] = {"state": numbered, "param_groups": part.state_dict()["param_groups"]}
    optimizer.load_state_dict(states.get("", states))


def parameter_groups(model: nn.Module, table: OptimizerTable) -> list[ParameterGroup]:
    """One group of matrices and one of vectors, for each `[[optimizer.group]]` and for the rest.

    Checkpoints know a group by its number, which its settings do not change.
    """
    found: dict[tuple[int, bool], ParameterGroup] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        number = group_number(name, table)
        is_vector = parameter.ndim < 2
        settings = {"weight_decay": 0.0 if is_vector else table.weight_decay, LR_SCALE: 1.0}
        if number >= 0:
            own = table.group[number]
            settings[LR_SCALE] = own.lr_scale
            if own.weight_decay is not None:  # a group's own decay holds for its vectors too
                settings["weight_decay"] = own.weight_decay
        found.setdefault((number, is_vector), {"params": [], **settings})["params"].append(parameter)
    # A pattern with a typing error would train everything with the defaults.
    used = {number for number, _ in found}
    unused = [repr(group.match) for number, group in enumerate(table.group) if number not in used]
    if unused:
        names = ", ".join(list(dict(model.named_parameters()))[:3])
        problem = f"{', '.join(unused)} matches no parameter"
        raise UserError("optimizer.group", problem, f"names are such as {names}")
    return [found[key] for key in sorted(found)]


def group_number(name: str, table: OptimizerTable) -> int:
    """The first `[[optimizer.group]]` that matches a parameter's name; -1: none."""
    return next((n for n, group in enumerate(table.group) if fnmatchcase(name, group.match)), -1)


def keep_buffers(optimizer: torch.optim.Optimizer) -> None:
    """Make momentum buffers: torch 2.13 leaves them uninitialized if the first step is skipped."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class Skipping(torch.optim.Optimizer):
    """An optimizer that does nothing where `found_inf` (float [], on the device) is set.

    A skipped step is computed and reverted, so that the host never asks the device.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters, or not."""
        groups = self.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    touched = [own_part(parameter), *map(own_part, self.state[parameter].values())]
                    before = [tensor.clone() for tensor in touched]
                    # One parameter at a time, so that only one copy exists.
                    self.param_groups = [{**group, "params": [parameter]}]
                    self._step_one(parameter, group)
                    if self.found_inf is None:
                        continue
                    for tensor, kept in zip(touched, before, strict=True):
                        tensor.copy_(torch.where(self.found_inf > 0, kept, tensor))
        finally:
            self.param_groups = groups
        return None

    def _step_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """The optimizer's own step of the only parameter in its groups."""
        super().step()


class SkippingSGD(Skipping, torch.optim.SGD):
    """torch's SGD for shards, which its fused one does not take (torch 2.13)."""

    def _step_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        flag, self.found_inf = self.found_inf, None  # torch's own step refuses it
        try:
            super()._step_one(parameter, group)
        finally:
            self.found_inf = flag
