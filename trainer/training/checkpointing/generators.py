"""The states of torch's random generators: what is drawn again must be what was drawn before."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Of the CPU's generator and, where there is one, the device's; both are kept on the host, so nothing waits."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_generator_states(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Go on from `generator_states`."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
