"""Weights as safetensors: shared tensors are stored once, and a file loads only if it fits the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from trainer.distributed.shards import as_shard, own_rows
from trainer.errors import UserError
from trainer.files import parse_json

WEIGHTS_FILE = "model.safetensors"
SHARED_KEY = "shared"  # metadata: JSON, name of an omitted tensor -> name of the tensor that it shares memory with
MOST_NAMED = 5  # tensors named in one message


def read_weights(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors on the CPU (shared ones under every name) and metadata of a safetensors file or an exported directory.

    Raises:
        UserError: the file is missing, or damaged.
    """
    file = Path(path) / WEIGHTS_FILE if Path(path).is_dir() else Path(path)
    try:
        with safetensors.safe_open(str(file), framework="pt", device="cpu") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
            metadata: dict[str, str] = opened.metadata() or {}
        for name, owner in parse_json(metadata.get(SHARED_KEY, "{}")).items():
            tensors[name] = tensors[owner]
    except (OSError, safetensors.SafetensorError, ValueError, KeyError, AttributeError) as error:
        fix = "check the path, or write or download it again"
        raise UserError(str(file), f"is not a readable safetensors file ({error})", fix) from None
    return tensors, metadata


def load_weights(model: nn.Module, path: str | Path) -> dict[str, str]:
    """Load the weights of a file into `model`, all or none; returns the file's metadata. Of a sharded model each rank loads its
    rows.

    Raises:
        UserError: a tensor is missing, unknown, or has another shape; or tensors that the model ties differ in the file.
    """
    tensors, metadata = read_weights(path)
    check_fit(model, tensors, key="model.weights", path=path)
    own = model.state_dict()
    model.load_state_dict({name: as_shard(own_rows(tensor, own[name]), own[name]) for name, tensor in tensors.items()})
    return metadata


def tied_names(model: nn.Module) -> dict[str, str]:
    """Name of a parameter's further places in the model -> its first name."""
    first: dict[int, str] = {}
    names = model.named_parameters(remove_duplicate=False)
    return {name: owner for name, p in names if (owner := first.setdefault(id(p), name)) != name}


def check_fit(model: nn.Module, tensors: Mapping[str, Tensor], *, key: str, path: str | Path) -> None:
    """Refuse tensors that are not exactly those of `model` (which may be on the meta device), naming them."""
    own = model.state_dict()
    problems = [
        f"{name}: shape {list(tensors[name].shape)}, the model has {list(tensor.shape)}"
        for name, tensor in own.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    problems += [f"{name}: not in the file" for name in own if name not in tensors]
    problems += [f"{name}: the model has no such tensor" for name in tensors if name not in own]
    for name, first in ({} if problems else tied_names(model)).items():
        if not torch.equal(tensors[first], tensors[name]):
            problems.append(f"{name}: differs from {first}, which the model ties to it")
    if problems:
        more = f" and {len(problems) - MOST_NAMED} more" if len(problems) > MOST_NAMED else ""
        listed = "; ".join(problems[:MOST_NAMED])
        fix = "use the [model], the data.tokenizer and the release that the weights were trained with"
        raise UserError(key, f"{path} does not fit the model: {listed}{more}", fix)
