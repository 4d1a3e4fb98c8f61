"""What the built-in families share: first weights, the gated MLP, and the frame of a language model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypedDict

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.errors import UserError


def init_matrix(weight: Tensor, scale: float = 1.0) -> None:
    """Draw a weight [outputs, inputs] from a normal distribution of standard deviation `scale / sqrt(inputs)`.

    Normalized inputs then give outputs of about unit size. The usual fixed 0.02 is too small for widths below about a
    thousand: gates and values start near zero, and recall over cells is learned far later.
    """
    nn.init.normal_(weight, std=scale / math.sqrt(weight.shape[1]))


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


class Sizes(TypedDict):
    """The sizes that every built-in family takes.

    vocab_size: number of token ids; dim: width of the residual stream; num_layers: number of blocks; hidden: width of the gated
    MLP; tie_embeddings: share the embedding's weight with the output layer.
    """

    vocab_size: int
    dim: int
    num_layers: int
    hidden: int
    tie_embeddings: bool


def check_sizes(vocab_size: int, dim: int, num_layers: int, mlp_ratio: float, tie_embeddings: bool) -> Sizes:
    """The sizes of a model whose MLP is `mlp_ratio` times as wide as `dim`, rounded to an integer.

    Raises:
        UserError: a size is not positive.
    """
    sizes = Sizes(
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        hidden=round(mlp_ratio * dim),
        tie_embeddings=tie_embeddings,
    )
    for name in ("vocab_size", "dim", "num_layers"):
        if sizes[name] < 1:
            raise UserError(f"model.{name}", f"must be >= 1, got {sizes[name]}")
    if sizes["hidden"] < 1:
        raise UserError("model.mlp_ratio", f"must give an MLP width of at least 1, got {mlp_ratio} times dim {dim}")
    return sizes


class LanguageModel(nn.Module):
    """What the families share: embedding, blocks, norm and output layer, with their first weights.

    Args:
        make_block: makes a block, with an `init_weights(num_layers)`.
        sizes: see `Sizes`.

    Parameters are drawn from torch's global generator, so `torch.manual_seed` before construction makes them reproducible.
    """

    def __init__(self, make_block: Callable[[], nn.Module], sizes: Sizes) -> None:
        super().__init__()
        self.vocab_size, self.dim = sizes["vocab_size"], sizes["dim"]
        self.num_layers, self.hidden = sizes["num_layers"], sizes["hidden"]
        self.embedding = nn.Embedding(self.vocab_size, self.dim)
        self.blocks = nn.ModuleList(make_block() for _ in range(self.num_layers))
        self.norm = nn.RMSNorm(self.dim)
        self.head = nn.Linear(self.dim, self.vocab_size, bias=False)
        init_matrix(self.embedding.weight)
        for block in self.blocks:
            block.init_weights(self.num_layers)  # type: ignore[operator]
        if sizes["tie_embeddings"]:
            self.head.weight = self.embedding.weight
        else:
            init_matrix(self.head.weight)
