"""`GatedDelta`: a stack of gated delta rules, whose state is a matrix per head, and gated MLPs.

The rule is computed chunk by chunk (Yang et al. 2024, arXiv 2412.06464):

    M_t = a_t (I - b_t k_t k_t^T) M_{t-1} + b_t k_t v_t^T,      o_t = M_t^T q_t

Writing the correction as u_t = b_t (v_t - a_t M_{t-1}^T k_t) gives M_t = a_t M_{t-1} + k_t u_t^T. Within a chunk that begins
with M_0, and with d_{ts} = a_{s+1} ... a_t and d_t = a_1 ... a_t, the corrections solve a triangular system,

    u_t + b_t sum_{s<t} d_{ts} (k_t . k_s) u_s = b_t (v_t - d_t M_0^T k_t),

whose inverse is computed for all chunks at once; only M_0 goes from chunk to chunk (section 3.3). The products d are
exponentials of differences of cumulated logarithms, at most 1 each: nothing overflows, and an underflow is a correct zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.model.encoder import GatedMLP, LanguageModel, ResidualBlock, RMSNorm, check_sizes, init_matrix
from trainer.model.protocol import ModelOutput

CHUNK = 64
WIDEST = 128  # heads by default
TAPS = 4  # positions that the short convolution sees
INITIAL_DECAY_RANGE = (1.0, 16.0)  # of A; the step is about 0.001 to 0.1, as in Mamba-2
INITIAL_STEP_RANGE = (1e-3, 1e-1)
SMALL = 1e-6  # added to the squared norm of keys and queries, as fla and transformers add it

Rule = Callable[..., tuple[Tensor, Tensor]]
LayerState = dict[str, Tensor]
"""`memory` [B, H, K, V] and `recent` [B, TAPS - 1, 3 D], the inputs of the short convolution that the next cell sees."""


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
    """Run the rule over a row from `state`; cutting the row anywhere and carrying the state changes only rounding.

    Args:
        queries, keys: q and k, [B, H, T, K]; keys of norm at most 1.
        values: v, [B, H, T, V].
        log_decay: log a, [B, H, T], at most 0.
        rate: b, [B, H, T], in [0, 1].
        state: M before the first position, [B, H, K, V].
        resets: bool [B, T], True where M is zero before the position; None: nowhere.
        chunk: positions that are solved together.

    Returns:
        o [B, H, T, V] and M after the last position [B, H, K, V], in the type of `state`.
    """
    batch, heads, length = rate.shape
    if resets is None:
        resets = torch.zeros(batch, length, dtype=torch.bool, device=queries.device)
    chunk = min(chunk, length)
    padding = -length % chunk

    def in_chunks(part: Tensor) -> Tensor:
        """[B * H, N, C, .] of [B, H, T, .], padded by positions that change nothing: a = 1, b = 0."""
        part = F.pad(part, (0, 0, 0, padding)) if padding else part
        return part.to(state.dtype).unflatten(2, (-1, chunk)).flatten(0, 1).contiguous()

    q, k, v, log_a, b = map(in_chunks, (queries, keys, values, log_decay[..., None], rate[..., None]))
    document = F.pad(resets, (0, padding)).unflatten(1, (-1, chunk)).cumsum(-1).repeat_interleave(heads, dim=0)
    # Autocast would round each product to 16 bits, and the norm after the rule divides by what is left where terms cancel.
    with _in_full(q):
        outputs, after = _Rule.apply(  # type: ignore[no-untyped-call]
            q, k, v, log_a[..., 0].cumsum(-1), b, state.flatten(0, 1), document
        )
    return outputs.view(batch, heads, -1, v.shape[-1])[:, :, :length], after.view_as(state)


def _in_full(x: Tensor) -> torch.autocast:
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)  # torch has none for meta tensors


class _Rule(torch.autograd.Function):
    """The rule over chunks [R, N, C, .] of R rows of one head.

    Beside its inputs it keeps the corrections, the inverse of each chunk's system and the state before each chunk: by autograd
    it would keep five times as much, and add up a gradient of all chunks for each of them.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, since_start: Tensor, b: Tensor, state: Tensor, document: Tensor
    ) -> tuple[Tensor, Tensor]:
        decay, from_state = _decays(since_start, document)
        system = (k @ k.mT).mul_(decay).mul_(b).tril_(-1)
        unit = torch.eye(k.shape[2], dtype=k.dtype, device=k.device)
        inverse = torch.linalg.solve_triangular(system, unit, upper=False, unitriangular=True)
        given, by_state, to_end = b * v, b * from_state * k, decay[..., -1, :, None] * k
        states, corrections = [], []
        for n in range(q.shape[1]):
            states.append(state)
            corrections.append(inverse[:, n] @ torch.baddbmm(given[:, n], by_state[:, n], state, alpha=-1))
            state = torch.baddbmm(from_state[:, n, -1:] * state, to_end[:, n].mT, corrections[n])
        before, u = torch.stack(states, dim=1), torch.stack(corrections, dim=1)
        outputs = (from_state * q) @ before
        outputs += (q @ k.mT).mul_(decay) @ u
        ctx.save_for_backward(q, k, v, since_start, b, document, before, u, inverse)
        return outputs, state

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        """With r = A u the right side of a chunk's system A: grad_r = A^-T grad_u, and grad_A = -grad_r u^T below the diagonal.

        A log decay scales what it stands in, so that its gradient is a sum of products of keys and queries with their gradients.
        """
        q, k, v, since_start, b, document, before, u, inverse = ctx.saved_tensors
        with _in_full(q):
            decay, from_state = _decays(since_start, document)
            by_state, to_end = b * from_state * k, decay[..., -1, :, None] * k
            grad_u = (q @ k.mT).mul_(decay).mT @ grad
            grad_before = (from_state * q).mT @ grad
            grads_r, grads_state = [], []
            for n in reversed(range(q.shape[1])):
                grads_state.append(grad_state)
                grads_r.append(inverse[:, n].mT @ torch.baddbmm(grad_u[:, n], to_end[:, n], grad_state))
                grad_state = torch.addcmul(grad_before[:, n], from_state[:, n, -1:], grad_state)
                grad_state = torch.baddbmm(grad_state, by_state[:, n].mT, grads_r[-1], alpha=-1)
            grad_r, grad_after = torch.stack(grads_r[::-1], dim=1), torch.stack(grads_state[::-1], dim=1)

            mixing = (grad @ u.mT).mul_(decay)  # gradient of q k^T
            system = (grad_r @ u.mT).mul_(decay).tril_(-1)  # of k k^T, negative, without b
            grad_q = (grad @ before.mT).mul_(from_state).add_(mixing @ k)
            grad_bk = (grad_r @ before.mT).mul_(from_state).add_(system @ k).neg_()  # of b k, where it corrects
            bk = b * k
            last = (u @ grad_after.mT).mul_(decay[..., -1, :, None])
            grad_k = (mixing.mT @ q).sub_(system.mT @ bk).add_(last)  # of k, where it is stored
            grad_since = (q * grad_q).add_(bk * grad_bk).sub_(k * grad_k).sum(-1)
            grad_since[..., -1] += (k * last).sum((-2, -1)) + from_state[..., -1, 0] * (grad_after * before).sum(
                (-2, -1)
            )
            grad_b = (k * grad_bk).sum(-1, keepdim=True) + (v * grad_r).sum(-1, keepdim=True)
            return grad_q, grad_k.addcmul_(b, grad_bk), grad_r.mul_(b), grad_since, grad_b, grad_state, None


def _decays(since_start: Tensor, document: Tensor) -> tuple[Tensor, Tensor]:
    """d_{ts} [R, N, C, C], zero where s > t or a document ends between them, and d_t [R, N, C, 1], zero after a reset."""
    is_same = (document[..., :, None] == document[..., None, :]).tril_()
    decay = (since_start[..., :, None] - since_start[..., None, :]).masked_fill_(~is_same, -torch.inf).exp_()
    return decay, since_start.exp().masked_fill_(document > 0, 0.0)[..., None]


class DeltaMixer(nn.Module):
    """Temporal mixing: the gated delta rule with a short convolution before it, and a gated norm after it.

    The layer of Yang et al. 2024 (arXiv 2412.06464, figure 1), with values as wide as keys.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.rule: Rule = gated_delta_rule
        self.inputs = nn.Linear(dim, 3 * dim, bias=False)  # queries, keys, values
        self.taps = nn.Parameter(torch.empty(TAPS, 3 * dim))
        self.gates = nn.Linear(dim, 2 * heads, bias=False)  # decay, rate
        self.log_a = nn.Parameter(torch.empty(heads))
        self.step_bias = nn.Parameter(torch.empty(heads))
        self.output_gate = nn.Linear(dim, dim, bias=False)
        self.norm = RMSNorm(dim // heads)
        self.out = nn.Linear(dim, dim, bias=False)

    def init_weights(self, residual_scale: float) -> None:
        """Draw all parameters from torch's global generator; `residual_scale` applies to the output projection."""
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
            state = {
                "memory": x.new_zeros(x.shape[0], self.heads, width, width, dtype=dtype),
                "recent": x.new_zeros(x.shape[0], TAPS - 1, 3 * self.dim, dtype=dtype),
            }
        *wide, last = _Projections.apply(  # type: ignore[no-untyped-call]
            inputs, self.taps, state["recent"].to(dtype), resets, self.heads
        )
        decay, rate = self.gates(x).to(dtype).transpose(1, 2).chunk(2, dim=1)  # [B, H, T]
        log_decay = -self.log_a.to(dtype).exp()[:, None] * F.softplus(decay + self.step_bias.to(dtype)[:, None])
        mixed, memory = self.rule(*wide, log_decay, torch.sigmoid(rate), state["memory"].to(dtype), resets)
        gate = F.silu(self.output_gate(x))
        normed = self.norm(mixed.transpose(1, 2)).flatten(2)  # [B, T, D]
        return self.out(gate * normed.to(gate.dtype)), {"memory": memory, "recent": last}


class _Projections(torch.autograd.Function):
    """Queries, keys and values [B, H, T, K] of what is projected [B, T, 3 D], and `recent` for what follows.

    Only its inputs are kept, of 16 bits under autocast; the backward computes the rest again.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, taps: Tensor, recent: Tensor, resets: Tensor | None, heads: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(inputs, taps, recent, resets)
        ctx.heads = heads
        convolved, last = short_convolution(inputs.to(recent.dtype), taps, recent, resets)
        parts = F.silu(convolved).unflatten(2, (3, heads, -1))  # [B, T, 3, H, K]
        parts[:, :, :2] *= inverse_norm(parts[:, :, :2])
        parts[:, :, 0] *= parts.shape[-1] ** -0.5
        queries, keys, values = (part.transpose(1, 2) for part in parts.unbind(2))
        return queries, keys, values, last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, taps, recent, resets = ctx.saved_tensors
        x = inputs.to(recent.dtype)
        convolved, _ = short_convolution(x, taps, recent, resets)
        normed = F.silu(convolved).unflatten(2, (3, ctx.heads, -1))[:, :, :2]
        scale = inverse_norm(normed)
        normed = normed * scale
        grad = torch.stack([each.transpose(1, 2) for each in grads[:3]], dim=2)
        grad[:, :, 0] *= grad.shape[-1] ** -0.5
        along = (normed * grad[:, :, :2]).sum(-1, keepdim=True)
        grad[:, :, :2] = grad[:, :, :2].addcmul(normed, along, value=-1).mul_(scale)
        grad = torch.ops.aten.silu_backward(grad.flatten(2), convolved)

        whole, grad_taps = torch.cat([recent, x], dim=1), []
        grad_whole = torch.zeros_like(whole)
        for weight, (place, is_same) in zip(taps.to(x.dtype), tap_places(len(taps), x.shape[1], resets), strict=True):
            seen = grad if is_same is None else grad * is_same
            grad_whole[:, place].addcmul_(seen, weight)
            grad_taps.append((seen * whole[:, place]).sum((0, 1)))
        grad_whole[:, -recent.shape[1] :] += mask_recent(grads[3], resets)
        grad_recent, grad_x = grad_whole.split([recent.shape[1], x.shape[1]], dim=1)
        return grad_x.to(inputs.dtype), torch.stack(grad_taps).to(taps.dtype), grad_recent, None, None


def inverse_norm(x: Tensor) -> Tensor:
    """1 / |x| of x [..., K], or less where it is near zero: the gradient stays finite there, unlike that of x / |x|."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(SMALL).rsqrt_()


def short_convolution(x: Tensor, taps: Tensor, recent: Tensor, resets: Tensor | None) -> tuple[Tensor, Tensor]:
    """`y_t = sum_j taps_j x_{t-j}` per channel, over the positions of the same document.

    Args:
        x: [B, T, D].
        taps: [J, D], the weight of x_t first.
        recent: x of the J - 1 positions before the row, [B, J - 1, D]; zeros where the document has none.
        resets: bool [B, T], True at the first position of a document; None: nowhere.

    Returns:
        y [B, T, D], and `recent` for what follows.
    """
    whole = torch.cat([recent, x], dim=1)  # [B, J - 1 + T, D]
    y = torch.zeros_like(x)
    for weight, (place, is_same) in zip(taps.to(x.dtype), tap_places(len(taps), x.shape[1], resets), strict=True):
        y.addcmul_(whole[:, place] if is_same is None else whole[:, place] * is_same, weight)
    return y, mask_recent(whole[:, -recent.shape[1] :], resets)


def tap_places(num_taps: int, length: int, resets: Tensor | None) -> Iterator[tuple[slice, Tensor | None]]:
    """Per tap j, where x_{t - j} is in a row [B, J - 1 + T, D] and whether its document is that of x_t, [B, T, 1] (None: it is)."""
    before = num_taps - 1
    document = None if resets is None else F.pad(resets, (before, 0)).cumsum(1)[..., None]
    for j in range(num_taps):
        place = slice(before - j, before - j + length)
        yield place, document[:, place] == document[:, before:] if document is not None and j else None


def mask_recent(recent: Tensor, resets: Tensor | None) -> Tensor:
    """A row's last inputs [B, J - 1, D], zero where they are not of the last one's document."""
    if resets is None:
        return recent.clone()  # not a view of the row
    document = F.pad(resets, (recent.shape[1], 0)).cumsum(1)[:, -recent.shape[1] :, None]
    return recent * (document == document[:, -1:])


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
    """A causal language model whose state is, per layer, a matrix per head and the last inputs of a short convolution.

    Running a row cell by cell equals running it uncut. `carry_flat` gives the state its flat form.

    Args:
        heads: heads of width dim / heads.
        sizes: of `LanguageModel`.
    """

    implementation: Callable[[torch.device, str], str]  # what runs the rule on a device in a precision, and why

    def __init__(self, *, heads: int, **sizes: Any) -> None:
        super().__init__(lambda: DeltaBlock(sizes["dim"], sizes["hidden"], heads), **sizes)
        self.heads = heads

    def forward(
        self, tokens: Tensor, state: list[LayerState] | None = None, resets: Tensor | None = None
    ) -> ModelOutput:
        """Predict from tokens [B, T], starting from the layers' states (None: zero); as `RecurrentEncoder`."""
        x = self.embedding(tokens)  # [B, T, D]
        ends: list[LayerState] = []
        for number, block in enumerate(self.blocks):
            x, end = block(x, None if state is None else state[number], resets)
            ends.append(end)
        return ModelOutput(self.head(self.norm(x)), ends)  # type: ignore[arg-type]

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations per trained token: 6 per weight of a matrix product, and the rule's own products.

        Per channel, in chunks of C positions and heads of width w, the rule takes 3 (w + C) multiply-adds forward and twice
        that backward, and its triangular system C forward and 3 C backward (a solution, and the gradient of the system). Norms,
        gates and the convolution, below 1 % at usual widths, are not counted.
        """
        width, chunk = self.dim // self.heads, min(CHUNK, seq_len)
        weights = self.num_layers * (5 * self.dim**2 + 2 * self.dim * self.heads + 3 * self.dim * self.hidden)
        rule = self.dim * (18 * (width + chunk) + 8 * chunk)
        return 6.0 * (weights + self.dim * self.vocab_size) + self.num_layers * rule


def fewest_heads(dim: int) -> int:
    """The fewest heads that divide `dim` and are at most `WIDEST` wide, the width at which kernels are fastest."""
    return next((n for n in range(-(-dim // WIDEST), dim) if n and dim % n == 0), max(dim, 1))


def build(
    vocab_size: int, dim: int, num_layers: int, *, heads: int = 0, mlp_ratio: float = 2.0, tie_embeddings: bool = False
) -> GatedDelta:
    """Build a `GatedDelta` with parameters drawn from torch's global generator.

    Args:
        heads: 0: `fewest_heads`. The state has dim^2 / heads numbers per layer, beside the convolution's.
        mlp_ratio, tie_embeddings: as in `check_sizes`.

    Raises:
        UserError: the heads do not divide `dim`.
    """
    heads = heads or fewest_heads(dim)
    sizes = check_sizes(vocab_size, dim, num_layers, mlp_ratio, tie_embeddings, heads=(heads,))
    return GatedDelta(heads=heads, **sizes)
