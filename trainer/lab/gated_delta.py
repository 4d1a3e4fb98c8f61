"""`GatedDelta`: a stack of gated delta rules, whose state is a matrix per head, and gated MLPs.

The rule is computed chunk by chunk (Yang et al. 2024, arXiv 2412.06464):

    M_t = a_t (I - b_t k_t k_t^T) M_{t-1} + b_t k_t v_t^T,      o_t = M_t^T q_t

Writing the correction as u_t = b_t (v_t - a_t M_{t-1}^T k_t) gives M_t = a_t M_{t-1} + k_t u_t^T.
Within a chunk that begins with M_0, and with d_{ts} = a_{s+1} ... a_t and d_t = a_1 ... a_t, the
corrections solve a triangular system,

    u_t + b_t sum_{s<t} d_{ts} (k_t . k_s) u_s = b_t (v_t - d_t M_0^T k_t),

whose inverse is computed for all chunks at once; only M_0 goes from chunk to chunk (section 3.3).
The products d are exponentials of differences of cumulated logarithms, at most 1 each: nothing
overflows, and an underflow is a correct zero. A log below `FORGET` counts as that: small sums round little.

On CUDA the kernels of flash-linear-attention run it, as operators that compile and can be
captured. They have no resets: at a document's first position the log decay is `FORGET` instead, so
nothing depends on the data. Which of their configurations run is measured at the first call on a
machine: another one may round differently. It could go if rglru were the only family.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.model.encoder import GatedMLP, LanguageModel, ResidualBlock, RMSNorm, check_sizes, init_matrix
from trainer.model.protocol import ModelOutput

CHUNK = 64
TAPS = 4  # positions that the short convolution sees
INITIAL_DECAY_RANGE = (1.0, 16.0)  # of A; the step is about 0.001 to 0.1, as in Mamba-2
INITIAL_STEP_RANGE = (1e-3, 1e-1)
SMALL = 1e-6  # added to the squared norm of keys and queries, as fla and transformers add it

Rule = Callable[..., tuple[Tensor, Tensor]]
LayerState = dict[str, Tensor]
"""`memory` [B, H, K, V] and `recent` [B, TAPS - 1, 3 D], the last inputs of the convolution."""


def gated_delta_rule(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    state: Tensor,
    resets: Tensor | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Run the rule over a row from `state`; cutting the row anywhere and carrying the state
    changes only rounding.

    q and k are [B, H, T, K], keys of norm at most 1; v is [B, H, T, V]; log a, at most 0, and b,
    in [0, 1], are [B, H, T]; M before the first position is [B, H, K, V], zero where `resets`
    (bool [B, T]) is True. Returns o [B, H, T, V] and M after the last position, in the type of
    `state`.
    """
    batch, heads, length = rate.shape
    if resets is None:
        resets = torch.zeros(batch, length, dtype=torch.bool, device=rate.device)
    chunk = chunk_length(length, chunk)
    padding = -length % chunk

    def in_chunks(part: Tensor) -> Tensor:
        """[R, N, C, .] of [B, H, T, .], R = B H; padding changes nothing: a = 1, b = 0."""
        if padding:
            part = F.pad(part, (0, 0, 0, padding))
        return torch.unflatten(part.to(state.dtype), 2, (-1, chunk)).flatten(0, 1).contiguous()

    log_decay = log_decay.clamp(FORGET)[..., None]
    q, k, v, log_a, b = map(in_chunks, (queries, keys, values, log_decay, rate[..., None]))
    document = torch.unflatten(F.pad(resets, (0, padding)), 1, (-1, chunk)).cumsum(-1).repeat_interleave(heads, dim=0)
    outputs, after = _over_chunks(q, k, v, log_a[..., 0].cumsum(-1), b, state.flatten(0, 1), document)
    return outputs.view(batch, heads, -1, v.shape[-1])[:, :, :length], after.view_as(state)


def chunk_length(length: int, most: int = CHUNK) -> int:
    """Positions of a row that are solved together: about equal chunks, since padding costs time."""
    even = -(-length // -(-length // most))
    return min(length, most, -(-even // 8) * 8)  # multiples of 8 suit vector instructions


def _over_chunks(
    q: Tensor, k: Tensor, v: Tensor, since_start: Tensor, b: Tensor, state: Tensor, document: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [R, N, C, V] of N chunks, and the state; `since_start`: sums of log a, [R, N, C]."""
    # Autocast would round each product to 16 bits, and the norm after the rule divides by what is
    # left where terms cancel. Torch has none for meta tensors.
    with torch.autocast("cpu" if q.is_meta else q.device.type, enabled=False):
        decay, from_state, by_state, to_end = _coefficients(k, since_start, b, document)
        system = ((k @ k.mT) * decay * b).tril(-1)
        unit = torch.eye(k.shape[2], dtype=k.dtype, device=k.device)
        inverse = torch.linalg.solve_triangular(system, unit, upper=False, unitriangular=True)
        states, corrections = [state], []
        # Taken apart at once: the gradient of a part alone would be as large as the whole.
        parts = (b * v, by_state, inverse, from_state[:, :, -1:], to_end.mT)
        for given, reads, solved, kept, writes in zip(*(part.unbind(1) for part in parts), strict=True):
            corrections.append(solved @ torch.baddbmm(given, reads, states[-1], alpha=-1))
            states.append(torch.baddbmm(kept * states[-1], writes, corrections[-1]))
        before, u = torch.stack(states[:-1], dim=1), torch.stack(corrections, dim=1)
        return (from_state * q) @ before + ((q @ k.mT) * decay) @ u, states[-1]


def _coefficients(k: Tensor, since_start: Tensor, b: Tensor, document: Tensor) -> tuple[Tensor, ...]:
    """d_{ts} [R, N, C, C], zero above the diagonal and between documents; d_t, b_t d_t k_t, d_{Cs} k_s."""
    is_same = (document[..., :, None] == document[..., None, :]).tril_()
    decay = (since_start[..., :, None] - since_start[..., None, :]).masked_fill_(~is_same, -torch.inf).exp_()
    from_state = since_start.exp().masked_fill(document > 0, 0.0)[..., None]
    return decay, from_state, b * from_state * k, decay[..., -1, :, None] * k


FORGET: Final = -32.0
"""Log decay at a reset, and the least one: what is left of a state, 1e-14, is below the rounding of what follows."""
WIDEST: Final = 256  # head that the kernels take
KERNEL_TYPES: Final = (torch.bfloat16, torch.float16)
HOPPER, HOPPER_TRITON = 9, (3, 7, 1)


def refusal(triton: str, capability: int, width: int) -> str:
    """Why kernels are wrong for a width of heads on a (major) capability; empty: they are not."""
    if capability == HOPPER and tuple(map(int, re.findall(r"\d+", triton)[:3])) < HOPPER_TRITON:
        return f"Triton {triton} refuses gradients on Hopper (fla-org/flash-linear-attention#640): use Triton 3.7.1"
    return f"heads are {width} wide, the kernels take {WIDEST} at most" if width > WIDEST else ""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
@functools.cache
def refusal_here(device: int, width: int) -> str:
    """`refusal` of what is installed, on a CUDA device; on a machine without one, on an H100."""
    if find_spec("fla") is None:
        return "fla-core is not installed (extra: fla)"
    capability = HOPPER  # for `train check`
    if torch.cuda.is_available():
        capability, _ = torch.cuda.get_device_capability(device)
    return refusal(importlib.import_module("triton").__version__, capability, width)


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
    return (v.new_empty(v.shape), state.new_empty(state.shape), log_decay.new_empty(log_decay.shape), solved)


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
    return (grad_q, grad_k, grad_v, grad_decay.to(cumulated.dtype), grad_rate.to(rate.dtype), grad_state)


@_backward.register_fake
def _(grad_output: Tensor, grad_end: Tensor | None, *saved: Tensor) -> tuple[Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in saved[:-1])


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, _, rate, state = inputs
    _, _, cumulated, solved = output
    ctx.save_for_backward(q, k, v, cumulated, rate, state, solved)
    ctx.set_materialize_grads(False)  # None stays None: `_gradients` knows what is not asked for


def _gradients(ctx: Any, grad_output: Tensor | None, grad_end: Tensor | None, *_: None) -> tuple[Tensor, ...]:
    if grad_output is None:
        grad_output = torch.zeros_like(ctx.saved_tensors[2])
    found: tuple[Tensor, ...] = _backward(grad_output, grad_end, *ctx.saved_tensors)
    return found


_forward.register_autograd(_gradients, setup_context=_keep_for_backward)


def kernel_rule(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    state: Tensor,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` by the kernels: products in autocast's type, if on; sums in float32."""
    kind = queries.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else queries.dtype
    if resets is not None:
        log_decay = log_decay.masked_fill(resets[:, None], FORGET)
    wide = (each.transpose(1, 2).to(dtype).contiguous() for each in (queries, keys, values))
    narrow = (each.transpose(1, 2).float().contiguous() for each in (log_decay.clamp(FORGET), rate))
    output, end, _, _ = _forward(*wide, *narrow, state.float().contiguous())
    return output.transpose(1, 2).to(state.dtype), end


def rule(queries: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """`kernel_rule` where it is right and products have 16 bits; otherwise the rule in torch."""
    has_16_bits = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") in KERNEL_TYPES
    if queries.is_cuda and has_16_bits and not refusal_here(queries.device.index, queries.shape[-1]):
        return kernel_rule(queries, *args)
    return gated_delta_rule(queries, *args)


class DeltaMixer(nn.Module):
    """The layer of Yang et al. 2024 (arXiv 2412.06464, figure 1), with values as wide as keys."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.rule: Rule = rule
        self.inputs = nn.Linear(dim, 3 * dim, bias=False)  # queries, keys, values
        self.taps = nn.Parameter(torch.empty(TAPS, 3 * dim))
        self.gates = nn.Linear(dim, 2 * heads, bias=False)  # decay, rate
        self.log_a = nn.Parameter(torch.empty(heads))
        self.step_bias = nn.Parameter(torch.empty(heads))
        self.output_gate = nn.Linear(dim, dim, bias=False)
        self.norm = RMSNorm(dim // heads)
        self.out = nn.Linear(dim, dim, bias=False)

    def init_weights(self, residual_scale: float) -> None:
        """Draw all parameters; `residual_scale` applies to the output projection."""
        for linear in (self.inputs, self.gates, self.output_gate):
            init_matrix(linear.weight)
        init_matrix(self.out.weight, residual_scale)
        nn.init.uniform_(self.taps, -(TAPS**-0.5), TAPS**-0.5)
        low, high = INITIAL_STEP_RANGE
        with torch.no_grad():
            self.log_a.copy_(torch.empty_like(self.log_a).uniform_(*INITIAL_DECAY_RANGE).log())
            step = torch.empty_like(self.step_bias).uniform_(math.log(low), math.log(high)).exp()
            self.step_bias.copy_(torch.log(torch.expm1(step)))  # softplus of it is the step

    def forward(self, x: Tensor, state: LayerState | None, resets: Tensor | None) -> tuple[Tensor, LayerState]:
        """Mix x [B, T, D] over time; returns the output [B, T, D] and the state after it."""
        dtype = torch.promote_types(x.dtype, torch.float32)  # from the convolution to the norm
        inputs, width = self.inputs(x), self.dim // self.heads  # [B, T, 3 D]
        if state is None:
            shapes = {"memory": (self.heads, width, width), "recent": (TAPS - 1, 3 * self.dim)}
            state = {name: x.new_zeros(x.shape[0], *shape, dtype=dtype) for name, shape in shapes.items()}
        convolve: Callable[..., Any] = self.convolve
        if torch.is_grad_enabled():  # computed again: keeps 42 to 66 bytes per channel and token less
            convolve = partial(checkpoint, convolve, use_reentrant=False, preserve_rng_state=False)
        *wide, last = convolve(inputs, state["recent"].to(dtype), resets)
        decay, rate = self.gates(x).to(dtype).transpose(1, 2).chunk(2, dim=1)  # [B, H, T]
        log_decay = -self.log_a.to(dtype).exp()[:, None] * F.softplus(decay + self.step_bias.to(dtype)[:, None])
        mixed, memory = self.rule(*wide, log_decay, torch.sigmoid(rate), state["memory"].to(dtype), resets)
        gate = F.silu(self.output_gate(x))
        normed = self.norm(mixed.transpose(1, 2)).flatten(2)  # [B, T, D]
        return self.out(gate * normed.to(gate.dtype)), {"memory": memory, "recent": last}

    def convolve(self, inputs: Tensor, recent: Tensor, resets: Tensor | None) -> tuple[Tensor, ...]:
        """Queries, keys, values [B, H, T, K] of projections [B, T, 3 D]; `recent` for the next."""
        convolved, last = short_convolution(inputs.to(recent.dtype), self.taps, recent, resets)
        parts = F.silu(convolved).chunk(3, dim=-1)
        queries, keys, values = (torch.unflatten(part, -1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return normalized(queries) * queries.shape[-1] ** -0.5, normalized(keys), values, last


def normalized(x: Tensor) -> Tensor:
    """x [..., K] with norm 1, less near zero, where the gradient of x / |x| is not finite."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + SMALL)


def short_convolution(x: Tensor, taps: Tensor, recent: Tensor, resets: Tensor | None) -> tuple[Tensor, Tensor]:
    """`y_t = sum_j taps_j x_{t-j}` per channel of x [B, T, D], within documents.

    `taps`: [J, D], the weight of x_t first. `recent`: x before the row, [B, J - 1, D], zeros where
    the document has none. Returns y [B, T, D], and `recent` for what follows.
    """
    before, length = taps.shape[0] - 1, x.shape[1]
    whole = torch.cat([recent, x], dim=1)  # [B, J - 1 + T, D]
    document = None if resets is None else F.pad(resets, (before, 0)).cumsum(1)[..., None]  # [B, J - 1 + T, 1]
    y = taps[0].to(x.dtype) * x
    for j in range(1, before + 1):
        earlier = whole[:, before - j : before - j + length]
        if document is not None:
            earlier = earlier * (document[:, before - j : before - j + length] == document[:, before:])
        y = y + taps[j].to(x.dtype) * earlier
    # Not a view, which would keep the whole row for as long as the state.
    if document is None:
        last = whole[:, -before:].clone()
    else:
        last = whole[:, -before:] * (document[:, -before:] == document[:, -1:])
    return y, last


class DeltaBlock(ResidualBlock):
    """One layer: `x + mixer(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, dim: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(dim)
        self.mixer = DeltaMixer(dim, heads)
        self.mlp_norm = RMSNorm(dim)
        self.mlp = GatedMLP(dim, hidden, F.silu)

    def forward(self, x: Tensor, state: LayerState | None, resets: Tensor | None) -> tuple[Tensor, LayerState]:
        """Map x [B, T, D]; see `DeltaMixer`."""
        mixed, after = self.mixer(self.mixer_norm(x), state, resets)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), after


class GatedDelta(LanguageModel):
    """A causal language model whose state is, per layer, a matrix per head and the last inputs of
    a short convolution.

    Running a row cell by cell equals running it uncut. `carry_flat` gives the state its flat form.
    The heads are dim / heads wide, and `sizes` are those of a `LanguageModel`.
    """

    def __init__(self, *, heads: int, **sizes: Any) -> None:
        super().__init__(lambda: DeltaBlock(sizes["dim"], sizes["hidden"], heads), **sizes)
        self.heads = heads

    def implementation(self, device: torch.device, precision: str) -> str:
        """The implementation that runs the rule on a device, and why."""
        if device.type != "cuda":
            return "gated delta rule in torch: its kernels need CUDA"
        if precision == "fp32":
            return "gated delta rule in torch: its kernels compute products in 16 bits"  # fp32 asks for more
        if why := refusal_here(device.index or 0, self.dim // self.heads):
            return f"gated delta rule in torch: {why}"
        return f"gated delta rule by the kernels of fla-core {version('fla-core')}"

    def forward(
        self, tokens: Tensor, state: list[LayerState] | None = None, resets: Tensor | None = None
    ) -> ModelOutput:
        """Predict from tokens [B, T] and the layers' states (None: zero); as `RecurrentEncoder`."""
        x = self.embedding(tokens)  # [B, T, D]
        ends: list[LayerState] = []
        for number, block in enumerate(self.blocks):
            x, end = block(x, None if state is None else state[number], resets)
            ends.append(end)
        return ModelOutput(self.head(self.norm(x)), ends)  # type: ignore[arg-type]

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs per trained token: 6 per weight of a matrix product, and the rule's own products.

        Per channel, in chunks of C positions and heads of width w, the rule takes 3 w + 4 C
        multiply-adds forward and 6 w + 9 C backward, at w = C. Norms, gates, the convolution and
        inverses, a few percent at usual widths, are not counted.
        """
        width, chunk = self.dim // self.heads, chunk_length(seq_len)
        weights = self.num_layers * (5 * self.dim**2 + 2 * self.dim * self.heads + 3 * self.dim * self.hidden)
        rule = self.dim * (18 * width + 26 * chunk)
        return 6.0 * (weights + self.dim * self.vocab_size) + self.num_layers * rule


def fewest_heads(dim: int) -> int:
    """The fewest heads that divide `dim`, at most 128 wide: kernels are fastest there."""
    least = max(-(-dim // 128), 1)
    return next((heads for heads in range(least, dim) if dim % heads == 0), max(dim, 1))


def build(
    vocab_size: int, dim: int, num_layers: int, *, heads: int = 0, mlp_ratio: float = 2.0, tie_embeddings: bool = False
) -> GatedDelta:
    """Build a `GatedDelta`; see `check_sizes`. `heads` = 0: `fewest_heads`."""
    heads = heads or fewest_heads(dim)
    sizes = check_sizes(vocab_size, dim, num_layers, mlp_ratio, tie_embeddings, heads=(heads,))
    return GatedDelta(heads=heads, **sizes)
