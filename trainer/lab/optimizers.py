"""More optimizers: Muon (Jordan et al., 2024) with AdamW for other parameters, and custom ones.

It could go if torch's Muon skipped a step on the device, and took shards.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.schema import OptimizerTable
from trainer.distributed.strategy import gathered, layout_of, own_part
from trainer.errors import UserError
from trainer.import_path import refuse_arguments, resolve_target, users_code, with_own
from trainer.lab.weights import own_rows
from trainer.on_device import step_unless
from trainer.training.optimizer import CombinedOptimizer, ParameterGroup, keep_buffers, plain_values
from trainer.wording import counted, few


def build_optimizer(model: nn.Module, groups: list[ParameterGroup], table: OptimizerTable) -> torch.optim.Optimizer:
    """Muon and AdamW over these groups, or the custom optimizer."""
    if table.target is not None:
        return build_custom(model, groups, table, table.target)
    others = [group for group in groups if not is_for_muon(group)]
    return MuonWithAdamW([group for group in groups if is_for_muon(group)], others, table)


def is_for_muon(group: ParameterGroup) -> bool:
    """Whether Muon takes a group: matrices, without tables of embeddings and the output layer."""
    return bool(group["role"] == "matrix")


class Skipping:
    """Takes steps that change nothing where `found_inf`, a float on the device, is above 0."""

    _step_supports_amp_scaling = True
    found_inf = torch.zeros(())


class SkippingMuon(Skipping, torch.optim.Muon):
    """torch's Muon; a skipped step is reverted, so that the host never asks the device. Of a
    sharded matrix, each rank orthogonalizes the whole and keeps its rows."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        keep_buffers(self)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
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
                    for tensor, kept in zip(touched, before, strict=True):
                        tensor.copy_(torch.where(self.found_inf > 0, kept, tensor))
        finally:
            self.param_groups = groups

    def _step_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        if layout_of([parameter]) is None:
            super().step()  # type: ignore[no-untyped-call]
            return
        # As torch's: momentum is elementwise, so that only one matrix has to be gathered.
        assert parameter.grad is not None
        grad, momentum = own_part(parameter.grad), own_part(self.state[parameter]["momentum_buffer"])
        momentum.lerp_(grad, 1.0 - group["momentum"])
        update = momentum
        if group["nesterov"]:
            update = grad.lerp(momentum, group["momentum"])
        whole = torch.nn.Parameter(torch.zeros(parameter.shape, dtype=grad.dtype, device=grad.device))
        whole.grad = gathered(update, parameter)
        plain = {**group, "params": [whole], "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
        torch.optim.Muon([plain]).step()  # type: ignore[no-untyped-call]
        weights = own_part(parameter)
        weights.mul_(1.0 - group["lr"] * group["weight_decay"])
        weights.add_(own_rows(whole.detach(), parameter))


class MuonWithAdamW(Skipping, CombinedOptimizer):
    """Muon for the groups of matrices and AdamW for the others, with the parameter groups of both.

    Muon's updates are scaled to the root mean square of AdamW's (Liu et al., 2025, arXiv
    2502.16982), so that one learning rate and weight decay fit both.
    """

    def __init__(self, matrices: list[ParameterGroup], others: list[ParameterGroup], table: OptimizerTable) -> None:
        super().__init__([*matrices, *others], {"lr": table.lr})
        self.parts = {}
        if matrices:
            self.parts["muon"] = SkippingMuon(
                matrices, lr=table.lr, momentum=table.momentum, adjust_lr_fn="match_rms_adamw"
            )
        if others:
            betas = table.betas[0], table.betas[1]
            self.parts["adamw"] = torch.optim.AdamW(others, lr=table.lr, betas=betas, eps=table.eps, fused=True)
        self._link_groups()

    def _link_groups(self) -> None:
        # The parts' own groups, so that a learning rate that is set here is theirs.
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]

    def step(self) -> None:  # type: ignore[override]
        """Step both."""
        for part in self.parts.values():
            step_unless(self.found_inf > 0, part)

    def state_dict(self) -> dict[str, Any]:
        """The state of each part, by its name."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both parts."""
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])
        self._link_groups()


def build_custom(
    model: nn.Module, groups: list[ParameterGroup], table: OptimizerTable, target: str
) -> torch.optim.Optimizer:
    """The custom optimizer, which must take all parameters that are trained, and a step without arguments."""
    build = resolve_target(target, "optimizer.target")
    given = with_own({"lr": table.lr}, table.args, "optimizer.args", "set optimizer.lr")
    refuse_arguments(partial(build, groups), f"{target} with parameter groups, and", given, key="optimizer.args")
    with users_code("optimizer.target", f"{target} fails"):
        optimizer = build(groups, **given)
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
        problem = f"{target} leaves {counted(len(left), 'parameter')} out, which would never be trained: {few(left)}"
        raise UserError("optimizer.target", problem, "give it all parameters; freeze those to be left (requires_grad_)")
    fused = [each for each in optimizer.param_groups if each.get("fused")]
    if fused and issubclass(type(optimizer), torch.optim.SGD):
        if any(each["dampening"] for each in fused):  # which torch leaves out where a buffer begins
            raise UserError("optimizer.args", "fused SGD cannot have a dampening here", "set fused = false")
        keep_buffers(optimizer)  # those without momentum leave them alone
    built: Any = optimizer  # see `group_counters`
    built.built_groups = [plain_values(group) for group in optimizer.param_groups]
    return optimizer
