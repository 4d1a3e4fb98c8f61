"""`gated_delta` on CUDA by the kernels of flash-linear-attention, as operators that compile and can be captured.

The kernels take rows as they are, [B, T, H, K], and have no resets: at a document's first position the log decay is `FORGET`
instead, so nothing depends on the data. Within a chunk of 64 positions that costs as many bits of the decays as the sum of its
log decays is larger. Which of their configurations the kernels run is measured at the first call on a machine and then kept in
Triton's cache: another machine may round differently. It could go once the rule in torch is as fast.
"""

from __future__ import annotations

import functools
import importlib
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from trainer.lab import gated_delta
from trainer.lab.gated_delta import CHUNK, DeltaMixer, GatedDelta, Rule, gated_delta_rule

FORGET: Final = -32.0
"""Log decay at a reset: what is left of a state, 1e-14, is below the rounding of what follows."""
WIDEST: Final = 256  # head that the kernels take
KERNEL_TYPES: Final = (torch.bfloat16, torch.float16)
Version = tuple[int, ...]


class Refused(NamedTuple):
    """Versions of which the kernels are not right on devices of a capability; upper ends are exclusive."""

    fla: tuple[Version, Version]
    triton: tuple[Version, Version]
    capability: int  # major: 9 is Hopper
    widths: tuple[int, int]  # of heads
    problem: str


KNOWN: Final = (((0, 4, 2), (0, 4, 3), (8, 9)), ((0, 6), (0, 7), (8, 9, 10, 11, 12)))
"""Versions of fla-core, the upper end exclusive, and the devices' major capabilities."""
_WRONG = "gives heads 33 to 64 wide wrong gradients (fla-org/flash-linear-attention#640): use wider heads"
_NONE = "refuses gradients (fla-org/flash-linear-attention#640): use Triton 3.7.1, or fla-core 0.4.2"
REFUSED: Final = (
    Refused(((0, 4), (0, 5)), ((3, 4), (3, 7, 1)), 9, (33, 65), _WRONG),
    Refused(((0, 5), (0, 7)), ((3, 4), (3, 7, 1)), 9, (1, WIDEST + 1), _NONE),
)


def refusal(fla: str, triton: str, capability: tuple[int, int], width: int) -> str:
    """Why the kernels must not run for heads of a width; empty where they are right."""
    here = f"fla-core {fla} with Triton {triton} on devices of capability {capability[0]}.{capability[1]}"
    own, compiler = _numbers(fla), _numbers(triton)
    for each in REFUSED:
        fits = each.fla[0] <= own < each.fla[1] and each.triton[0] <= compiler < each.triton[1]
        if fits and capability[0] == each.capability and each.widths[0] <= width < each.widths[1]:
            return f"{here} {each.problem}"
    if not any(first <= own < end and capability[0] in majors for first, end, majors in KNOWN):
        return f"{here} has not been tried"
    return f"heads are {width} wide, the kernels take {WIDEST} at most" if width > WIDEST else ""


def _numbers(text: str) -> Version:
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
@functools.cache
def refusal_here(device: int, width: int) -> str:
    """`refusal` of what is installed, on a CUDA device; on a machine without one, on an H100."""
    try:
        installed = version("fla-core"), importlib.import_module("triton").__version__
    except (PackageNotFoundError, ImportError):
        return "fla-core is not installed (extra: fla)"
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (9, 0)  # for `train check`
    return refusal(*installed, capability, width)


@torch.library.custom_op("trainer::gated_delta", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kernels = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    given = {"q": q, "k": k, "v": v, "g": log_decay, "beta": rate, "initial_state": state}
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        cumulated, output, solved, end, *_ = kernels.chunk_gated_delta_rule_fwd(
            **{name: each.contiguous() for name, each in given.items()}, scale=1.0, output_final_state=True
        )
    return output, end, cumulated, solved


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, state: Tensor) -> tuple[Tensor, ...]:
    solved = k.new_empty(*log_decay.shape, CHUNK)  # the inverse of each chunk's triangular system
    return v.new_empty(v.shape), state.new_empty(state.shape), log_decay.new_empty(log_decay.shape), solved


@torch.library.custom_op(
    "trainer::gated_delta_backward",
    mutates_args=(),
    schema="(Tensor grad_output, Tensor? grad_end, Tensor q, Tensor k, Tensor v, Tensor cumulated, Tensor rate, Tensor state, "
    "Tensor solved) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(grad_output: Tensor, grad_end: Tensor | None, *saved: Tensor) -> tuple[Tensor, ...]:
    kernels = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    names = ("q", "k", "v", "g", "beta", "initial_state", "A")
    with torch.cuda.device_of(grad_output):  # type: ignore[no-untyped-call]
        grad_q, grad_k, grad_v, grad_rate, grad_decay, grad_state, *_ = kernels.chunk_gated_delta_rule_bwd(
            **{name: each.contiguous() for name, each in zip(names, saved, strict=True)},
            scale=1.0,
            do=grad_output.contiguous(),
            dht=None if grad_end is None else grad_end.contiguous(),
        )
    _, _, _, cumulated, rate, *_ = saved
    return grad_q, grad_k, grad_v, grad_decay.to(cumulated.dtype), grad_rate.to(rate.dtype), grad_state


@_backward.register_fake
def _(grad_output: Tensor, grad_end: Tensor | None, *saved: Tensor) -> tuple[Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in saved[:-1])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, _, rate, state = inputs
    _, _, cumulated, solved = output
    ctx.save_for_backward(q, k, v, cumulated, rate, state, solved)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad_output: Tensor | None, grad_end: Tensor | None, *_: None) -> tuple[Tensor, ...]:
    if grad_output is None:
        grad_output = torch.zeros_like(ctx.saved_tensors[2])
    found: tuple[Tensor, ...] = _backward(grad_output, grad_end, *ctx.saved_tensors)
    return found


_forward.register_autograd(_gradients, setup_context=_save)


def kernel_rule(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    state: Tensor,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` by the kernels; products have the type of autocast, if it is on, and sums are in float32."""
    kind = queries.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else queries.dtype
    if resets is not None:
        log_decay = log_decay.masked_fill(resets[:, None], FORGET)
    wide = (each.transpose(1, 2).to(dtype).contiguous() for each in (queries, keys, values))
    narrow = (each.transpose(1, 2).float().contiguous() for each in (log_decay, rate))
    output, end, _, _ = _forward(*wide, *narrow, state.float().contiguous())
    return output.transpose(1, 2).to(state.dtype), end


def rule(queries: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """`kernel_rule` where it is right and products have 16 bits; otherwise the rule in torch."""
    has_16_bits = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") in KERNEL_TYPES
    if queries.is_cuda and has_16_bits and not refusal_here(queries.device.index, queries.shape[-1]):
        return kernel_rule(queries, *args)
    return gated_delta_rule(queries, *args)


def use_rule(model: nn.Module, rule: Rule) -> None:
    """Let a rule run in all mixers."""
    for module in model.modules():
        if isinstance(module, DeltaMixer):
            module.rule = rule


def implementation(width: int, device: torch.device, precision: str) -> str:
    """The implementation that runs the rule for heads of a width, and why."""
    if device.type != "cuda":
        return "gated delta rule in torch: its kernels need CUDA"
    if precision == "fp32":
        return "gated delta rule in torch: its kernels compute products in 16 bits"  # fp32 asks for more
    if why := refusal_here(device.index or 0, width):
        return f"gated delta rule in torch: {why}"
    return f"gated delta rule by the kernels of fla-core {version('fla-core')}"


@functools.wraps(gated_delta.build)
def build(*args: Any, **given: Any) -> GatedDelta:
    """`gated_delta.build`, of which CUDA runs the kernels where they are right."""
    model = gated_delta.build(*args, **given)
    use_rule(model, rule)
    model.implementation = functools.partial(implementation, model.dim // model.heads)
    return model
