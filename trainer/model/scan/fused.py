"""The gated linear recurrence from gate logits to states on CUDA: one Triton kernel each way (`kernels.py`).

The coefficients `a` and `b` never reach memory: forward reads r, i and x and writes h, backward reads those, h and its
gradient and writes three gradients. The operator is registered, so that autograd, `torch.compile`, activation checkpointing
and fake tensors see a single node.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

HAS_TRITON: Final = importlib.util.find_spec("triton") is not None
KERNEL_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class Blocks(NamedTuple):
    """How a kernel cuts its work. Rounding depends on it, so it is fixed, and neither tuned nor derived from the batch."""

    channels: int = 32
    """Per program: 64 bytes of each row in 16 bits, and 256 programs for 8 rows of width 1024 (an H100 has 132 SMs)."""
    segments: int = 8
    """Side by side in time."""
    steps: int = 8
    """Per segment: unrolled and held in registers, two positions per thread and step."""
    stages: int = 2
    """Tiles in shared memory: one is computed while the next is loaded. Forward in 16 bits that keeps 12 KiB per program
    in flight; bandwidth times latency is about 18 KiB per SM of an H100, which holds at least two programs."""
    num_warps: int = 4


BLOCKS: Final = Blocks()


def fused_scan(
    recurrence_gate: Tensor, input_gate: Tensor, x: Tensor, decay: Tensor, resets: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`recurrence.gated_scan` by the kernels, which need a CUDA device or Triton's interpreter (TRITON_INTERPRET=1)."""
    h, final_state = _gated_scan_op(
        recurrence_gate.contiguous(),
        input_gate.contiguous(),
        x.contiguous(),
        decay.contiguous(),
        None if resets is None else resets.contiguous(),
        state.float().contiguous(),
    )
    return h, final_state


@torch.library.custom_op("trainer::gated_scan", mutates_args=())
def _gated_scan_op(
    recurrence_gate: Tensor, input_gate: Tensor, x: Tensor, decay: Tensor, resets: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    from trainer.model.scan.kernels import forward_kernel  # needs triton

    h, final_state = torch.empty_like(x), torch.empty_like(state)
    tensors = (recurrence_gate, input_gate, x, decay, resets, state, h, final_state)
    _launch(forward_kernel, tensors, x, has_resets=resets is not None)
    return h, final_state


@_gated_scan_op.register_fake
def _(
    recurrence_gate: Tensor, input_gate: Tensor, x: Tensor, decay: Tensor, resets: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(state)


@torch.library.custom_op("trainer::gated_scan_backward", mutates_args=())
def _gated_scan_backward_op(
    grad_h: Tensor,
    grad_final_state: Tensor,
    recurrence_gate: Tensor,
    input_gate: Tensor,
    x: Tensor,
    decay: Tensor,
    resets: Tensor | None,
    state: Tensor,
    h: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from trainer.model.scan.kernels import backward_kernel  # needs triton

    inputs = (grad_h, grad_final_state, recurrence_gate, input_gate, x, decay, resets, state, h)
    rows_decay = torch.empty_like(state)  # each row's share of the gradient, [B, D]
    outputs = (
        *(torch.empty_like(gate) for gate in (recurrence_gate, input_gate, x)),
        rows_decay,
        torch.empty_like(state),
    )
    _launch(backward_kernel, (*inputs, *outputs), x, has_resets=resets is not None)
    grad_r, grad_i, grad_x, _, grad_state = outputs
    return grad_r, grad_i, grad_x, rows_decay.sum(dim=0).to(decay.dtype), grad_state


@_gated_scan_backward_op.register_fake
def _(
    grad_h: Tensor,
    grad_final_state: Tensor,
    recurrence_gate: Tensor,
    input_gate: Tensor,
    x: Tensor,
    decay: Tensor,
    resets: Tensor | None,
    state: Tensor,
    h: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    like = torch.empty_like
    return like(recurrence_gate), like(input_gate), like(x), like(decay), like(state)


def _launch(kernel: Any, tensors: tuple[Tensor | None, ...], x: Tensor, *, has_resets: bool) -> None:
    batch, num_steps, dim = x.shape
    programs = batch * math.ceil(dim / BLOCKS.channels)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernel[(programs,)](
            *tensors,
            num_steps,
            dim,
            HAS_RESETS=has_resets,
            CHANNELS=BLOCKS.channels,
            SEGMENTS=BLOCKS.segments,
            STEPS=BLOCKS.steps,
            STAGES=BLOCKS.stages,
            num_warps=BLOCKS.num_warps,
        )


def _save_for_backward(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[0])


def _gradients(ctx: Any, grad_h: Tensor, grad_final_state: Tensor) -> tuple[Tensor | None, ...]:
    grads = _gated_scan_backward_op(grad_h.contiguous(), grad_final_state.contiguous(), *ctx.saved_tensors)
    grad_r, grad_i, grad_x, grad_decay, grad_state = grads
    return grad_r, grad_i, grad_x, grad_decay, None, grad_state


_gated_scan_op.register_autograd(_gradients, setup_context=_save_for_backward)
