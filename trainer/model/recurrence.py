"""The gated linear recurrence: its coefficients, and the scan over time, by torch and by Triton.

`h_t = a_t * h_{t-1} + b_t`, elementwise, with `a_t` in [0, 1]. The recurrence is linear in `h`, so cutting a row anywhere
and carrying `h` over the cut changes only rounding. The coefficients are those of the RG-LRU (De et al. 2024, "Griffin",
arXiv 2402.19427, equations 1 to 4).

The scan is one registered operator: autograd, `torch.compile`, activation checkpointing and fake tensors see a single opaque
node with its own backward instead of about a thousand elementwise ones. On CUDA gates and scan together are one
(`fused_scan`); `gated_coefficients` and `linear_scan` are its reference, and what a CPU runs.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.distributed.context import Context
from trainer.metrics.logger import get_logger
from trainer.model.protocol import GATE_SHARPNESS

logger = get_logger(__name__)

HAS_TRITON: Final = importlib.util.find_spec("triton") is not None
KERNEL_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


def gated_scan(
    recurrence_gate: Tensor, input_gate: Tensor, x: Tensor, decay: Tensor, resets: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the RG-LRU over time: `linear_scan` of `gated_coefficients`, by Triton kernels on CUDA.

    It is computed in float32 (float64 inputs: in float64) whatever the inputs' dtype, the carried state included; only the
    returned h is rounded to x's dtype. The kernels' backward reads that h: with 16-bit inputs the gradients of
    `recurrence_gate` and `decay` then include h's rounding, of the size of the inputs' own.

    Args:
        recurrence_gate, input_gate, x: r, i and x, [B, T, D]; T >= 1.
        decay: Lambda, [D].
        resets: bool [B, T], True where the recurrence resets to zero, or None.
        state: h before the first position, [B, D].

    Returns:
        h [B, T, D] in x's dtype, and the final state [B, D] in float32 or wider.
    """
    if x.is_cuda and x.dtype in KERNEL_DTYPES:
        if HAS_TRITON:
            return fused_scan(recurrence_gate, input_gate, x, decay, resets, state)
        _warn_of_plain_scan()  # not inside a compiled graph: without Triton torch.compile makes none for CUDA
    a, b = gated_coefficients(recurrence_gate, input_gate, x, decay, resets)  # [B, T, D] each
    h = _scan_op(a.contiguous(), b.contiguous(), state.to(a.dtype).contiguous())  # [B, T, D]
    return h.to(x.dtype), h[:, -1]


def scan_over_ranks(scan: Callable[..., tuple[Tensor, Tensor]], group: Context, *given: Any) -> tuple[Tensor, Tensor]:
    """As `scan`, whose arguments are given, over rows of which this rank has a part; `state` is that before the row.

    h is linear in the state that a part begins with: the part is run from zero and, without input, from one, side by side. The
    backward runs both again, or their gates would be kept twice.
    """
    *gates, decay, resets, state = given

    def from_zero_and_one(r: Tensor, i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        pairs = (r, r), (i, i), (x, torch.zeros_like(x)), (torch.zeros_like(state), torch.ones_like(state))
        *gates, begin = map(torch.cat, pairs)
        return scan(*gates, decay, None if resets is None else torch.cat([resets, resets]), begin)

    found = checkpoint(from_zero_and_one, *gates, use_reentrant=False, preserve_rng_state=False)
    (from_zero, products), (end, transition) = (each.chunk(2) for each in found)
    first, last = group.scan(transition, end, state)
    return (from_zero + products * first[:, None]).to(from_zero.dtype), last


@functools.cache
def _warn_of_plain_scan() -> None:
    logger.warning("triton is not installed (extra: cuda): the gated recurrence runs as many small kernels")


def linear_scan(a: Tensor, b: Tensor, h0: Tensor) -> Tensor:
    """Compute `h_t = a_t * h_{t-1} + b_t` and return every `h_t`.

    `a_t = 0` is an exact reset to zero: no value or gradient passes it.

    Args:
        a: decay, [B, T, D], each in [0, 1]; T >= 1.
        b: input, [B, T, D].
        h0: state before the first position, [B, D].

    Returns:
        [B, T, D], computed in the common dtype of the inputs: float32 or float64.
    """
    h: Tensor = _scan_op(a.contiguous(), b.contiguous(), h0.contiguous())
    return h


@torch.library.custom_op("trainer::linear_scan", mutates_args=())
def _scan_op(a: Tensor, b: Tensor, h0: Tensor) -> Tensor:
    return _chunked_scan(a, b, h0)


@_scan_op.register_fake
def _(a: Tensor, b: Tensor, h0: Tensor) -> Tensor:
    return torch.empty_like(b)


@torch.library.custom_op("trainer::linear_scan_backward", mutates_args=())
def _scan_backward_op(grad_h: Tensor, a: Tensor, h: Tensor, h0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # g_t = grad_h_t + a_{t+1} * g_{t+1} is the same scan, from the last position to the first.
    following = torch.cat([a[:, 1:], torch.zeros_like(a[:, :1])], dim=1)
    grad_b = _chunked_scan(following, grad_h, torch.zeros_like(h0), is_reversed=True)
    grad_a = torch.empty_like(a)
    torch.mul(grad_b[:, 1:], h[:, :-1], out=grad_a[:, 1:])
    torch.mul(grad_b[:, 0], h0, out=grad_a[:, 0])
    return grad_a, grad_b, a[:, 0] * grad_b[:, 0]


@_scan_backward_op.register_fake
def _(grad_h: Tensor, a: Tensor, h: Tensor, h0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(a), torch.empty_like(a), torch.empty_like(h0)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    a, _, h0 = inputs
    ctx.save_for_backward(a, output, h0)


def _scan_gradients(ctx: Any, grad_h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, h, h0 = ctx.saved_tensors
    grad_a, grad_b, grad_h0 = _scan_backward_op(grad_h.contiguous(), a, h, h0)
    return grad_a, grad_b, grad_h0


_scan_op.register_autograd(_scan_gradients, setup_context=_save_for_backward)


def _chunked_scan(a: Tensor, b: Tensor, h0: Tensor, *, is_reversed: bool = False) -> Tensor:
    """The scan in about 3 * sqrt(T) vectorized operations instead of T.

    Time is split into chunks of about sqrt(T). First all chunks run at once from zero, which gives their end states and
    the products of their decays; then the true state is carried from chunk to chunk; then all chunks run again from their
    true initial states. The products only shrink (a <= 1) and are neither divided by nor logged, so nothing overflows and
    an underflow is a correct zero. The remainder after the last whole chunk runs step by step.
    """
    num_steps = a.shape[1]
    h = torch.empty_like(b)
    length = math.isqrt(num_steps)
    num_chunks = num_steps // length
    whole = num_chunks * length
    # A reversed scan has its remainder at the front, so that both directions start at a chunk boundary.
    first = num_steps - whole if is_reversed else 0
    shape = (a.shape[0], num_chunks, length, a.shape[2])
    a_chunks = a.narrow(1, first, whole).view(shape)
    b_chunks = b.narrow(1, first, whole).view(shape)
    h_chunks = h.narrow(1, first, whole).view(shape)
    inside = range(length - 1, -1, -1) if is_reversed else range(length)
    across = range(num_chunks - 1, -1, -1) if is_reversed else range(num_chunks)
    rest = range(first - 1, -1, -1) if is_reversed else range(whole, num_steps)

    end, decay = torch.zeros_like(b_chunks[:, :, 0]), torch.ones_like(b_chunks[:, :, 0])
    for t in inside:
        end = torch.addcmul(b_chunks[:, :, t], a_chunks[:, :, t], end)
        decay = decay * a_chunks[:, :, t]
    carried = torch.empty_like(end)
    state = h0
    for chunk in across:
        carried[:, chunk] = state
        state = torch.addcmul(end[:, chunk], decay[:, chunk], state)
    running = carried
    for t in inside:
        running = torch.addcmul(b_chunks[:, :, t], a_chunks[:, :, t], running, out=h_chunks[:, :, t])
    for t in rest:
        state = torch.addcmul(b[:, t], a[:, t], state, out=h[:, t])
    return h


def gated_coefficients(
    recurrence_gate: Tensor, input_gate: Tensor, x: Tensor, decay: Tensor, resets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The RG-LRU's `a` and `b` from its gate logits.

    `log a = -c * softplus(Lambda) * sigmoid(r)` and `b = sqrt(1 - a^2) * sigmoid(i) * x` (De et al. 2024,
    equations 1 to 4). `1 - a^2` is computed as `-expm1(2 log a)`, which stays accurate where `a` is close to 1.

    Args:
        recurrence_gate, input_gate, x: r, i and x, [B, T, D].
        decay: Lambda, [D].
        resets: bool [B, T], True where the recurrence resets to zero, or None.

    Returns:
        a and b, [B, T, D], in float32 or wider for any input dtype.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    log_a = torch.sigmoid(recurrence_gate.to(dtype)) * (-GATE_SHARPNESS * F.softplus(decay.to(dtype)))
    # If a gate underflows, 1 - a^2 is 0, where the root has no finite slope: the floor makes that gradient 0, not NaN.
    scale = torch.expm1(2.0 * log_a).neg().clamp_min(torch.finfo(dtype).tiny).sqrt()
    b = scale * torch.sigmoid(input_gate.to(dtype)) * x.to(dtype)
    a = log_a.exp()
    if resets is not None:
        a = a.masked_fill(resets.unsqueeze(-1), 0.0)
    return a, b


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
    """`gated_scan` by one Triton kernel each way (`scan_kernels.py`), on a CUDA device or in Triton's interpreter.

    The coefficients `a` and `b` never reach memory: forward reads r, i and x and writes h, backward reads those, h and its
    gradient and writes three gradients.
    """
    given = (recurrence_gate, input_gate, x, decay)
    h, final_state = _gated_scan_op(
        *(tensor.contiguous() for tensor in given),
        None if resets is None else resets.contiguous(),
        state.float().contiguous(),
    )
    return h, final_state


@torch.library.custom_op(
    "trainer::gated_scan",
    mutates_args=(),
    schema="(Tensor r, Tensor i, Tensor x, Tensor decay, Tensor? resets, Tensor state) -> (Tensor, Tensor)",
)
def _gated_scan_op(*inputs: Tensor | None) -> tuple[Tensor, Tensor]:
    from trainer.model.scan_kernels import forward_kernel  # needs triton

    h, final_state = _gated_scan_shapes(*inputs)
    _launch(forward_kernel, (*inputs, h, final_state), inputs)
    return h, final_state


@_gated_scan_op.register_fake
def _gated_scan_shapes(*inputs: Any) -> tuple[Tensor, Tensor]:
    _, _, x, _, _, state = inputs
    return torch.empty_like(x), torch.empty_like(state)


@torch.library.custom_op(
    "trainer::gated_scan_backward",
    mutates_args=(),
    schema="(Tensor grad_h, Tensor grad_final_state, Tensor r, Tensor i, Tensor x, Tensor decay, Tensor? resets, "
    "Tensor state, Tensor h) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _gated_scan_backward_op(*inputs: Any) -> tuple[Tensor, ...]:
    from trainer.model.scan_kernels import backward_kernel  # needs triton

    decay, state = inputs[5], inputs[7]
    *gates, _, grad_state = _gradient_shapes(*inputs)
    rows_decay = torch.empty_like(state)  # each row's share of the gradient, [B, D]
    _launch(backward_kernel, (*inputs, *gates, rows_decay, grad_state), inputs[2:])
    return *gates, rows_decay.sum(dim=0).to(decay.dtype), grad_state


@_gated_scan_backward_op.register_fake
def _gradient_shapes(*inputs: Any) -> tuple[Tensor, ...]:
    _, _, *differentiable, _, state, _ = inputs
    return tuple(torch.empty_like(tensor) for tensor in (*differentiable, state))


def _launch(kernel: Any, tensors: tuple[Tensor | None, ...], inputs: Any) -> None:
    _, _, x, _, resets, _ = inputs[:6]
    batch, num_steps, dim = x.shape
    programs = batch * math.ceil(dim / BLOCKS.channels)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernel[(programs,)](
            *tensors,
            num_steps,
            dim,
            HAS_RESETS=resets is not None,
            CHANNELS=BLOCKS.channels,
            SEGMENTS=BLOCKS.segments,
            STEPS=BLOCKS.steps,
            STAGES=BLOCKS.stages,
            num_warps=BLOCKS.num_warps,
        )


def _save_all(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[0])


def _gated_gradients(ctx: Any, grad_h: Tensor, grad_final_state: Tensor) -> tuple[Tensor | None, ...]:
    *grads, grad_state = _gated_scan_backward_op(grad_h.contiguous(), grad_final_state.contiguous(), *ctx.saved_tensors)
    return *grads, None, grad_state


_gated_scan_op.register_autograd(_gated_gradients, setup_context=_save_all)
