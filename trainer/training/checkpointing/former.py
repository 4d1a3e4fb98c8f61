"""Checkpoints of format 1, as versions before 0.2 wrote them: `torch.save` files, read with `weights_only=True`.

model.pt        rank 0: weights, optimizer, loss scaler
rank_000.pt     every rank: its ledger shard, data cursors, generator
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.training.checkpointing.tensor_files import DamagedFile

MODEL_FILE = "model.pt"


def rank_file(rank: int) -> str:
    """File name of a rank's own part."""
    return f"rank_{rank:03d}.pt"


def read_former(path: Path) -> dict[str, Any]:
    """A file's content, on the CPU.

    Raises:
        DamagedFile: it holds anything but a dict of tensors and plain values.
    """
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - what a damaged file makes torch raise
        raise DamagedFile(f"{path}: cannot be read: {str(error).splitlines()[0] if str(error) else error!r}") from None
    if not isinstance(value, dict):
        raise DamagedFile(f"{path}: holds a {type(value).__name__}, not a checkpoint")
    return value


def optimizer_by_name(saved: Mapping[str, Any], names_of_parts: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The state of each parameter by its name, from a `state_dict()` that knows it by its number.

    Args:
        names_of_parts: of the parameters in their order, by the name of the optimizer's part; "" for one without parts.
    """
    found: dict[str, Any] = {}
    for part, names in names_of_parts.items():
        state = (saved[part] if part else saved)["state"]
        if state.keys() - set(range(len(names))):
            raise ValueError("it is of other parameters")
        found.update({names[number]: values for number, values in state.items()})
    return found
