"""Tensors of a checkpoint as safetensors: whole, or as rows of them in the files of several ranks.

The header names each tensor's first row as torch.distributed.checkpoint does
(`HuggingFaceStorageWriter` with `save_distributed`), so that `HuggingFaceStorageReader` reads the
same files. That module itself is not used: it exchanges plans between all ranks, which a thread
that writes while training continues cannot.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from trainer.errors import UserError
from trainer.files import open_plain, replacing, replacing_path
from trainer.wording import counted

# Keys of a file's metadata, each of JSON.
_OFFSETS = "DCP_SHARDING_INFO"  # name -> {"saved_offsets": [first row, 0, ...]}, as torch names it
_SHAPES = "shapes"  # name -> shape of the whole tensor, of all that the ranks have written together
_VALUES = "values"  # everything else


class CheckpointError(Exception):
    """A checkpoint is damaged or of another program; the message names the file and the problem."""


class Rows(NamedTuple):
    """Consecutive rows of a tensor, or all of it."""

    tensor: Tensor
    start: int
    """Number of the first row."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""

    @classmethod
    def all_of(cls, tensor: Tensor) -> Rows:
        """The whole tensor."""
        return cls(tensor, 0, tuple(tensor.shape))


def write_tensors(
    path: Path, rows: Mapping[str, Rows], values: Any = None, *, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> None:
    """Write tensors and JSON values to a file, atomically and synced to disk.

    `shapes`: of all tensors of which the ranks write rows; None: of `rows`.
    """
    offsets = {}
    for name, (_, start, shape) in rows.items():
        first = [0] * len(shape)
        if shape:  # only rows are split, and a scalar has none
            first[0] = start
        offsets[name] = {"saved_offsets": first}
    if shapes is None:
        shapes = {name: part.shape for name, part in rows.items()}
    metadata = {_OFFSETS: json.dumps(offsets), _SHAPES: json.dumps(shapes), _VALUES: json.dumps(values)}
    tensors = _apart({name: part.tensor.detach().cpu().contiguous() for name, part in rows.items()})
    with replacing_path(path) as temporary:
        try:
            safetensors.torch.save_file(tensors, str(temporary), {"format": "pt", **metadata})
        except safetensors.SafetensorError as error:
            # The system's error number is in the text only.
            number = re.search(r"\(os error (\d+)\)", str(error))
            if number is None:
                raise RuntimeError(f"{path.name}: {error}") from None
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None


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

    `paths`: all files, the likeliest first. A CheckpointError if that one cannot be read.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._opened: list[_OpenFile] = []
        self.values: Any = None
        """Those of the first file."""
        first = next(self._files(), None)
        if first is None:
            raise CheckpointError("there are no tensors")
        self.shapes: dict[str, tuple[int, ...]]
        """By name, of all whole tensors."""
        self.shapes = {name: tuple(shape) for name, shape in first.metadata(_SHAPES).items()}
        self.values = first.metadata(_VALUES)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of a tensor (None: to its end), copied out of the files; or a scalar.

        A CheckpointError if the files do not hold them, or if one of them cannot be read.
        """
        if name not in self.shapes:
            raise CheckpointError(f"there is no tensor {name}")
        shape = self.shapes[name]
        if not shape:
            return self._first(name, 0, 1)
        if stop is None:
            stop = shape[0]
        if start == stop:
            return torch.empty(0, *shape[1:], dtype=self._first(name, 0, 0).dtype)
        pieces: list[tuple[int, Tensor]] = []
        missing = stop - start
        # Until all rows are found: a file that is not needed is not opened.
        for file in self._files():
            if missing <= 0:
                break
            found = file.rows(name, start, stop)
            if found is not None:
                pieces.append(found)
                missing -= len(found[1])
        # The files come in any order.
        pieces.sort(key=lambda piece: piece[0])
        at = start
        for first, piece in pieces:
            if first != at or tuple(piece.shape[1:]) != shape[1:]:
                raise CheckpointError(f"{name}: its rows do not fit together")
            at += len(piece)
        if at != stop:
            raise CheckpointError(f"{name}: rows {at:,} to {stop:,} are in no file")
        return pieces[0][1] if len(pieces) == 1 else torch.cat([piece for _, piece in pieces])

    def _first(self, name: str, start: int, stop: int) -> Tensor:
        """The rows in the first file that has any, or the tensor if no row is asked for."""
        for file in self._files():
            found = file.rows(name, start, stop)
            if found is not None:
                return found[1]
        raise CheckpointError(f"{name} is in no file")

    def _files(self) -> Iterator[_OpenFile]:
        yield from self._opened
        while len(self._opened) < len(self._paths):
            self._opened.append(_OpenFile(self._paths[len(self._opened)]))
            yield self._opened[-1]


class _OpenFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with open_plain(path) as file:
                name = str(path)
                if not os.fsencode(path).isascii():
                    # safetensors refuses a name that is no UTF-8; an open file has a plain one.
                    name = f"/dev/fd/{file.fileno()}"
                opened: Any = safetensors.safe_open(name, framework="pt", device="cpu")
            self._file = opened
            self._names = set(opened.keys())
            self._metadata: dict[str, str] = opened.metadata() or {}
            self._offsets = self.metadata(_OFFSETS)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from None
        except (safetensors.SafetensorError, AttributeError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from None

    def metadata(self, key: str) -> Any:
        """A value of the header. A CheckpointError if there is none."""
        try:
            return json.loads(self._metadata[key])
        except (KeyError, ValueError, RecursionError):
            raise CheckpointError(f"{self._path}: cannot be read: its header has no {key}") from None

    def rows(self, name: str, start: int, stop: int) -> tuple[int, Tensor] | None:
        """The file's part of rows [start, stop), and the number of its first; None: it has none."""
        if name not in self._names:
            return None
        try:
            offsets = self._offsets[name]["saved_offsets"]
            if not offsets:
                return start, self._file.get_tensor(name)
            first = offsets[0]
            part = self._file.get_slice(name)
            low, high = max(start - first, 0), min(stop - first, part.get_shape()[0])
            if low >= high and start < stop:
                return None
            return first + low, part[low:high].clone()
        except (safetensors.SafetensorError, KeyError, IndexError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self._path}: {name} cannot be read: {error}") from None


_TAG = "$"  # begins the only key of an object that represents something JSON does not have


def pack(value: Any, name: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Split nested containers of plain values, dtypes and tensors into JSON, and tensors by name.

    Args:
        value: dicts, lists, tuples and sets. A UserError if it holds anything else.
        name: begins the names of the tensors.
    """
    tensors: dict[str, Tensor] = {}
    return _pack(value, name, tensors), tensors


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        while name in tensors:  # keys may hold a dot, or be a number and its text
            name += "+"
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}

    def inner(found: Any, key: object) -> Any:
        return _pack(found, f"{name}.{key}" if name else str(key), tensors)

    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith(_TAG) for key in value):
            return {key: inner(found, key) for key, found in value.items()}
        return {"$dict": [[inner(key, "key"), inner(found, key)] for key, found in value.items()]}
    if isinstance(value, list | tuple | set):
        items = [inner(found, number) for number, found in enumerate(value)]
        if type(value) is list:
            return items
        return {"$set": items} if isinstance(value, set) else {"$tuple": items}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    problem = f"is a {kind}; a checkpoint keeps plain values, lists, tuples, dicts and tensors"
    raise UserError(name or "checkpoint", problem, "keep it in another form, such as a list or a tensor")


def unpack(packed: Any, read: Callable[[str], Tensor]) -> Any:
    """The value that `pack` was given. A ValueError if `pack` has not written it."""
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
    if tag == "$set":
        return {unpack(item, read) for item in content}
    dtype = getattr(torch, content, None) if tag == "$dtype" else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"nothing is written as {tag}")
    return dtype


def model_file(rank: int) -> str:
    """Name of the file with a rank's part of weights and optimizer."""
    return f"model_{rank:03d}.safetensors"


def rank_file(rank: int) -> str:
    """Name of the file with a rank's own part."""
    return f"rank_{rank:03d}.safetensors"


def rows_file(rank: int) -> str:
    """Name of the file with the states of a rank's ledger."""
    return f"rank_{rank:03d}.rows"


class TensorPart(NamedTuple):
    """A file of tensors and plain values."""

    rows: Mapping[str, Rows]
    values: Any = None
    shapes: Mapping[str, tuple[int, ...]] | None = None
    """See `write_tensors`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(part.tensor.nbytes for part in self.rows.values())


class StatePart(NamedTuple):
    """A file of states, as pieces [n, width] on the CPU, which are taken one by one."""

    num_bytes: int
    pieces: Iterable[Tensor]


Part = TensorPart | StatePart


def write_part(path: Path, part: Part) -> None:
    """Write one file of a checkpoint to disk, not only to the page cache; see `write_tensors`."""
    if isinstance(part, TensorPart):
        write_tensors(path, part.rows, part.values, shapes=part.shapes)
        return
    with replacing(path) as file:
        for piece in part.pieces:
            file.write(piece.view(torch.uint8).numpy().data)


def read_rank(path: Path, rank: int) -> dict[str, Any]:
    """The part that a rank wrote. A CheckpointError if it is damaged."""
    files = TensorFiles([path / rank_file(rank)])
    part: dict[str, Any] = unpack(files.values, files.read)
    ledger = part.get("ledger", {})
    if ledger:
        size = {"count": len(ledger["groups"]), "width": ledger["width"], "dtype": ledger["dtype"]}
        ledger["rows"] = _map_rows(path / rows_file(rank), **size)
    return part


def _map_rows(path: Path, *, count: int, width: int, dtype: torch.dtype) -> Tensor:
    """States that `write_part` wrote, [count, width], as a memory map of the file."""
    needed = count * width * dtype.itemsize
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != needed:
                states = counted(count, "state")
                raise CheckpointError(f"{path}: has {size} bytes, not the {needed} of {states}")
            if not count:  # an empty file cannot be mapped
                return torch.empty(0, width, dtype=dtype)
            # Copy on write: a state that is changed in memory must not change the checkpoint.
            mapped = torch.from_numpy(np.memmap(file, np.uint8, mode="c"))
            return mapped.view(dtype).view(count, width)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
