"""Runs the package's Triton kernels on a device, or on the CPU under Triton's interpreter.

`TRAINER_TEST_DEVICE=cuda` takes the device. Otherwise the kernels are interpreted: this module's import switches that on for
them alone, so that other tests in the same process still see Triton as it is.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

DEVICE = os.environ.get("TRAINER_TEST_DEVICE", "cpu")

triton = pytest.importorskip("triton")


def _read_scalars(interpreter: Any) -> None:
    """Let interpreted kernels loop to a bound that is an argument: Triton 3.6 reads it in a way that numpy 2.4 refuses."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def _scan_in_slices(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """An interpreted scan over whole slices: Triton's own calls the function once per number, which takes ten times longer."""
    slices = [np.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
    kinds = [x.dtype for x in inputs]
    found = [[column[0] for column in slices]]
    for later in zip(*(column[1:] for column in slices), strict=True):
        both = [self.to_tensor(x, kind) for x, kind in zip((*found[-1], *later), kinds * 2, strict=True)]
        found.append([x.handle.data for x in _as_tuple(self.combine_fn.fn(*both))])
    return [
        self.to_tensor(np.stack(x, axis=self.axis), kind)
        for x, kind in zip(zip(*found, strict=True), kinds, strict=True)
    ]


def _reduce_in_slices(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
    scanned = _scan_in_slices(self, inputs)
    return [self.to_tensor(x.handle.data.take(-1, axis=self.axis), x.dtype) for x in scanned]


def _as_tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


if DEVICE == "cpu":
    from triton.runtime import interpreter

    _read_scalars(interpreter)
    interpreter.ScanOps.generic_scan = _scan_in_slices
    interpreter.ReduceOps.generic_reduce = _reduce_in_slices
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        import trainer.model.scan_kernels  # noqa: F401
