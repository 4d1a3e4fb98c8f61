"""A custom model and stream format, named in own.toml, without registration or changes to the trainer."""

from __future__ import annotations

import csv
from pathlib import Path

from torch import Tensor, nn

from trainer.data import ReadOptions, TokenTable, table_from_pieces
from trainer.model.protocol import ModelOutput


class GruModel(nn.Module):
    """An `nn.GRU` that works with the ledger: its input and output states are [B, state_width].

    Only `state_width` and `forward` are required. `flops_per_token` is optional: with it a run reports MFU.
    """

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.state_width = dim
        self.embedding = nn.Embedding(vocab_size, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
        """Logits [B, T, V] of int64 [B, T] tokens, and the state after the last token."""
        hidden, last = self.gru(self.embedding(tokens), None if state is None else state[None].contiguous())
        return ModelOutput(self.head(hidden), last[0])


def build_model(vocab_size: int, dim: int, num_layers: int, *, widen: int = 1) -> nn.Module:
    """`[model] target`: called with the sizes of the table and the keys of `[model] args` (here `widen`)."""
    if num_layers != 1:
        raise ValueError(f"this model has one layer, the config asks for {num_layers}")  # reject what is not supported
    return GruModel(vocab_size, dim * widen)


def load_csv(path: Path, options: ReadOptions) -> TokenTable:
    """`format`: reads a file's documents; here a document is the column `sentence` of a row.

    The result is one array of token ids with the boundaries of the documents. `options` has the run's tokenizer. The
    trainer checks the result and splits it into cells.
    """
    with path.open(encoding="utf-8", newline="") as file:
        pieces = [options.tokenizer.encode(row["sentence"]) for row in csv.DictReader(file)]
    return table_from_pieces(pieces, options.tokenizer.vocab_size)
