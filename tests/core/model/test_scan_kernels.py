"""What the scan's kernels cost, as far as that shows without a device: bytes moved, and the code that a GPU would run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.kernels import DEVICE, triton
from tests.support.runs import ROOT
from trainer.model.recurrence import BLOCKS, fused_scan

LAUNCH = ("num_warps",)
FLOAT32 = {"decay", "state", "final_state", "grad_final_state", "grad_decay", "grad_state"}


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each load and store that the interpreter runs; masked elements do not count."""
    from triton.runtime import interpreter

    found: list[int] = []

    def counted(name: str) -> None:
        access = getattr(interpreter.InterpreterBuilder, name)

        def count(self: Any, pointers: Any, *args: Any) -> Any:
            mask = args[1 if "store" in name else 0]
            found.append(int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8)
            return access(self, pointers, *args)

        monkeypatch.setattr(interpreter.InterpreterBuilder, name, count)

    for name in ("create_masked_load", "create_masked_store"):
        counted(name)
    for name in ("create_load", "create_store"):
        monkeypatch.setattr(interpreter.InterpreterBuilder, name, lambda *args: pytest.fail("not counted"))
    return found


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter counts, not the device")
def test_each_byte_moves_once(moved: list[int]) -> None:
    """Over each operand read or written once: at most 1.15 is asked for."""
    dim = BLOCKS.channels
    shape = (1, 512, dim)
    r, i, x = (torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    decay, state = torch.zeros(dim, requires_grad=True), torch.zeros(1, dim, requires_grad=True)
    resets = torch.zeros(shape[:2], dtype=torch.bool)

    h, final = fused_scan(r, i, x, decay, resets, state)
    large, small = x.numel() * x.element_size(), dim * 4
    forward = sum(moved)
    assert 1.0 <= forward / (4 * large + resets.numel() + 3 * small) < 1.005  # 3 read, 1 written

    moved.clear()
    torch.autograd.backward((h, final), (torch.ones_like(h), torch.ones_like(final)))
    # 5 read, 3 written; the state before the row's first position replaces one position of h.
    assert 0.998 <= sum(moved) / (8 * large + resets.numel() + 5 * small) < 1.005
    assert sum(moved) / (7 * large) < 1.15  # even over a backward that would not need h


def uninterpreted() -> ModuleType:
    """The kernels as Triton compiles them, whatever the tests do with theirs."""
    spec = importlib.util.find_spec("trainer.model.scan_kernels")
    module = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = False
        spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="then Triton's own functions are interpreted, too"
)
@pytest.mark.parametrize(
    ("num_steps", "resets"),
    [(1024, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1024, False), (1, True), (1, False)))],
)
@pytest.mark.parametrize("name", ["forward_kernel", "backward_kernel"])
def test_kernels_compile_for_an_h100_with_wide_accesses_and_without_spills(
    name: str, num_steps: int, resets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # What was compiled stays for the next time: its names there are hashes of the source, the options and the compiler.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(ROOT / "build" / "triton"))
    kernel = getattr(uninterpreted(), name)
    constants = {key.upper(): value for key, value in BLOCKS._asdict().items() if key not in LAUNCH}
    constants["HAS_RESETS"] = resets
    signature: dict[str, str] = {}
    aligned: dict[tuple[int, ...], Any] = {}
    for index, argument in enumerate(kernel.arg_names):
        if (
            argument in constants
            or (argument == "resets" and not resets)
            or (argument == "num_steps" and num_steps == 1)
        ):
            signature[argument] = "constexpr"
            constants.setdefault(argument, None if argument == "resets" else 1)
        else:
            pointer = "*fp32" if argument in FLOAT32 else "*i1" if argument == "resets" else "*bf16"
            signature[argument] = "i32" if argument in ("num_steps", "dim") else pointer
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    options = {key: getattr(BLOCKS, key) for key in LAUNCH}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    # 8 bytes per thread, for every tensor and step.
    read, written = (3, 1) if name == "forward_kernel" else (5, 3)
    accesses = [compiled.asm["ptx"].count(f"{kind}.global.v2.b32") for kind in ("ld", "st")]
    tiles = 1 if num_steps == 1 else 2  # the first one is loaded before the loop, each next one in it
    assert accesses == [tiles * read * BLOCKS.steps, written * BLOCKS.steps]

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run([tool, "--dump-resource-usage", binary], check=True, capture_output=True, text=True).stdout
    assert "STACK:0 " in usage or "STACK:8 " in usage  # two registers
