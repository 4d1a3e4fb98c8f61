"""Weights as safetensors: shared tensors are stored once; a file loads only if it fits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from trainer.distributed.strategy import as_shard, is_dtensor, own_range
from trainer.errors import UserError
from trainer.files import open_plain, parse_json
from trainer.metrics.logger import get_logger
from trainer.model.protocol import tied_names
from trainer.training.train_state import misfits
from trainer.wording import few

logger = get_logger(__name__)
WEIGHTS_FILE = "model.safetensors"
SHARED_KEY = "shared"
"""In the metadata: JSON, name of an omitted tensor -> the stored one that shares its memory."""


def read_weights(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors on the CPU (shared ones under every name) and metadata of a file or an export."""
    file = Path(path)
    try:
        if file.is_dir():
            file = file / WEIGHTS_FILE
        # By its descriptor: safetensors opens no path that is not UTF-8.
        with (
            open_plain(file) as plain,
            safetensors.safe_open(f"/dev/fd/{plain.fileno()}", framework="pt", device="cpu") as opened,
        ):
            names: list[str] = list(opened.keys())
            tensors = {name: opened.get_tensor(name) for name in names}
            metadata: dict[str, str] = opened.metadata() or {}
        share(tensors, parse_json(metadata.get(SHARED_KEY, "{}")))
    except (OSError, safetensors.SafetensorError, ValueError) as error:
        fix = "check the path, or write or download it again"
        raise UserError(str(file), f"is not a readable safetensors file ({error})", fix) from None
    return tensors, metadata


def share(tensors: dict[str, Tensor], shared: object) -> None:
    """Add tensors that are stored under another name (`shared`: names by name), or a ValueError."""
    if not isinstance(shared, dict):
        raise ValueError("shared tensors are not named by others")
    stored = dict(tensors)
    for name, owner in shared.items():
        if name in stored or not isinstance(owner, str) or owner not in stored:
            raise ValueError(f"{name} is no other name of a stored tensor")
        tensors[name] = stored[owner]


def tokenizer_mark(tokenizer: str) -> str:
    """What tells `data.tokenizer` from others: the digest of a tokenizer.json, a built-in's name."""
    return hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest() if tokenizer.endswith(".json") else tokenizer


def load_weights(model: nn.Module, path: str | Path, tokenizer: str) -> None:
    """Load a file's weights into `model`, all or none; see `check_fit`. `tokenizer`: the run's."""
    tensors, metadata = read_weights(path)
    check_fit(model, tensors, key="model.weights", path=path)
    own = model.state_dict()
    rows = {name: as_shard(own_rows(tensor, own[name]), own[name]) for name, tensor in tensors.items()}
    model.load_state_dict(rows)
    logger.info("beginning with the weights of %s", path)
    mark = tokenizer_mark(tokenizer)
    if metadata.get("tokenizer", mark) != mark:  # files of other programs do not say
        text = "%s was trained with another tokenizer than %s: its ids may mean other tokens"
        logger.warning(text, path, tokenizer)


def own_rows(whole: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this rank would hold if it were laid out as `like` is."""
    if not is_dtensor(like):
        return whole
    start, stop = own_range(like)
    return whole[start:stop]


def check_fit(model: nn.Module, tensors: Mapping[str, Tensor], *, key: str, path: str | Path) -> None:
    """Refuse tensors that are not exactly those of `model` (on the meta device or any other)."""
    own = model.state_dict()
    problems = misfits(own, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    if not problems:  # only then does the file have every tensor
        for name, tensor in tensors.items():
            if tensor.is_floating_point() != own[name].is_floating_point():
                problems.append(f"{name} is of {tensor.dtype}, the model's of {own[name].dtype}")
        for name, first in tied_names(model).items():
            if tensors[first] is not tensors[name] and not torch.equal(tensors[first], tensors[name]):
                problems.append(f"{name} differs from {first}, which the model ties to it")
    if problems:
        fix = "use the [model], the data.tokenizer and the release that trained the weights"
        raise UserError(key, f"{path} does not fit the model: {few(problems)}", fix)
