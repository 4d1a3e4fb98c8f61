"""`RecurrentEncoder`: the reference model, a stack of gated linear recurrences and gated MLPs."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.model.blocks import Block, LanguageModel
from trainer.model.protocol import ModelOutput


class RecurrentEncoder(LanguageModel):
    """A causal language model with one recurrent state of width `dim` per layer.

    Running a row cell by cell, each from the state that the previous cell returned, equals running it uncut.
    The state's layout is `[layer 0 | layer 1 | ...]`, in float32 or wider, also under autocast.

    Args:
        vocab_size: number of token ids.
        dim: width of the residual stream and of each layer's state.
        num_layers: number of blocks.
        hidden: width of the gated MLP.
        tie_embeddings: share the embedding's weight with the output layer.

    """

    def __init__(self, *, vocab_size: int, dim: int, num_layers: int, hidden: int, tie_embeddings: bool) -> None:
        super().__init__(
            vocab_size=vocab_size,
            dim=dim,
            num_layers=num_layers,
            hidden=hidden,
            tie_embeddings=tie_embeddings,
            make_block=lambda: Block(dim, hidden),
        )
        self.state_width = num_layers * dim

    def forward(self, tokens: Tensor, state: Tensor | None = None, resets: Tensor | None = None) -> ModelOutput:
        """Predict from tokens [B, T], starting from `state` [B, state_width] (None: zero).

        `resets` (bool [B, T]) marks positions before which every layer resets its state to zero.
        """
        if state is None:
            dtype = torch.promote_types(self.embedding.weight.dtype, torch.float32)
            state = torch.zeros(tokens.shape[0], self.state_width, dtype=dtype, device=tokens.device)
        x = self.embedding(tokens)  # [B, T, D]
        ends = []
        for block, layer_state in zip(self.blocks, state.chunk(self.num_layers, dim=1), strict=True):
            x, end = block(x, layer_state, resets)
            ends.append(end)
        return ModelOutput(logits=self.head(self.norm(x)), state=torch.cat(ends, dim=1))

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations per trained token: 6 per weight of a matrix product and 5 per state channel.

        A product with a weight matrix costs a multiply-add (2) per weight forward and two of them backward (gradients of
        the input and of the weight). The recurrence costs 2 per channel forward and 3 backward. Norms, activations and
        gates (together well below 1 % at usual widths), the embedding lookup, and work that only this implementation of
        the scan adds are not counted. The cost does not depend on `seq_len`.
        """
        matrix_weights = self.num_layers * (5 * self.dim**2 + 3 * self.dim * self.hidden) + self.dim * self.vocab_size
        return 6.0 * matrix_weights + 5.0 * self.num_layers * self.dim
