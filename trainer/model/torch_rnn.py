"""`nn.GRU` and `nn.LSTM` as language models."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from trainer.model.protocol import ModelOutput


class TorchRnn(nn.Module):
    """An embedding, torch's recurrent layers, and a linear output; every cell of a group continues h (and c).

    Args:
        vocab_size: number of token ids.
        dim: width of the embedding and of each layer.
        num_layers: of the recurrent module.
        kind: `nn.GRU` or `nn.LSTM`.
        dropout: between layers, in training.
        tie_embeddings: share the embedding's weight with the output layer.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        num_layers: int,
        *,
        kind: Any,
        dropout: float = 0.0,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        self.num_layers, self.dim, self.vocab_size = num_layers, dim, vocab_size
        self.gates = 4 if kind is nn.LSTM else 3
        self.embedding = nn.Embedding(vocab_size, dim)
        self.rnn = kind(dim, dim, num_layers=num_layers, dropout=dropout if num_layers > 1 else 0.0, batch_first=True)
        self.head = nn.Linear(dim, vocab_size)
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        if tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, state: tuple[Tensor, ...] | None = None) -> ModelOutput:
        """Predict from tokens [B, T]; the state is (h,) or (h, c), each [B, layers, dim]."""
        given: Any = None
        if state is not None:
            given = tuple(part.transpose(0, 1).contiguous() for part in state)
            given = given if len(given) == 2 else given[0]
        x, end = self.rnn(self.embedding(tokens), given)
        ends = end if isinstance(end, tuple) else (end,)
        return ModelOutput(self.head(x), tuple(part.transpose(0, 1) for part in ends))  # type: ignore[arg-type]

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations per trained token: 6 per weight of a matrix product."""
        return 6.0 * (self.num_layers * self.gates * 2 * self.dim**2 + self.dim * self.vocab_size)


def gru(vocab_size: int, dim: int, num_layers: int, *, dropout: float = 0.0, tie_embeddings: bool = False) -> TorchRnn:
    """A `TorchRnn` of `nn.GRU`."""
    return TorchRnn(vocab_size, dim, num_layers, kind=nn.GRU, dropout=dropout, tie_embeddings=tie_embeddings)


def lstm(vocab_size: int, dim: int, num_layers: int, *, dropout: float = 0.0, tie_embeddings: bool = False) -> TorchRnn:
    """A `TorchRnn` of `nn.LSTM`."""
    return TorchRnn(vocab_size, dim, num_layers, kind=nn.LSTM, dropout=dropout, tie_embeddings=tie_embeddings)
