"""Tensors of a checkpoint as safetensors: whole, or as rows of them in the files of several ranks.

The header names each tensor's first row as torch.distributed.checkpoint does (`HuggingFaceStorageWriter` with
`save_distributed`), so that `HuggingFaceStorageReader` reads the same files. That module is not used itself: its saving and
loading exchange plans between all ranks, which a thread that writes while training continues cannot.
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
_VALUES = "values"  # what is no tensor


class CheckpointError(Exception):
    """A checkpoint is damaged or not of this program; the message names the file and what is wrong."""


class Rows(NamedTuple):
    """Consecutive rows of a tensor, or all of it."""

    tensor: Tensor
    start: int
    """Number of the first."""
    shape: tuple[int, ...]
    """Of the whole tensor."""

    @classmethod
    def all_of(cls, tensor: Tensor) -> Rows:
        """The whole tensor."""
        return cls(tensor, 0, tuple(tensor.shape))


def write_tensors(
    path: Path, rows: Mapping[str, Rows], values: Any = None, *, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> None:
    """Write tensors and JSON values to a file that then exists as a whole, and on disk.

    Args:
        shapes: of all tensors of which the ranks write rows; None: of `rows`.

    Raises:
        OSError, RuntimeError: it cannot be written.
    """
    offsets = {
        name: {"saved_offsets": [start, *[0] * (len(shape) - 1)] if shape else []}
        for name, (_, start, shape) in rows.items()
    }
    if shapes is None:
        shapes = {name: part.shape for name, part in rows.items()}
    metadata = {"format": "pt", _OFFSETS: json.dumps(offsets), _SHAPES: json.dumps(shapes), _VALUES: json.dumps(values)}
    tensors = _apart({name: part.tensor.detach().cpu().contiguous() for name, part in rows.items()})
    with replacing_path(path) as temporary:
        try:
            safetensors.torch.save_file(tensors, str(temporary), metadata)
        except safetensors.SafetensorError as error:
            number = re.search(r"\(os error (\d+)\)", str(error))  # the system's, as a text
            if number is None:
                raise RuntimeError(f"{path.name}: {error}") from None
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, copied where they overlap in memory, which safetensors refuses."""
    end = 0
    for name in sorted(tensors, key=lambda name: tensors[name].data_ptr()):
        tensor = tensors[name]
        if tensor.numel() and tensor.data_ptr() < end:
            tensors[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return tensors


class TensorFiles:
    """Tensors that several ranks have written together.

    Args:
        paths: of all files, the likeliest to hold what will be asked for first.

    Raises:
        CheckpointError: the first file cannot be read.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._opened: list[_OpenFile] = []
        self.values: Any = None
        """Of the first file that has any."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of all whole tensors."""
        first = next(self._files(), None)
        if first is None:
            raise CheckpointError("there are no tensors")
        self.shapes = {name: tuple(shape) for name, shape in first.metadata(_SHAPES).items()}
        self.values = first.metadata(_VALUES)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of a tensor (None: to its end; a scalar as it is), copied out of the files.

        Raises:
            CheckpointError: the files do not hold them, or one of them cannot be read.
        """
        if name not in self.shapes:
            raise CheckpointError(f"there is no tensor {name}")
        shape = self.shapes[name]
        stop = (shape[0] if shape else 1) if stop is None else stop
        pieces: list[tuple[int, Tensor]] = []
        missing = stop - start
        for file in self._files():
            if missing <= 0:
                break
            found = file.rows(name, start, stop)
            if found is not None:
                pieces.append(found)
                missing -= len(found[1]) if shape else 1
        pieces.sort(key=lambda piece: piece[0])
        if not pieces and start == stop and shape:
            return torch.empty(0, *shape[1:], dtype=self._dtype(name))
        at = start
        for first, piece in pieces:
            if (shape and first != at) or tuple(piece.shape[1:]) != shape[1:]:
                raise CheckpointError(f"{name}: its rows do not fit together")
            at += len(piece) if shape else 1
        if at != stop:
            raise CheckpointError(f"{name}: rows {at:,} to {stop:,} are in no file")
        return pieces[0][1] if len(pieces) == 1 else torch.cat([piece for _, piece in pieces])

    def _dtype(self, name: str) -> torch.dtype:
        for file in self._files():
            found = file.rows(name, 0, 0)
            if found is not None:
                return found[1].dtype
        raise CheckpointError(f"{name} is in no file")

    def _files(self) -> Iterator[_OpenFile]:
        """All files, each opened when it is first needed."""
        yield from self._opened
        while len(self._opened) < len(self._paths):
            self._opened.append(_OpenFile(self._paths[len(self._opened)]))
            yield self._opened[-1]


class _OpenFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with open_plain(path) as file:
                # A name that is no UTF-8 is refused, that of an open file is always plain.
                name = str(path) if os.fsencode(path).isascii() else f"/dev/fd/{file.fileno()}"
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
        """A value of the header.

        Raises:
            CheckpointError: there is none.
        """
        try:
            return json.loads(self._metadata[key])
        except (KeyError, ValueError, RecursionError):
            raise CheckpointError(f"{self._path}: cannot be read: its header has no {key}") from None

    def rows(self, name: str, start: int, stop: int) -> tuple[int, Tensor] | None:
        """What the file has of rows [start, stop), with the number of the first; None if it has none of them."""
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


_TAG = "$"  # first letter of the one key of an object that stands for what JSON does not have


def pack(value: Any, name: str = "") -> tuple[Any, dict[str, Tensor]]:
    """(JSON, tensors by name) of nested dicts, lists, tuples and sets of plain values, dtypes and tensors.

    Args:
        name: begins the names of the tensors.

    Raises:
        UserError: it holds anything else.
    """
    tensors: dict[str, Tensor] = {}
    return _pack(value, name, tensors), tensors


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        while name in tensors:  # of keys that hold a dot, or are numbers and texts alike
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
        return items if type(value) is list else {f"${'set' if isinstance(value, set) else 'tuple'}": items}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    problem = f"is a {kind}; a checkpoint keeps plain values, lists, tuples, dicts and tensors"
    raise UserError(name or "checkpoint", problem, "keep it in another form, such as a list or a tensor")


def unpack(packed: Any, read: Callable[[str], Tensor]) -> Any:
    """What `pack` was given.

    Args:
        read: gives the tensor of a name.

    Raises:
        ValueError: `pack` has not written this.
    """
    if isinstance(packed, list):
        return [unpack(item, read) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if len(packed) == 1 and (tag := next(iter(packed))).startswith(_TAG):
        content = packed[tag]
        if tag == "$tensor":
            return read(content)
        if tag == "$dtype" and isinstance(dtype := getattr(torch, content, None), torch.dtype):
            return dtype
        if tag == "$dict":
            return {unpack(key, read): unpack(value, read) for key, value in content}
        if tag in ("$tuple", "$set"):
            return (tuple if tag == "$tuple" else set)(unpack(item, read) for item in content)
        raise ValueError(f"nothing is written as {tag}")
    return {key: unpack(value, read) for key, value in packed.items()}


def model_file(rank: int) -> str:
    """File name of a rank's part of weights and optimizer."""
    return f"model_{rank:03d}.safetensors"


def rank_file(rank: int) -> str:
    """File name of a rank's own part."""
    return f"rank_{rank:03d}.safetensors"


def rows_file(rank: int) -> str:
    """File name of the states of a rank's ledger."""
    return f"rank_{rank:03d}.rows"


class TensorPart(NamedTuple):
    """A file of tensors and plain values."""

    rows: Mapping[str, Rows]
    values: Any = None
    shapes: Mapping[str, tuple[int, ...]] | None = None
    """See `write_tensors`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the file, or some more."""
        tensors = sum(part.tensor.nbytes for part in self.rows.values())
        # An entry of the header holds name, type, shape and place, one of the metadata name and first row, or shape.
        entries = sum(2 * len(name) + 160 for name in self.rows) + sum(len(name) + 24 for name in self.shapes or ())
        return tensors + entries + 2 * len(json.dumps(self.values)) + 512


class StatePart(NamedTuple):
    """A file of states, as pieces [n, width] of the CPU, which are taken one by one."""

    num_bytes: int
    pieces: Iterable[Tensor]


Part = TensorPart | StatePart


def write_part(path: Path, part: Part) -> None:
    """Write one file of a checkpoint to disk, not merely to the page cache.

    Raises:
        OSError, RuntimeError: it cannot be written.
    """
    if isinstance(part, TensorPart):
        write_tensors(path, part.rows, part.values, shapes=part.shapes)
        return
    with replacing(path) as file:
        for piece in part.pieces:
            file.write(piece.view(torch.uint8).numpy().data)


def read_rank(path: Path, rank: int) -> dict[str, Any]:
    """What a rank of a checkpoint wrote; the states of its ledger are read when they are used.

    Raises:
        CheckpointError: a file is damaged; or there are not as many states as it says.
    """
    files = TensorFiles([path / rank_file(rank)])
    part: dict[str, Any] = unpack(files.values, files.read)
    ledger = part.get("ledger", {})
    if ledger:
        size = {"count": len(ledger["groups"]), "width": ledger["width"], "dtype": ledger["dtype"]}
        ledger["rows"] = _map_rows(path / rows_file(rank), **size)
    return part


def _map_rows(path: Path, *, count: int, width: int, dtype: torch.dtype) -> Tensor:
    """States that `write_part` wrote, [count, width], as a part of memory that is the file's."""
    needed = count * width * dtype.itemsize
    try:
        with open_plain(path) as file:
            if (size := os.fstat(file.fileno()).st_size) != needed:
                raise CheckpointError(f"{path}: has {size} bytes, not the {needed} of {counted(count, 'state')}")
            if not count:
                return torch.empty(0, width, dtype=dtype)
            return torch.from_numpy(np.memmap(file, np.uint8, mode="c")).view(dtype).view(count, width)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
