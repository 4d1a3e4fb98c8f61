"""Memory of this process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn


def resident_bytes() -> int:
    """What is in use; 0 where it is not known."""
    file = Path("/proc/self/status")
    if not file.exists():  # not Linux
        return 0
    return int(file.read_text(encoding="utf-8").partition("VmRSS:")[2].split()[0]) * 1024


def saved_bytes(model: nn.Module, tokens: Tensor) -> int:
    """What the forward keeps for the backward, next to the parameters."""
    kept = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in kept:
            kept.add(storage.data_ptr())
            total += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens=tokens, state=None)
    return total
