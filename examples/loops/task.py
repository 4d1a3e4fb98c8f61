"""What the loops train: a causal transformer block that learns to count modulo 64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCAB, WIDTH, LENGTH = 64, 32, 16


class Counting(Dataset[dict[str, Tensor]]):
    """Rows of tokens that count up from a random start; one in four is replaced by a random one, so
    part of the loss stays."""

    def __len__(self) -> int:
        return 65_536

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        row = (torch.randint(VOCAB, (1,), generator=generator) + torch.arange(LENGTH)) % VOCAB
        noise = torch.randint(VOCAB, row.shape, generator=generator)
        row = torch.where(torch.rand(row.shape, generator=generator) < 0.25, noise, row)
        return {"input_ids": row, "labels": row}


class TinyGPT(nn.Module):
    """One causal block; any module will do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of each next token, []; both arguments are int64 [B, T]."""
        hidden = self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], device=input_ids.device)
        logits = self.head(self.block(hidden, src_mask=mask, is_causal=True))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
