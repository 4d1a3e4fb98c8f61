"""`Transformer`: a plain causal Transformer, the baseline without a state.

It could go if the comparison were made with another trainer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from trainer.errors import UserError
from trainer.model.encoder import GatedMLP, LanguageModel, ResidualBlock, RMSNorm, check_sizes, init_matrix
from trainer.model.protocol import ModelOutput
from trainer.model.recurrence import HAS_TRITON

ROTARY_BASE = 10_000.0
Mask = Tensor | BlockMask | None


class Attention(nn.Module):
    """Causal attention with rotary positions (Su et al. 2021, arXiv 2104.09864) and grouped heads
    (Ainslie et al. 2023, arXiv 2305.13245)."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.inputs = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)  # queries, keys, values
        self.out = nn.Linear(dim, dim, bias=False)

    def init_weights(self, residual_scale: float) -> None:
        """Draw all parameters; `residual_scale` applies to the output projection."""
        init_matrix(self.inputs.weight)
        init_matrix(self.out.weight, residual_scale)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        """Mix x [B, T, D]. `mask`: keys of a query, bool [B, 1, T, T] or blocks; None: causal."""
        # [B, each head, T, head_dim]
        inputs = self.inputs(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        turned, values = inputs.tensor_split((self.heads + self.kv_heads,), dim=1)
        queries, keys = rotate(turned, *rotation).tensor_split((self.heads,), dim=1)  # both in one call
        values = values.contiguous()  # else the backward would keep the whole projection for them
        if isinstance(mask, BlockMask):
            attend = flex_attention if torch.compiler.is_compiling() else compiled_attention()
            mixed = attend(queries, keys, values, block_mask=mask, enable_gqa=True)
        else:
            mixed = F.scaled_dot_product_attention(queries, keys, values, mask, is_causal=mask is None, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class TransformerBlock(ResidualBlock):
    """One layer: `x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, dim: int, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim)
        self.attention = Attention(dim, heads, kv_heads)
        self.mlp_norm = RMSNorm(dim)
        self.mlp = GatedMLP(dim, hidden)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        """Map x [B, T, D]; see `Attention`."""
        x = x + self.attention(self.attention_norm(x), rotation, mask)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Transformer(LanguageModel):
    """A causal language model without state: a row sees nothing before its first token.

    Its context is thus `data.seq_len` tokens. Positions are relative and begin anew with each row;
    with `resets`, documents that share a row do not see each other.
    """

    state_width = 0

    def __init__(self, *, heads: int, kv_heads: int, **sizes: Any) -> None:
        super().__init__(lambda: TransformerBlock(sizes["dim"], sizes["hidden"], heads, kv_heads), **sizes)
        self.head_dim, self.kv_dim = self.dim // heads, self.dim // heads * kv_heads

    def forward(self, tokens: Tensor, state: Tensor | None = None, resets: Tensor | None = None) -> ModelOutput:
        """Predict from tokens [B, T]; `resets`: bool [B, T], begins of documents."""
        x = self.embedding(tokens)  # [B, T, D]
        rotation = rotations(tokens.shape[1], self.head_dim, x)
        mask: Mask = None
        if resets is not None:
            # A block; the narrowest head that flex attention takes; where it runs as one kernel.
            is_fit = tokens.shape[1] >= 128 and self.head_dim >= 16 and x.is_cuda and HAS_TRITON
            # Evaluations run uncompiled, where flex attention would hold all scores.
            mask = document_mask(resets, in_blocks=self.training and is_fit)
        for block in self.blocks:
            x = block(x, rotation, mask)
        return ModelOutput(logits=self.head(self.norm(x)), state=None)

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs per trained token: 6 per weight of a matrix product, and 12 * `seq_len` * `dim` per
        layer: attention's two products over the whole row, as Chowdhery et al. 2022 (PaLM, appendix
        B) count them, with the half that the mask makes superfluous."""
        per_layer = 2 * self.dim**2 + 2 * self.dim * self.kv_dim + 3 * self.dim * self.hidden
        weights = self.num_layers * per_layer + self.dim * self.vocab_size
        return 6.0 * weights + 12.0 * self.num_layers * seq_len * self.dim


def document_mask(resets: Tensor, *, in_blocks: bool) -> Mask:
    """The keys that each query sees: bool [B, 1, T, T], or `in_blocks` to skip empty ones."""
    document = resets.cumsum(1)  # [B, T]
    if not in_blocks:
        return (document[:, None, :, None] == document[:, None, None, :]).tril()

    def is_seen(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document[row, query] == document[row, key])

    rows, length = resets.shape
    return create_block_mask(is_seen, rows, None, length, length, device=resets.device)


@functools.cache
def compiled_attention() -> Any:
    """For layers that are not compiled: without a compiler, flex attention holds all scores."""
    return torch.compile(flex_attention)


def rotations(length: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, [length, head_dim / 2] each."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    exponents = -torch.arange(0, head_dim, 2, dtype=dtype, device=like.device) / head_dim
    angles = torch.arange(length, dtype=dtype, device=like.device)[:, None] * ROTARY_BASE**exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of x [B, heads, T, head_dim]; in x's type."""
    one, other = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1).to(x.dtype)


def build(
    vocab_size: int,
    dim: int,
    num_layers: int,
    *,
    heads: int = 0,  # of the queries; 0: one per 64 of `dim`, at least one
    kv_heads: int = 0,  # of keys and values; 0: as many as `heads`
    mlp_ratio: float = 2.0,  # width of the gated MLP over `dim`
    tie_embeddings: bool = False,  # share one weight between embedding and output layer
) -> Transformer:
    """Build a `Transformer`; see `check_sizes`."""
    heads = heads or max(dim // 64, 1)
    kv_heads = kv_heads or heads
    sizes = check_sizes(vocab_size, dim, num_layers, mlp_ratio, tie_embeddings, heads=(heads, kv_heads))
    if dim // heads % 2:
        problem = f"is {heads}, which gives each an odd width of {dim // heads}"
        raise UserError("model.args.heads", problem, "choose dim and heads so that dim / heads is even")
    return Transformer(heads=heads, kv_heads=kv_heads, **sizes)
