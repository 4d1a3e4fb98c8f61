"""Does a model of your own carry its state? `check_model` in a test of your own, on a GRU and on
one that forgets.

python examples/model_contract.py
"""

from __future__ import annotations

from torch import Tensor, nn

from trainer.lab.contracts import check_model
from trainer.model.protocol import ModelOutput


class Gru(nn.Module):
    """A language model around `nn.GRU`, whose state is [B, state_width]."""

    def __init__(self, vocab_size: int, dim: int, *, forgets: bool = False) -> None:
        super().__init__()
        self.state_width = dim
        self.embedding = nn.Embedding(vocab_size, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab_size)
        self.forgets = forgets

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
        """Logits [B, T, V] of int64 [B, T] tokens, and the state after the last token."""
        given = None if state is None or self.forgets else state[None].contiguous()
        hidden, last = self.gru(self.embedding(tokens), given)
        return ModelOutput(self.head(hidden), last[0])


def test_my_model_keeps_the_contract() -> None:
    """What a test of your own looks like; pytest finds it by its name."""
    check_model(Gru(vocab_size=257, dim=32), vocab_size=257).raise_if_broken()


if __name__ == "__main__":
    test_my_model_keeps_the_contract()
    report = check_model(Gru(vocab_size=257, dim=32, forgets=True), vocab_size=257)
    for verdict in report.verdicts:
        print(f"{verdict.check:14} {verdict.status:18} {verdict.text}")
