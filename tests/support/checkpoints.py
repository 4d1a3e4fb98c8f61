"""What a checkpoint holds, whole, however many ranks have written it; and checkpoints written with any content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.training.checkpointing import checkpoint as files
from trainer.training.checkpointing.checkpoint import TensorPart
from trainer.training.checkpointing.model_part import open_model, whole_weights
from trainer.training.checkpointing.tensor_files import Rows, TensorFiles
from trainer.training.checkpointing.tree import pack, unpack


def model_content(path: Path) -> dict[str, Any]:
    """Weights, optimizer by name, and loss scaling of a checkpoint of format 2."""
    tensors = open_model(path, json.loads((path / files.STATE_FILE).read_text()))
    values = {key: unpack(tensors.values[key], tensors.read) for key in ("optimizer", "scaler")}
    return {"model": whole_weights(tensors), **values}


def weights(path: Path) -> dict[str, torch.Tensor]:
    """The model's weights in a checkpoint, or in a run's newest one."""
    path = path / "checkpoints" / "latest" if (path / "checkpoints").is_dir() else path
    return model_content(path)["model"]


def content(path: Path) -> dict[str, Any]:
    """All of a checkpoint but state.json, states of ledgers as their bytes."""
    found: dict[str, Any] = {"model": model_content(path)}
    for file in sorted(path.glob("rank_*")):
        found[file.name] = file.read_bytes() if file.suffix == ".rows" else file_content(file)
    return found


def file_content(file: Path) -> Any:
    """What one file of tensors and values holds."""
    tensors = TensorFiles([file])
    return unpack(tensors.values, tensors.read)


def write_content(file: Path, value: Any) -> None:
    """Write a file of that content."""
    values, tensors = pack(value)
    files.write_part(file, TensorPart({name: Rows.all_of(tensor) for name, tensor in tensors.items()}, values))


def sign(path: Path) -> None:
    """Make the marker agree with the files that it lists."""
    marker = json.loads((path / files.MARKER).read_text())
    marker["files"] = {name: files._fingerprint(path / name) for name in marker["files"]}
    (path / files.MARKER).write_text(json.dumps(marker))


def write_former(source: Path, path: Path) -> None:
    """Write a checkpoint with AdamW, without groups of its own, again as format 1 had it."""
    path.mkdir(parents=True)
    of_source = weights(source)
    matrices = [name for name in model_content(source)["optimizer"] if of_source[name].ndim >= 2]
    vectors = [name for name in model_content(source)["optimizer"] if of_source[name].ndim < 2]
    torch.save(former_content(source, parts={"": [*matrices, *vectors]}), path / "model.pt")
    state = json.loads((source / files.STATE_FILE).read_text())
    for rank in range(state["world_size"]):
        torch.save(file_content(source / files.rank_file(rank)), path / f"rank_{rank:03d}.pt")
        (path / files.rows_file(rank)).write_bytes((source / files.rows_file(rank)).read_bytes())
    del state["model_files"]
    (path / files.STATE_FILE).write_text(json.dumps({**state, "format_version": 1}))
    listed = {file.name: files._fingerprint(file) for file in path.iterdir()}
    marker = {"format_version": 1, "step": state["step"], "files": listed}
    (path / files.MARKER).write_text(json.dumps(marker))


def former_content(path: Path, *, parts: Mapping[str, list[str]]) -> dict[str, Any]:
    """What version 1 would have saved of a checkpoint's model: the optimizer's state by number.

    Args:
        parts: names of the parameters in the optimizer's order, by its parts.
    """
    new = model_content(path)
    optimizer: dict[str, Any] = {}
    for part, names in parts.items():
        state = {number: new["optimizer"][name] for number, name in enumerate(names) if name in new["optimizer"]}
        own = {"state": state, "param_groups": [{"params": list(range(len(names)))}]}
        optimizer = own if not part else {**optimizer, part: own}
    return {"model": new["model"], "optimizer": optimizer, "scaler": new["scaler"]}
