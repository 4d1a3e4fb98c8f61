"""Counts the bytes of the tensors that exist, in a run of real code on tensors that have a size and no content."""

from __future__ import annotations

import math
import sys
import time
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that exist, each from the operation on that returns it.

    A storage that is resized in place counts with its new size: FSDP2 frees and allocates whole parameters in this way, without
    an operation that a dispatch mode would see. Of a sharded tensor, the shard counts that this rank holds.

    Args:
        most_seconds: of this process's own work, however busy the machine is, after which an operation raises instead.
    """

    def __init__(self, most_seconds: float = math.inf) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._until = time.process_time() + most_seconds
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._torch_resize: Any = None

    @property
    def is_over(self) -> bool:
        """Whether the time is."""
        return time.process_time() > self._until

    def __enter__(self) -> LiveBytes:
        """Begin to count, and follow `UntypedStorage.resize_`."""
        torch_resize = self._torch_resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            resized = torch_resize(storage, size)
            if storage._cdata in self._seen:
                self._set_size(storage._cdata, storage.nbytes())
            return resized

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Count no more."""
        torch.UntypedStorage.resize_ = self._torch_resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count what it returns.

        Raises:
            TimeoutError: the time is over.
        """
        if self.is_over:
            raise TimeoutError("it would take long")
        if any(map(_is_sharded, types)):
            return NotImplemented  # it then runs the operations on its shards, which come here
        returned = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(returned):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return returned

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return

        def forget(_: Any) -> None:
            del self._seen[key]
            self.now -= self._sizes.pop(key)

        self._seen[key] = weakref.ref(storage, forget)
        self._set_size(key, storage.nbytes())

    def _set_size(self, key: int, size: int) -> None:
        self.now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)


def _is_sharded(tensor_type: type) -> bool:
    """Whether it is DTensor, which is not imported for this: who has one has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(tensor_type, module.DTensor)
