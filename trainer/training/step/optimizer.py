"""The optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.schema import OptimizerTable
from trainer.distributed.shards import gathered, layout_of, own_part, own_rows
from trainer.errors import UserError
from trainer.import_path import refuse_arguments, resolve_target, users_code
from trainer.training.step.schedule import LR_SCALE
from trainer.wording import counted, few

ParameterGroup = dict[str, Any]


def build_optimizer(model: nn.Module, table: OptimizerTable) -> torch.optim.Optimizer:
    """The optimizer that `[optimizer]` names, for the parameters that are trained.

    Weight decay is that of matrices alone: norms, biases and decay rates of the recurrence are not decayed.

    Raises:
        UserError: a group matches no parameter; or a target of the user's own does not fit or fails.
    """
    groups = parameter_groups(model, table)
    adamw = {"betas": (table.betas[0], table.betas[1]), "eps": table.eps}
    if table.target is not None:
        return _own(table.target, model, groups, table)
    if table.name == "muon":
        hidden = {id(parameter) for parameter in _hidden_matrices(model)}
        matrices, others = _split(groups, hidden)
        return MuonWithAdamW(matrices, others, lr=table.lr, momentum=table.momentum, adamw=adamw)
    if table.name == "sgd":
        sgd: dict[str, Any] = {"momentum": table.momentum, "nesterov": table.momentum > 0}
        shards = layout_of(parameter for group in groups for parameter in group["params"]) is not None
        optimizer = (
            SkippingSGD(groups, lr=table.lr, **sgd)
            if shards
            else torch.optim.SGD(groups, lr=table.lr, fused=True, **sgd)
        )
        if table.momentum:
            keep_buffers(optimizer)
        return optimizer
    return torch.optim.AdamW(groups, lr=table.lr, **adamw, fused=True)  # type: ignore[arg-type]


def optimizer_parts(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    return optimizer.parts if isinstance(optimizer, MuonWithAdamW) else {"": optimizer}


def named_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    """The optimizer's state of each parameter, by the parameter's name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: dict(state)
        for part in optimizer_parts(optimizer).values()
        for parameter, state in part.state.items()
    }


def load_named_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: Mapping[str, Mapping[str, Any]]
) -> None:
    """Restore what `named_state` gave; the settings are the config's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for part in optimizer_parts(optimizer).values():
        order = [names[id(parameter)] for group in part.param_groups for parameter in group["params"]]
        numbered = {number: dict(saved[name]) for number, name in enumerate(order) if name in saved}
        part.load_state_dict({"state": numbered, "param_groups": part.state_dict()["param_groups"]})
    if isinstance(optimizer, MuonWithAdamW):
        optimizer.link_groups()


def parameter_groups(model: nn.Module, table: OptimizerTable) -> list[ParameterGroup]:
    """Matrices and vectors apart, of each `[[optimizer.group]]` and of the rest.

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
            if own.weight_decay is not None:
                settings["weight_decay"] = own.weight_decay
        found.setdefault((number, is_vector), {"params": [], **settings})["params"].append(parameter)
    used = {number for number, _ in found}
    if unused := [group.match for number, group in enumerate(table.group) if number not in used]:
        names = ", ".join(list(dict(model.named_parameters()))[:3])
        problem = f"{', '.join(map(repr, unused))} matches no parameter"
        raise UserError("optimizer.group", problem, f"names are such as {names}")
    return [found[key] for key in sorted(found)]


def group_number(name: str, table: OptimizerTable) -> int:
    """The first `[[optimizer.group]]` that matches a parameter's name; -1: none."""
    return next((n for n, group in enumerate(table.group) if fnmatchcase(name, group.match)), -1)


def _hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Matrices but those of embeddings and of outputs: what has a row per token id."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    sizes = {weight.shape[0] for weight in tables}
    return [p for p in model.parameters() if p.ndim == 2 and p.requires_grad and p.shape[0] not in sizes]


def _split(groups: list[ParameterGroup], chosen: set[int]) -> tuple[list[ParameterGroup], list[ParameterGroup]]:
    """The groups of chosen parameters, by id, and those of the others."""
    halves: tuple[list[ParameterGroup], list[ParameterGroup]] = [], []
    for group in groups:
        for half, is_chosen in zip(halves, (True, False), strict=True):
            if parameters := [p for p in group["params"] if (id(p) in chosen) == is_chosen]:
                half.append({**group, "params": parameters})
    return halves


def resolve_own(target: str, groups: list[ParameterGroup], table: OptimizerTable) -> Any:
    """The function of the user's own that makes an optimizer."""
    build = resolve_target(target, "optimizer.target")
    given = {"lr": table.lr, **table.args}
    refuse_arguments(partial(build, groups), f"{target} with parameter groups, and", given, key="optimizer.args")
    return build


def _own(target: str, model: nn.Module, groups: list[ParameterGroup], table: OptimizerTable) -> torch.optim.Optimizer:
    build = resolve_own(target, groups, table)
    with users_code("optimizer.target", f"{target} fails"):
        optimizer = build(groups, lr=table.lr, **table.args)
    if not isinstance(optimizer, torch.optim.Optimizer):
        problem = f"{target} gave a {type(optimizer).__name__}, not an optimizer"
        raise UserError("optimizer.target", problem, "return a torch.optim.Optimizer")
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError as error:
        problem = f"the step of {target}'s {type(optimizer).__name__} takes arguments, which the trainer does not give: {error}"
        raise UserError("optimizer.target", problem, "return one whose step() needs none") from error
    taken = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in taken]
    if left:
        problem = f"{target} leaves {counted(len(left), 'parameter')} out, which would never be trained: {few(left)}"
        raise UserError("optimizer.target", problem, "give it all parameters; freeze those to be left (requires_grad_)")
    made: torch.optim.Optimizer = optimizer
    return made


def keep_buffers(optimizer: torch.optim.Optimizer) -> None:
    """Make momentum buffers now: torch 2.13 leaves them uninitialized if the first step is skipped."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class Skipping(torch.optim.Optimizer):
    """An optimizer with one buffer per parameter, which does nothing where `found_inf` (float [], on the device) says so, as
    torch's fused optimizers do.

    A skipped step is computed and taken back, one parameter at a time: the host never asks the device.
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
        """The optimizer's own step of the one parameter that is in its groups."""
        super().step()


class SkippingSGD(Skipping, torch.optim.SGD):
    """torch's SGD for shards, which its fused one does not take (torch 2.13)."""

    def _step_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        flag, self.found_inf = self.found_inf, None  # which torch's own refuses
        try:
            super()._step_one(parameter, group)
        finally:
            self.found_inf = flag


class SkippingMuon(Skipping, torch.optim.Muon):
    """torch's Muon; of a matrix in shards, each rank orthogonalizes the whole and keeps its rows."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        keep_buffers(self)

    def _step_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        if layout_of([parameter]) is None:
            super()._step_one(parameter, group)
            return
        # As torch's: the momentum is that of each element, so that one matrix alone is gathered.
        assert parameter.grad is not None
        grad, momentum = own_part(parameter.grad), own_part(self.state[parameter]["momentum_buffer"])
        momentum.lerp_(grad, 1.0 - group["momentum"])
        update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        whole = torch.nn.Parameter(torch.zeros(parameter.shape, dtype=grad.dtype, device=grad.device))
        whole.grad = gathered(update, parameter)
        plain = {**group, "params": [whole], "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
        torch.optim.Muon([plain]).step()  # type: ignore[no-untyped-call]
        weights = own_part(parameter)
        weights.mul_(1.0 - group["lr"] * group["weight_decay"])
        weights.add_(own_rows(whole.detach(), parameter))


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the groups of matrices and AdamW for the others, as one optimizer with the parameter groups of both.

    Muon's updates are scaled to the root mean square of AdamW's (Liu et al., 2025, arXiv 2502.16982), so that one learning
    rate and weight decay fit both.

    Args:
        momentum: of Muon.
        adamw: further settings of AdamW.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None

    def __init__(
        self, matrices: list[ParameterGroup], others: list[ParameterGroup], *, lr: float, momentum: float, adamw: Any
    ) -> None:
        super().__init__([*matrices, *others], {"lr": lr})
        self.parts: dict[str, torch.optim.Optimizer] = {}
        if matrices:
            self.parts["muon"] = SkippingMuon(matrices, lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        if others:
            self.parts["adamw"] = torch.optim.AdamW(others, lr=lr, **adamw, fused=True)
        self.link_groups()

    def link_groups(self) -> None:
        """Have the parts' own groups as the groups, so that a learning rate that is set is theirs."""
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step both."""
        for part in self.parts.values():
            guarded: Any = part
            guarded.found_inf = self.found_inf
            try:
                part.step()
            finally:
                del guarded.found_inf

    def state_dict(self) -> dict[str, Any]:
        """The state of each part, by its name."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both parts."""
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])
        self.link_groups()
