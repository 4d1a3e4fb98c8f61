"""Runs the package's Triton kernels on a device, or on the CPU under Triton's interpreter.

`TRAINER_TEST_DEVICE=cuda` takes the device. Otherwise the kernels are interpreted: this module's import switches that on for
them alone, so that other tests in the same process still see Triton as it is.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = os.environ.get("TRAINER_TEST_DEVICE", "cpu")

triton = pytest.importorskip("triton")


def _read_scalars(interpreter: Any) -> None:
    """Let interpreted kernels loop to a bound that is an argument: Triton 3.6 reads it in a way that numpy 2.4 refuses."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def _round_to_nearest(interpreter: Any) -> None:
    """Round interpreted stores in 16 bits as a device does; Triton's interpreter truncates."""
    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        if str(source) != "fp32" or str(target) not in kinds:
            return convert(data, source, target, mode)
        numbers = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        return numbers.to(kinds[str(target)]).view(torch.int16).numpy().view(np.uint16)

    interpreter._convert_float = rounded


def _scan_in_slices(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """An interpreted scan by doubling, like a device's: it needs the function to be associative.

    Triton's own interpreter goes from left to right, and calls the function for one number at a time, ten times slower.
    """
    found = [np.moveaxis(x.handle.data, self.axis, 0).copy() for x in inputs]
    kinds = [x.dtype for x in inputs]
    distance = 1
    while distance < len(found[0]):
        both = [*(np.roll(x, distance, axis=0) for x in found), *found]
        joined = _as_tuple(self.combine_fn.fn(*map(self.to_tensor, both, kinds * 2)))
        for whole, part in zip(found, joined, strict=True):
            whole[distance:] = part.handle.data[distance:]
        distance *= 2
    return [self.to_tensor(np.moveaxis(x, 0, self.axis), kind) for x, kind in zip(found, kinds, strict=True)]


def _reduce_in_slices(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
    scanned = _scan_in_slices(self, inputs)
    return [self.to_tensor(x.handle.data.take(-1, axis=self.axis), x.dtype) for x in scanned]


def _call_and_restore(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an interpreted function from a kernel; Triton's own method leaves its language patched for ever."""
    scope = interpreter._patch_lang(self.fn)
    try:
        return self.rewrite()(*args, **kwargs)
    finally:
        scope.restore()


def _as_tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


if DEVICE == "cpu":
    from triton.runtime import interpreter

    _read_scalars(interpreter)
    _round_to_nearest(interpreter)
    interpreter.ScanOps.generic_scan = _scan_in_slices
    interpreter.ReduceOps.generic_reduce = _reduce_in_slices
    interpreter.InterpretedFunction.__call__ = _call_and_restore
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        import trainer.model.scan_kernels  # noqa: F401


@contextmanager
def interpreted_fla() -> Iterator[ModuleType]:
    """flash-linear-attention's module of the gated delta rule; on a CPU its kernels are interpreted, and Triton's functions."""
    name = "fla.ops.gated_delta_rule.chunk"
    if DEVICE != "cpu":
        yield pytest.importorskip(name)
        return
    pytest.importorskip("fla")
    with pytest.MonkeyPatch.context() as patch, triton.knobs.runtime.scope():
        for module in [each for each in sys.modules if each.partition(".")[0] == "fla"]:
            patch.delitem(sys.modules, module)
        standard = importlib.import_module("triton.language.standard")
        for key, function in list(vars(standard).items()):
            if isinstance(function, triton.JITFunction):
                for module in (standard, triton.language):
                    patch.setattr(module, key, interpreter.InterpretedFunction(function.fn), raising=False)
        triton.knobs.runtime.interpret = True
        patch.setattr(triton.runtime.autotuner.Autotuner, "_bench", lambda *_, **__: [0.0] * 3)
        kernels = importlib.import_module(name)
        states = importlib.import_module("fla.ops.common.chunk_delta_h")
        tensors = lambda *bounds: map(interpreter._implicit_cvt, range(*map(int, bounds)))  # noqa: E731
        patch.setattr(states, "range", tensors, raising=False)  # its loops read `.to` of their number
        yield kernels
        for module in [each for each in sys.modules if each.partition(".")[0] == "fla"]:
            del sys.modules[module]
