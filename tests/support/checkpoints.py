"""What a checkpoint holds, whole, however many ranks have written it; and checkpoints written with any content."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trainer.tools.saved_model import whole_weights
from trainer.training import checkpoint as files
from trainer.training.tensor_files import Rows, TensorFiles, TensorPart, model_file, pack, rank_file, unpack, write_part
from trainer.training.train_state import open_model


def model_content(path: Path) -> dict[str, Any]:
    """Weights, optimizer by name, and tensors of extensions of a checkpoint."""
    tensors = open_model(path, json.loads((path / files.STATE_FILE).read_text()))
    optimizer = unpack(tensors.values["optimizer"], tensors.read)
    others = [name for name in tensors.shapes if not name.startswith(("model.", "optimizer."))]
    return {
        "model": whole_weights(tensors),
        "optimizer": optimizer,
        "others": {name: tensors.read(name) for name in others},
    }


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
    write_part(file, TensorPart({name: Rows.all_of(tensor) for name, tensor in tensors.items()}, values))


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something is in nested values, inner ones included."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (*above, key)
        yield from places(each, (*above, key))


def sign(path: Path) -> None:
    """Make the marker agree with the files that it lists."""
    marker = json.loads((path / files.MARKER).read_text())
    marker["files"] = {name: files._fingerprint(path / name) for name in marker["files"]}
    (path / files.MARKER).write_text(json.dumps(marker))


STATE = {"data_shards": 1, "model_files": [0], "reached": 1, "tokens": [1, 1], "gns": None, "extensions": {}}
STATE |= {f"{what}_is_due": False for what in ("evaluation", "boundary")}
STATE |= {"tracker": {"tokens_seen": 1, "smoothed": {}}, "config": {}}


def make_checkpoint(directory: Path, step: int, value: float = 1.0) -> Path:
    """A whole checkpoint, of a model with one weight."""
    staging = files.staging_dir(directory, step)
    staging.mkdir(parents=True)
    write_content(staging / model_file(0), {"w": torch.full((100,), value)})
    write_content(staging / rank_file(0), {"data": None})
    return files.finish(directory, step, {**STATE, "step": step})
