"""Tensors of a checkpoint as safetensors: whole, or as rows of them in the files of several ranks.

The header names each tensor's first row as torch.distributed.checkpoint does
(`HuggingFaceStorageWriter` with `save_distributed`), so that `HuggingFaceStorageReader` reads the
same files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from trainer.errors import UserError
from trainer.files import open_plain, replacing, replacing_path

# Keys of a file's metadata, each of JSON.
_OFFSETS = "DCP_SHARDING_INFO"  # name -> {"saved_offsets": [first row, 0, ...]}, as torch names it
_SHAPES = "shapes"  # name -> shape of the whole tensor
_VALUES = "values"  # everything else


class CheckpointError(Exception):
    """A checkpoint is damaged or of another program; the message names the file and the problem."""


class Rows(NamedTuple):
    """Consecutive rows of a tensor, or all of it."""

    tensor: Tensor
    start: int  # number of the first row
    shape: tuple[int, ...]  # the shape of the whole tensor

    @classmethod
    def all_of(cls, tensor: Tensor) -> Rows:
        """The whole tensor."""
        return cls(tensor, 0, tuple(tensor.shape))


class TensorPart(NamedTuple):
    """A file of tensors and plain values."""

    rows: Mapping[str, Rows]
    values: Any = None


def write_rows(path: Path, states: Iterator[Tensor]) -> None:
    """Write a file of states, given in pieces [n, width] on the CPU, as `write_part` does."""
    with replacing(path) as file:
        for piece in states:
            file.write(piece.view(torch.uint8).numpy().data)


def write_part(path: Path, part: TensorPart) -> None:
    """Write one file of a checkpoint, atomically and synced. An OSError if it cannot be written."""
    offsets, shapes = {}, {name: own.shape for name, own in part.rows.items()}
    for name, (_, start, shape) in part.rows.items():
        first = [start, *[0] * (len(shape) - 1)] if shape else []  # only rows are split
        offsets[name] = {"saved_offsets": first}
    contents = {_OFFSETS: offsets, _SHAPES: shapes, _VALUES: part.values}
    metadata = {key: json.dumps(content) for key, content in contents.items()}
    tensors = _apart({name: own.tensor.detach().cpu().contiguous() for name, own in part.rows.items()})
    save_tensors(path, tensors, metadata)


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, atomically and synced. An OSError if it cannot be written."""
    with replacing_path(path) as temporary:
        try:
            safetensors.torch.save_file(tensors, str(temporary), {"format": "pt", **metadata})
        except safetensors.SafetensorError as error:
            raise OSError(f"{path.name}: {error}") from None


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, copied where they overlap in memory, which safetensors refuses."""
    end = 0
    for name in sorted(tensors, key=lambda name: tensors[name].data_ptr()):
        tensor = tensors[name]
        # Such as views of one buffer; in the order of addresses only neighbours can overlap.
        if tensor.numel() and tensor.data_ptr() < end:
            tensors[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return tensors


class TensorFiles:
    """Tensors that several ranks have written together. Files are opened when they are needed.

    `paths`: all files, first the one that has rows of every tensor, then the likeliest. If one is
    damaged, any exception here or in `read`: see `checkpoint.loading`.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._unopened = paths[1:]
        first = _OpenFile(paths[0])
        self._opened = [first]
        # Of all whole tensors, by name.
        self.shapes = {name: tuple[int, ...](shape) for name, shape in first.metadata(_SHAPES).items()}
        self.values: Any = first.metadata(_VALUES)  # those of the first file

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """A copy of rows [start, stop) of a tensor (None: to its end), or of a scalar.

        A CheckpointError if the files do not hold them.
        """
        if name not in self.shapes:
            raise CheckpointError(f"there is no tensor {name}")
        shape, pieces = self.shapes[name], []
        if stop is None:
            stop = (*shape, 1)[0]  # a scalar is like one row
        # Until all rows are found: a file that is not needed is not opened.
        for file in self._files():
            found = file.rows(name, start, stop)
            if found is not None:
                pieces.append(found)
                if sum(length for _, length, _ in pieces) >= stop - start:
                    break
        pieces.sort(key=lambda piece: piece[0])  # the files come in any order
        at = start
        for first, length, tensor in pieces:
            if first != at or tensor.shape[1:] != shape[1:]:
                raise CheckpointError(f"{name}: its rows do not fit together")
            at += length
        if not pieces or at != stop:
            raise CheckpointError(f"{name}: rows {at:,} to {stop:,} are in no file")
        tensors = [tensor for *_, tensor in pieces]  # parts of the files, mapped into memory
        return tensors[0].clone() if len(tensors) == 1 else torch.cat(tensors)

    def _files(self) -> Iterator[_OpenFile]:
        yield from self._opened
        while self._unopened:
            self._opened.append(_OpenFile(self._unopened.pop(0)))
            yield self._opened[-1]


class _OpenFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with open_plain(path) as file:  # refuses what is no file
                # By its descriptor: safetensors opens no path that is not UTF-8.
                opened: Any = safetensors.safe_open(f"/dev/fd/{file.fileno()}", framework="pt", device="cpu")
            self._file, self._names = opened, set(opened.keys())
            self._metadata: dict[str, str] = opened.metadata() or {}
            self._offsets = self.metadata(_OFFSETS)
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from None

    def metadata(self, key: str) -> Any:
        """A value of the header. A CheckpointError if there is none."""
        try:
            return json.loads(self._metadata[key])
        except (KeyError, ValueError, RecursionError):
            raise CheckpointError(f"{self._path}: its header has no {key}") from None

    def rows(self, name: str, start: int, stop: int) -> tuple[int, int, Tensor] | None:
        """Of rows [start, stop) those in the file: first, number, the rows; None: it has none."""
        if name not in self._names:
            return None
        offsets = self._offsets[name]["saved_offsets"]
        if not offsets:  # a scalar
            return start, 1, self._file.get_tensor(name)
        part = self._file.get_slice(name)
        if start == stop:  # of a rank that holds no rows: only the type counts
            return start, 0, part[0:0]
        low, high = max(start - offsets[0], 0), min(stop - offsets[0], part.get_shape()[0])
        return (offsets[0] + low, high - low, part[low:high]) if low < high else None


_TAG = "$"  # begins the only key of an object that represents something JSON does not have


def pack(value: Any, name: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Split nested dicts, lists and tuples of plain values, dtypes and tensors into JSON, and
    tensors by name, which `name` begins. A UserError if there is anything else."""
    tensors: dict[str, Tensor] = {}
    return _pack(value, name, tensors), tensors


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    def inner(found: Any, key: object) -> Any:
        return _pack(found, f"{name}.{key}" if name else str(key), tensors)

    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        while name in tensors:  # keys may hold a dot, or be a number and its text
            name += "+"
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith(_TAG) for key in value):
            return {key: inner(found, key) for key, found in value.items()}
        return {"$dict": [[inner(key, "key"), inner(found, key)] for key, found in value.items()]}
    if isinstance(value, list | tuple):
        items = [inner(found, number) for number, found in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    problem = f"is a {kind}; a checkpoint keeps plain values, lists, tuples, dicts and tensors"
    raise UserError(name or "checkpoint", problem, "keep it as a list or a tensor")


def unpack(packed: Any, read: Callable[[str], Tensor]) -> Any:
    """The value that `pack` was given. If `pack` has not written it, any exception."""
    if isinstance(packed, list):
        return [unpack(item, read) for item in packed]
    if not isinstance(packed, dict):
        return packed
    tag = "".join(packed) if len(packed) == 1 else ""
    if not tag.startswith(_TAG):
        return {key: unpack(value, read) for key, value in packed.items()}
    content = packed[tag]
    if tag == "$tensor":
        return read(content)
    if tag == "$dict":
        return {unpack(key, read): unpack(value, read) for key, value in content}
    if tag == "$tuple":
        return tuple(unpack(item, read) for item in content)
    dtype = getattr(torch, content, None) if tag == "$dtype" else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"it holds a {tag} that is unknown")
    return dtype


def model_file(rank: int) -> str:
    """Name of the file with a rank's part of weights and optimizer."""
    return f"model_{rank:03d}.safetensors"


def rank_file(shard: int) -> str:
    """Name of the file with a data shard's own part."""
    return f"rank_{shard:03d}.safetensors"


def rows_file(shard: int) -> str:
    """Name of the file with the states of a data shard's ledger."""
    return f"rank_{shard:03d}.rows"


def read_shard(path: Path, shard: int) -> dict[str, Any]:
    """The part of a data shard. If it is damaged, any exception: see `checkpoint.loading`."""
    files = TensorFiles([path / rank_file(shard)])
    part: dict[str, Any] = unpack(files.values, files.read)
    ledger = part.get("ledger", {})
    if ledger:
        shape = len(ledger["groups"]), ledger["width"]
        ledger["rows"] = _map_rows(path / rows_file(shard), shape, ledger["dtype"])
    return part


def _map_rows(path: Path, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """States that `write_rows` wrote, [count, width], as a memory map of the file."""
    needed = shape[0] * shape[1] * dtype.itemsize
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != needed:
            raise CheckpointError(f"{path}: has {size} bytes, not the {needed} of {shape[0]} states")
        if not size:  # an empty file cannot be mapped
            return torch.empty(shape, dtype=dtype)
        # Copy on write: a state that is changed in memory must not change the checkpoint.
        return torch.from_numpy(np.memmap(file, np.uint8, mode="c")).view(dtype).view(shape)
