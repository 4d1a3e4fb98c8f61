"""A custom model, stream format and extension, named in own.toml, without registration or changes
to the trainer."""

from __future__ import annotations

import csv
from pathlib import Path

from torch import Tensor, nn

from trainer.data import ReadOptions, TokenTable, table_from_pieces
from trainer.data.loader import MicroBatch
from trainer.metrics.catalog import register
from trainer.metrics.catalog_rows import MetricSpec
from trainer.model.protocol import ModelOutput
from trainer.objective import ObjectiveOutput
from trainer.training.extension import Extension


class GruModel(nn.Module):
    """An `nn.GRU` that works with the ledger: its input and output states are [B, state_width].

    Only `state_width` and `forward` are required. `flops_per_token` is optional: with it a run
    reports MFU.
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
        self.saturation = (hidden.detach().abs() > 0.99).float().mean()  # for the extension below
        return ModelOutput(self.head(hidden), last[0])


def build_model(vocab_size: int, dim: int, num_layers: int, *, widen: int = 1) -> nn.Module:
    """`[model] target`: called with the sizes of the table and the keys of `[model] args` (here
    `widen`)."""
    if num_layers != 1:
        raise ValueError(f"this model has one layer, the config asks for {num_layers}")  # reject what is not supported
    return GruModel(vocab_size, dim * widen)


def load_csv(path: Path, options: ReadOptions) -> TokenTable:
    """`format`: reads a file's documents; here a document is the column `sentence` of a row.

    The result is one array of token ids with the boundaries of the documents. `options` has the
    run's tokenizer. The trainer checks the result and splits it into cells.
    """
    with path.open(encoding="utf-8", newline="") as file:
        pieces = [options.tokenizer.encode(row["sentence"]) for row in csv.DictReader(file)]
    return table_from_pieces(pieces, options.tokenizer.vocab_size)


SATURATION = "my/saturation"
register(
    MetricSpec(
        name=SATURATION,
        unit="",
        description="Share of the hidden units above 0.99 in size.",
        healthy="Below 0.1.",
        pathological="Near 1: the model no longer learns.",
        group="My model",
        title="Saturated units",
    )
)


class Saturation(Extension):
    """`[[extension]]`: reports what the model measured, on every logged step, as a mean over
    micro-batches and ranks."""

    def micro_done(self, micro: MicroBatch, result: ObjectiveOutput) -> None:
        """After the backward pass of each micro-batch."""
        if isinstance(self.run.model, GruModel):
            self.run.record(SATURATION, self.run.model.saturation)
