"""Muon (Jordan et al., 2024) for matrices and AdamW for the rest, as one optimizer that can skip a step on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.distributed.shards import gathered, layout_of, own_part, own_rows


class Skipping(torch.optim.Optimizer):
    """An optimizer with one buffer per parameter, which does nothing where `found_inf` (float [], on the device) says so, as
    torch's fused optimizers do.

    A skipped step is computed and taken back, one parameter at a time: the host never asks the device.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None

    def keep_buffers(self) -> None:
        """Make the buffers now, or a first step that is skipped would leave some that are not finite."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

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
        self.keep_buffers()

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
    """Two optimizers as one, with the parameter groups of both.

    Args:
        matrices: parameter groups of matrices, for Muon. Its updates are scaled to the root mean square of AdamW's
            (Liu et al., 2025, arXiv 2502.16982), so that one learning rate and weight decay fit both.
        others: parameter groups for AdamW.
        lr: learning rate of both.
        momentum: of Muon.
        adamw: further settings of AdamW.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None

    def __init__(
        self,
        matrices: list[dict[str, Any]],
        others: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        adamw: dict[str, Any],
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
