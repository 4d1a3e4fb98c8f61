"""Nested values as JSON and named tensors, and back: what a part of a run keeps is any nest of plain values and tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.errors import UserError

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
