"""The residual blocks of the encoder: gated recurrence and gated MLP, each with pre-norm."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.model.recurrence import gated_scan
from trainer.model.scan.fused import fused_scan
from trainer.model.scan.gates import GATE_SHARPNESS

INITIAL_DECAY_RANGE = (0.9, 0.999)
"""Range of the channels' decay `a` at initialization, where the recurrence gate is about one half."""


def init_matrix(weight: Tensor, scale: float = 1.0) -> None:
    """Draw a weight [outputs, inputs] from a normal distribution of standard deviation `scale / sqrt(inputs)`.

    Normalized inputs then give outputs of about unit size. The usual fixed 0.02 is too small for widths below about a
    thousand: gates and values start near zero, and recall over cells is learned far later.
    """
    nn.init.normal_(weight, std=scale / math.sqrt(weight.shape[1]))


class GatedRecurrence(nn.Module):
    """Temporal mixing: `out(gelu(gate(x)) * RG-LRU(in(x)))`, the recurrent block of De et al. 2024 (section 2.3).

    The paper's short temporal convolution is omitted: it would be a second kind of state to carry between cells.
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
        """Draw all parameters from torch's global generator; `residual_scale` applies to the output projection."""
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
        """Mix x [B, T, D] over time from state [B, D]; returns the output [B, T, D] and the final state [B, D]."""
        values = self.values(x)  # [B, T, D]
        h, state = self.scan(
            self.recurrence_gate(values), self.input_gate(values), values, self.decay, resets, state
        )  # [B, T, D], [B, D]
        gate = F.gelu(self.output_gate(x))
        return self.out(gate * h.to(gate.dtype)), state


def use_kernels(model: nn.Module) -> None:
    """Let the model's scans be the kernels wherever its tensors are: fake ones on a CPU then need the memory of a CUDA run."""
    for module in model.modules():
        if isinstance(module, GatedRecurrence):
            module.scan = fused_scan


class GatedMLP(nn.Module):
    """`out(activation(gate(x)) * values(x))`: GEGLU, or SwiGLU with silu (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, dim: int, hidden: int, activation: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.activation = activation
        self.values = nn.Linear(dim, hidden, bias=False)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.out = nn.Linear(hidden, dim, bias=False)

    def init_weights(self, residual_scale: float) -> None:
        """Draw all parameters from torch's global generator; `residual_scale` applies to the output projection."""
        init_matrix(self.values.weight)
        init_matrix(self.gate.weight)
        init_matrix(self.out.weight, residual_scale)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, T, D] position-wise."""
        mapped: Tensor = self.out(self.activation(self.gate(x)) * self.values(x))
        return mapped


class Block(nn.Module):
    """One layer: `x + recurrence(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.recurrence_norm = nn.RMSNorm(dim)
        self.recurrence = GatedRecurrence(dim)
        self.mlp_norm = nn.RMSNorm(dim)
        self.mlp = GatedMLP(dim, hidden)

    def init_weights(self, num_layers: int) -> None:
        """Draw all parameters; the 2 * num_layers projections into the residual stream start smaller."""
        residual_scale = 1.0 / math.sqrt(2 * num_layers)
        self.recurrence.init_weights(residual_scale)
        self.mlp.init_weights(residual_scale)

    def forward(self, x: Tensor, state: Tensor, resets: Tensor | None) -> tuple[Tensor, Tensor]:
        """Map x [B, T, D] from state [B, D]; returns the output [B, T, D] and the final state [B, D]."""
        mixed, state = self.recurrence(self.recurrence_norm(x), state, resets)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), state


class LanguageModel(nn.Module):
    """What the families share: embedding, blocks, norm and output layer, with their first weights.

    Args:
        vocab_size: number of token ids.
        dim: width of the residual stream.
        num_layers: number of blocks.
        hidden: width of the gated MLP.
        tie_embeddings: share the embedding's weight with the output layer.
        make_block: makes a block, with an `init_weights(num_layers)`.

    Parameters are drawn from torch's global generator, so `torch.manual_seed` before construction makes them reproducible.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int,
        num_layers: int,
        hidden: int,
        tie_embeddings: bool,
        make_block: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        self.vocab_size, self.dim, self.num_layers, self.hidden = vocab_size, dim, num_layers, hidden
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(make_block() for _ in range(num_layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        init_matrix(self.embedding.weight)
        for block in self.blocks:
            block.init_weights(num_layers)  # type: ignore[operator]
        if tie_embeddings:
            self.head.weight = self.embedding.weight
        else:
            init_matrix(self.head.weight)
