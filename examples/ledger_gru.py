"""The ledger with an `nn.GRU`: documents longer than a batch row are read in cells, and each cell
continues the state.

    python examples/ledger_gru.py
    python examples/ledger_gru.py --capacity 8      # too small: the ledger counts the states that it dropped

A document states a key in its first cell and asks for it in every later one. Later cells do not
contain the key, so a correct answer there depends on the state from the ledger.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.ledger import Ledger, LedgerOptions

KEYS, ASK, CELL, CELLS, WIDTH = 16, 16, 4, 4, 64  # token 16 asks; 4 tokens a cell, 4 cells a document


class Recurrent(nn.Module):
    """An embedding, a GRU and a head, with input and output states of shape [B, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(KEYS + 1, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, KEYS)

    def forward(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, T, KEYS] and the state after the last token."""
        hidden, last = self.gru(self.embedding(tokens), state[None].contiguous())
        return self.head(hidden), last[0]


def main() -> None:
    """Train, and print the ledger's counters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--documents", type=int, default=32, help="documents that are read concurrently")
    parser.add_argument("--capacity", type=int, default=64, help="capacity of the ledger in states")
    options = parser.parse_args()
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    model = Recurrent()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ledger = Ledger(LedgerOptions(capacity=options.capacity), state_width=WIDTH)

    rows = options.documents // 4  # a batch has a quarter of the open documents; the other states wait
    keys = np.zeros(options.documents, np.int64)
    for step in range(1, options.steps + 1):
        turn, pass_number = (step - 1) % 4, (step - 1) // 4
        lanes = np.arange(turn * rows, (turn + 1) * rows)
        cell_index = np.full(rows, pass_number % CELLS)
        group_ids = lanes + options.documents * (pass_number // CELLS)  # unique per document, never reused
        tokens = np.full((rows, CELL), ASK)
        if cell_index[0] == 0:
            keys[lanes] = generator.integers(KEYS, size=rows)
            tokens[:] = keys[lanes, None]
        wanted = torch.from_numpy(keys[lanes, None].repeat(CELL, axis=1))

        ledger.begin_step(step)
        state = ledger.lookup(group_ids, cell_index)  # [B, WIDTH]: zero at the start of a document
        logits, state = model(torch.from_numpy(tokens), state)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        # Store after the backward, so that a checkpointed forward stores once. A document's last
        # cell frees its state.
        ledger.store(group_ids, cell_index, cell_index == CELLS - 1, state)
        optimizer.step()
        optimizer.zero_grad()

        if step % 40 == 0:
            counts = ledger.drain_metrics()
            print(
                f"step {step}: loss {loss.item():.3f} in cell {cell_index[0]}, "
                f"cold starts {counts['ledger/cold_starts']:.0f}, dropped while still needed "
                f"{counts['ledger/false_evictions/lru']:.0f}"
            )


if __name__ == "__main__":
    main()
