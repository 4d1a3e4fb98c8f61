"""`RecurrentEncoder`, the reference model: gated linear recurrences and MLPs; and shared parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.model.protocol import GATE_SHARPNESS, ModelOutput
from trainer.model.recurrence import gated_scan

NORM_EPS = 1e-5
"""As in Llama; with torch's 1.2e-7, the norm after the delta rule amplifies rounding."""
INITIAL_DECAY_RANGE = (0.9, 0.999)
"""Of the channels' decay `a` at initialization, where the recurrence gate is about one half."""


def init_matrix(weight: Tensor, scale: float = 1.0) -> None:
    """Draw a weight [outputs, inputs] from N(0, scale^2 / inputs).

    Normalized inputs then give outputs of about unit size. The usual deviation of 0.02 is too small
    below a width of a thousand: gates start near zero, and recall over cells is learned far later.
    """
    nn.init.normal_(weight, std=scale / math.sqrt(weight.shape[1]))


class RMSNorm(nn.RMSNorm):
    """torch's, with a faster backward on CPUs, where torch's is five times its LayerNorm's."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        # FSDP may gather weights in 16 bits while activations are in 32.
        if x.device.type != "cpu" or x.dtype.itemsize < 4 or x.dtype != self.weight.dtype:
            return super().forward(x)
        normalized: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normalized


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight)
        normalized: Tensor = unit * weight
        return normalized

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, scale, weight = ctx.saved_tensors
        # With g = grad * weight: grad_x = scale * (g - unit * mean(g * unit)).
        product = grad * unit
        mean = (product @ weight).div_(-unit.shape[-1]).unsqueeze(-1)
        grad_x = torch.addcmul(grad * weight, unit, mean).mul_(scale)
        return grad_x, product.reshape(-1, product.shape[-1]).sum(dim=0), None


class GatedMLP(nn.Module):
    """`out(activation(gate(x)) * values(x))`: GEGLU, or SwiGLU with silu (arXiv 2002.05202)."""

    def __init__(self, dim: int, hidden: int, activation: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.activation = activation
        self.values = nn.Linear(dim, hidden, bias=False)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.out = nn.Linear(hidden, dim, bias=False)

    def init_weights(self, residual_scale: float) -> None:
        """Draw all parameters; `residual_scale` applies to the output projection."""
        init_matrix(self.values.weight)
        init_matrix(self.gate.weight)
        init_matrix(self.out.weight, residual_scale)

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = self.out(self.activation(self.gate(x)) * self.values(x))
        return mapped


def check_sizes(
    vocab_size: int, dim: int, num_layers: int, mlp_ratio: float, tie_embeddings: bool, *, heads: Sequence[int] = ()
) -> dict[str, Any]:
    """The arguments of a `LanguageModel` whose MLP is about `mlp_ratio` times as wide as `dim`.

    `heads`: numbers of heads, each of which must divide the one before it, the first one `dim`.
    """
    sizes, problems = {"vocab_size": vocab_size, "dim": dim, "num_layers": num_layers}, {}
    if type(mlp_ratio) not in (int, float) or not 0 < mlp_ratio <= 1000:
        problems["args.mlp_ratio"], mlp_ratio = f"is {mlp_ratio!r}, no number above 0 and up to 1000", 1
    hidden = round(mlp_ratio * dim)
    for name, size in {**sizes, "args.mlp_ratio": hidden}.items():
        if size < 1:
            problems[name] = f"gives a size of {size}; it must be >= 1"
    for name, part, whole in zip(("args.heads", "args.kv_heads"), heads, (dim, *heads), strict=False):
        if type(part) is not int or part < 1 or whole % part:
            problems[name] = f"is {part!r}, no whole number that divides {whole}"
    if tie_embeddings not in (False, True):  # a text, such as "no", would count as true
        problems["args.tie_embeddings"] = f"is {tie_embeddings!r}, neither true nor false"
    for name, problem in problems.items():
        raise UserError(f"model.{name}", problem, "choose another value")
    return {**sizes, "hidden": hidden, "tie_embeddings": tie_embeddings}


class ResidualBlock(nn.Module):
    """One layer: a mixer over time and an MLP, each of which adds to the residual stream."""

    def init_weights(self, num_layers: int) -> None:
        """Draw all parameters; the 2 * num_layers projections into the stream start smaller."""
        for part in self.children():
            if not isinstance(part, RMSNorm):
                part.init_weights(1.0 / math.sqrt(2 * num_layers))  # type: ignore[operator]


class LanguageModel(nn.Module):
    """The common part of built-in families: embedding, blocks, norm, output layer, initial weights.

    Parameters come from torch's global generator: `torch.manual_seed` reproduces them. `make_block`
    makes a block, with an `init_weights(num_layers)`; `hidden` is the width of the gated MLP.
    """

    resets_in_one_pass = True

    def __init__(
        self,
        make_block: Callable[[], nn.Module],
        *,
        vocab_size: int,
        dim: int,
        num_layers: int,
        hidden: int,
        tie_embeddings: bool,
    ) -> None:
        super().__init__()
        self.vocab_size, self.dim, self.num_layers, self.hidden = vocab_size, dim, num_layers, hidden
        # The order in which parts are made and drawn decides the weights that a seed gives.
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(make_block() for _ in range(num_layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        init_matrix(self.embedding.weight)
        for block in self.blocks:
            block.init_weights(num_layers)  # type: ignore[operator]
        if tie_embeddings:
            self.head.weight = self.embedding.weight
        else:
            init_matrix(self.head.weight)


class GatedRecurrence(nn.Module):
    """`out(gelu(gate(x)) * RG-LRU(in(x)))`, the recurrent block of De et al. 2024 (section 2.3).

    Without the paper's short convolution, which would be a second state to carry between cells.
    """

    scan = staticmethod(gated_scan)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.values = nn.Linear(dim, dim, bias=False)
        self.output_gate = nn.Linear(dim, dim, bias=False)
        self.recurrence_gate = nn.Linear(dim, dim)
        self.input_gate = nn.Linear(dim, dim)
        self.decay = nn.Parameter(torch.empty(dim))
        self.out = nn.Linear(dim, dim, bias=False)

    def init_weights(self, residual_scale: float) -> None:
        """Draw all parameters; `residual_scale` applies to the output projection."""
        for linear in (self.values, self.output_gate, self.recurrence_gate, self.input_gate):
            init_matrix(linear.weight)
        nn.init.zeros_(self.recurrence_gate.bias)
        nn.init.zeros_(self.input_gate.bias)
        init_matrix(self.out.weight, residual_scale)
        low, high = INITIAL_DECAY_RANGE
        with torch.no_grad():
            # Uniform in a^2, as in the LRU (Orvieto et al. 2023, arXiv 2303.06349, lemma 3.2).
            log_a = 0.5 * torch.empty_like(self.decay).uniform_(low**2, high**2).log()
            # log a = -c * softplus(Lambda) / 2, solved for Lambda.
            self.decay.copy_(torch.log(torch.expm1(-2.0 * log_a / GATE_SHARPNESS)))

    def forward(self, x: Tensor, state: Tensor, resets: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mix x [B, T, D] over time from state [B, D]; returns the output and the final state."""
        values = self.values(x)  # [B, T, D]
        gates = self.recurrence_gate(values), self.input_gate(values)
        h, state = self.scan(*gates, values, self.decay, resets, state)  # [B, T, D], [B, D]
        gate = F.gelu(self.output_gate(x))
        return self.out(gate * h.to(gate.dtype)), state


class Block(ResidualBlock):
    """One layer: `x + recurrence(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.recurrence_norm = RMSNorm(dim)
        self.recurrence = GatedRecurrence(dim)
        self.mlp_norm = RMSNorm(dim)
        self.mlp = GatedMLP(dim, hidden)

    def forward(self, x: Tensor, state: Tensor, resets: Tensor | None) -> tuple[Tensor, Tensor]:
        """Map x [B, T, D] from state [B, D]; returns the output and the final state."""
        mixed, state = self.recurrence(self.recurrence_norm(x), state, resets)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), state


class RecurrentEncoder(LanguageModel):
    """A causal language model with one recurrent state of width `dim` per layer.

    Running a row cell by cell, each from the state that the previous cell returned, equals running
    it uncut. The state is `[layer 0 | layer 1 | ...]`, in float32 or wider, also under autocast.
    """

    def __init__(self, **sizes: Any) -> None:
        super().__init__(lambda: Block(sizes["dim"], sizes["hidden"]), **sizes)
        self.state_width = self.num_layers * self.dim

    def forward(self, tokens: Tensor, state: Tensor | None = None, resets: Tensor | None = None) -> ModelOutput:
        """Predict from tokens [B, T], starting from `state` [B, state_width] (None: zero).

        `resets` (bool [B, T]) marks positions before which every layer resets its state to zero.
        """
        if state is None:
            # Under autocast too: rounding to 16 bits would add up over many cells.
            dtype = torch.promote_types(self.embedding.weight.dtype, torch.float32)
            state = torch.zeros(tokens.shape[0], self.state_width, dtype=dtype, device=tokens.device)
        x = self.embedding(tokens)  # [B, T, D]
        ends = []
        for block, start in zip(self.blocks, state.chunk(self.num_layers, dim=1), strict=True):
            x, end = block(x, start, resets)
            ends.append(end)
        return ModelOutput(logits=self.head(self.norm(x)), state=torch.cat(ends, dim=1))

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs per trained token: 6 per weight of a matrix product (a multiply-add forward, two
        backward) and 5 per state channel. Norms, activations and gates (below 1 %), the embedding
        and extra work of this scan are not counted."""
        layer_weights = 5 * self.dim**2 + 3 * self.dim * self.hidden
        matrix_weights = self.num_layers * layer_weights + self.dim * self.vocab_size
        return 6.0 * matrix_weights + 5.0 * self.num_layers * self.dim


def build(
    vocab_size: int, dim: int, num_layers: int, *, mlp_ratio: float = 2.0, tie_embeddings: bool = False
) -> RecurrentEncoder:
    """Build a `RecurrentEncoder`; see `check_sizes`."""
    return RecurrentEncoder(**check_sizes(vocab_size, dim, num_layers, mlp_ratio, tie_embeddings))
