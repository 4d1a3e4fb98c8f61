"""Builds `optimizer.target`, a custom optimizer, and checks that the trainer can run it.

It could go if custom optimizers were trusted to take every parameter.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer.config.schema import OptimizerTable
from trainer.errors import UserError
from trainer.import_path import refuse_arguments, resolve_target, users_code
from trainer.training.step.optimizer import ParameterGroup
from trainer.wording import counted, few


def resolve_own(target: str, groups: list[ParameterGroup], table: OptimizerTable) -> Any:
    """The custom function that makes an optimizer."""
    build = resolve_target(target, "optimizer.target")
    given = {"lr": table.lr, **table.args}
    refuse_arguments(partial(build, groups), f"{target} with parameter groups, and", given, key="optimizer.args")
    return build


def build(model: nn.Module, groups: list[ParameterGroup], table: OptimizerTable) -> torch.optim.Optimizer:
    """The custom optimizer, which must take all parameters that are trained, and a step without arguments."""
    target = table.target or ""
    build = resolve_own(target, groups, table)
    with users_code("optimizer.target", f"{target} fails"):
        optimizer = build(groups, lr=table.lr, **table.args)
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        problem = f"{target} gave a {kind}, not an optimizer"
        raise UserError("optimizer.target", problem, "return a torch.optim.Optimizer")
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError as error:
        problem = f"the step of {target}'s {kind} takes arguments, which the trainer does not give: {error}"
        raise UserError("optimizer.target", problem, "return one whose step() needs none") from error
    taken = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in taken]
    if left:
        parameters = counted(len(left), "parameter")
        problem = f"{target} leaves {parameters} out, which would never be trained: {few(left)}"
        raise UserError("optimizer.target", problem, "give it all parameters; freeze those to be left (requires_grad_)")
    made: torch.optim.Optimizer = optimizer
    return made
