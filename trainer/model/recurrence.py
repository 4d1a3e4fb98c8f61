"""The gated linear recurrence: its coefficients, and the scan over time, by torch and by Triton.

`h_t = a_t * h_{t-1} + b_t`, elementwise, with `a_t` in [0, 1]. It is linear in `h`, so cutting a
row anywhere and carrying `h` over the cut changes only rounding. The coefficients are those of the
RG-LRU (De et al. 2024, "Griffin", arXiv 2402.19427, equations 1 to 4).

The scan is one registered operator: `torch.compile` and fake tensors see one opaque node per
direction instead of about a thousand elementwise ones. On CUDA, gates and scan are one kernel
(`fused_scan`); the CPU code is its reference.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.protocol import GATE_SHARPNESS

HAS_TRITON: Final = importlib.util.find_spec("triton") is not None
KERNEL_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


def gated_scan(
    recurrence_gate: Tensor, input_gate: Tensor, x: Tensor, decay: Tensor, resets: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the RG-LRU over time, on CUDA by Triton kernels if Triton is installed.

    `log a = -c * softplus(Lambda) * sigmoid(r)` and `b = sqrt(1 - a^2) * sigmoid(i) * x`. `a_t = 0`
    is an exact reset to zero: no value or gradient passes it.

    Computed in float32 (float64 inputs: in float64) whatever the dtype of the inputs, the carried
    state included; only the returned h is rounded to the dtype of x. The backward of the kernels
    reads that h: with 16-bit inputs, the gradients of `recurrence_gate` and `decay` include its
    rounding, of the same size as that of the inputs.

    Args:
        recurrence_gate, input_gate, x: r, i and x, [B, T, D]; T >= 1.
        decay: Lambda, [D].
        resets: bool [B, T], True where the recurrence resets to zero, or None.
        state: h before the first position, [B, D].

    Returns:
        h [B, T, D] in x's dtype, and the final state [B, D] in float32 or wider.
    """
    if HAS_TRITON and x.is_cuda and x.dtype in KERNEL_DTYPES:
        return fused_scan(recurrence_gate, input_gate, x, decay, resets, state)
    dtype = torch.promote_types(x.dtype, torch.float32)
    rate = -GATE_SHARPNESS * F.softplus(decay.to(dtype))
    gates = recurrence_gate.to(dtype), input_gate.to(dtype)
    h: Tensor = _GatedScan.apply(*gates, x, state.to(dtype), rate, resets)  # type: ignore[no-untyped-call]
    return h.to(x.dtype), h[:, -1]


class _GatedScan(torch.autograd.Function):
    """Gates and scan in fewer passes than autograd, whose nodes a CPU does not fuse."""

    @staticmethod
    def forward(
        ctx: Any, r: Tensor, i: Tensor, x: Tensor, state: Tensor, rate: Tensor, resets: Tensor | None
    ) -> Tensor:
        r, i = r.sigmoid(), i.sigmoid()
        log_a = r * rate
        # -expm1(2 log a) is 1 - a^2, accurate where a is close to 1. Where a gate underflows, its
        # root has no finite slope: the floor makes the gradient 0 there, not NaN.
        scale = (2.0 * log_a).expm1_().neg_().clamp_min_(torch.finfo(r.dtype).tiny).sqrt_()
        a = log_a.exp_()
        if resets is not None:
            a.masked_fill_(resets.unsqueeze(-1), 0.0)
        h: Tensor = _scan_op(a.contiguous(), (scale * i).mul_(x).contiguous(), state, False)
        ctx.save_for_backward(r, i, x, state, rate, a, scale, h)
        return h

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor) -> tuple[Tensor | None, ...]:
        r, i, x, state, rate, a, scale, h = ctx.saved_tensors
        # g_t = grad_h_t + a_{t+1} * g_{t+1} is the same scan, from the last position to the first.
        following = torch.cat([a[:, 1:], torch.zeros_like(a[:, :1])], dim=1)
        grad_b = _scan_op(following, grad_h.contiguous(), torch.zeros_like(state), True)
        grad_x = grad_b * scale
        grad_i = (grad_x * x).mul_(i)  # by log(sigmoid(i))
        grad_x.mul_(i)
        # By log a: through a, and through the scale (d scale / d log a = scale - 1 / scale).
        grad_r = torch.cat([state.unsqueeze(1), h[:, :-1]], dim=1).mul_(grad_b).mul_(a).add_(grad_i)
        grad_r.sub_((grad_i / scale).div_(scale)).mul_(r)
        grad_rate = grad_r.flatten(0, -2).sum(dim=0)
        grad_r.mul_(rate)
        # The slope of a sigmoid s is s - s^2; the factor s is in both already.
        grad_r = torch.addcmul(grad_r, grad_r, r, value=-1)
        grad_i = torch.addcmul(grad_i, grad_i, i, value=-1)
        return grad_r, grad_i, grad_x.to(x.dtype), a[:, 0] * grad_b[:, 0], grad_rate, None


@torch.library.custom_op("trainer::linear_scan", mutates_args=())
def _scan_op(a: Tensor, b: Tensor, h0: Tensor, is_reversed: bool) -> Tensor:
    """The scan in about 5 * sqrt(T) vectorized operations instead of T."""
    # Time is split into chunks of about sqrt(T). All chunks run at once from zero, for their end
    # states and the products of their decays; then the true state is carried from chunk to chunk;
    # then all chunks run again from their true initial states, and the remainder step by step. The
    # products only shrink (a <= 1) and are neither divided by nor logged: nothing overflows, and an
    # underflow is a correct zero.
    num_steps = a.shape[1]
    h = torch.empty_like(b)
    length = math.isqrt(num_steps)
    num_chunks = num_steps // length
    whole = num_chunks * length
    # A reversed scan has its remainder at the front: both directions start at a chunk.
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


@_scan_op.register_fake
def _(a: Tensor, b: Tensor, h0: Tensor, is_reversed: bool) -> Tensor:
    return torch.empty_like(b)


# How a kernel divides its work; fixed, since rounding depends on it.
CHANNELS: Final = 32  # of a program: few, so that few rows fill a device
SEGMENTS: Final = 16  # side by side in time
STEPS: Final = 4  # of a segment, held in registers: 4 channels (8 bytes) each
WARPS: Final = 4


def fused_scan(
    recurrence_gate: Tensor, input_gate: Tensor, x: Tensor, decay: Tensor, resets: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`gated_scan` by one Triton kernel each way (`scan_kernels.py`), on CUDA or interpreted.

    The coefficients `a` and `b` never reach memory: the forward reads r, i and x and writes h, the
    backward reads those, h and its gradient and writes three gradients.
    """
    given = (tensor.contiguous() for tensor in (recurrence_gate, input_gate, x, decay))
    resets = resets if resets is None else resets.contiguous()
    h, final_state = _gated_scan_op(*given, resets, state.float().contiguous())
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
    programs = batch * math.ceil(dim / CHANNELS)
    # Triton launches on the current device, which need not be that of x.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernel[(programs,)](
            *tensors,
            num_steps,
            dim,
            HAS_RESETS=resets is not None,
            CHANNELS=CHANNELS,
            SEGMENTS=SEGMENTS,
            STEPS=STEPS,
            num_warps=WARPS,
        )


def _save_all(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
    # h instead of the decays: it exists anyway.
    ctx.save_for_backward(*inputs, output[0])


def _gated_gradients(ctx: Any, grad_h: Tensor, grad_final_state: Tensor) -> tuple[Tensor | None, ...]:
    grads_out = grad_h.contiguous(), grad_final_state.contiguous()
    *grads, grad_state = _gated_scan_backward_op(*grads_out, *ctx.saved_tensors)
    return *grads, None, grad_state


_gated_scan_op.register_autograd(_gated_gradients, setup_context=_save_all)
