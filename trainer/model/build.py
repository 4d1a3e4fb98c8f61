"""Builds the reference model from the `[model]` table of a config."""

from __future__ import annotations

from trainer.errors import UserError
from trainer.model.encoder import RecurrentEncoder


def build(
    vocab_size: int, dim: int, num_layers: int, *, mlp_ratio: float = 2.0, tie_embeddings: bool = False
) -> RecurrentEncoder:
    """Build a `RecurrentEncoder` with parameters drawn from torch's global generator.

    Args:
        vocab_size: number of token ids.
        dim: width of the residual stream and of each layer's state.
        num_layers: number of blocks.
        mlp_ratio: width of the gated MLP as a multiple of `dim`, rounded to an integer.
        tie_embeddings: share one weight between the embedding and the output layer.

    Raises:
        UserError: a size is not positive.
    """
    for name, size in (("vocab_size", vocab_size), ("dim", dim), ("num_layers", num_layers)):
        if size < 1:
            raise UserError(f"model.{name}", f"must be >= 1, got {size}")
    hidden = round(mlp_ratio * dim)
    if hidden < 1:
        raise UserError("model.mlp_ratio", f"must give an MLP width of at least 1, got {mlp_ratio} times dim {dim}")
    return RecurrentEncoder(
        vocab_size=vocab_size, dim=dim, num_layers=num_layers, hidden=hidden, tie_embeddings=tie_embeddings
    )
