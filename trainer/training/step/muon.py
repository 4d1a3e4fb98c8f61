"""Muon (Jordan et al., 2024) for matrices and AdamW for the rest, as one optimizer that can skip a step on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SkippingMuon(torch.optim.Muon):
    """torch's Muon, which does nothing where `found_inf` (float [], on the device) says so, as its fused optimizers do.

    A skipped step is computed and taken back, one matrix at a time: the host never asks the device.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for group in self.param_groups:
            for parameter in group["params"]:
                # Or a first step that is skipped would leave one that is not finite.
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the matrices, or not."""
        if self.found_inf is None:
            return super().step(closure)  # type: ignore[no-untyped-call]
        is_bad, groups = self.found_inf > 0, self.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    touched = (parameter, self.state[parameter]["momentum_buffer"])
                    before = [tensor.clone() for tensor in touched]
                    self.param_groups = [{**group, "params": [parameter]}]
                    super().step()  # type: ignore[no-untyped-call]
                    for tensor, kept in zip(touched, before, strict=True):
                        tensor.copy_(torch.where(is_bad, kept, tensor))
        finally:
            self.param_groups = groups
        return None


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
