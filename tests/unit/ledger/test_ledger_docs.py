"""The example of docs/ledger.md is run as it stands there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from trainer.ledger import Ledger, LedgerOptions
from trainer.model import build

PAGE = Path(__file__).resolve().parents[3] / "docs" / "ledger.md"


@dataclass
class Batch:
    group_ids: np.ndarray
    cell_index: np.ndarray
    is_last: np.ndarray
    tokens: torch.Tensor
    targets: torch.Tensor


def test_the_loop_of_ones_own_carries_every_state() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (2, 12))
    batches = [
        Batch(
            np.array([5, 7]),
            np.full(2, cell),
            np.full(2, cell == 2),
            tokens[:, 4 * cell : 4 * cell + 4],
            tokens[:, 4 * cell : 4 * cell + 4],
        )
        for cell in range(3)
    ]
    model = build(11, 8, 2)
    seen = []

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(logits.detach())
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    names = {"Ledger": Ledger, "LedgerOptions": LedgerOptions, "model": model, "batches": batches, "loss_of": loss_of}
    exec(example, names)
    torch.testing.assert_close(torch.cat(seen, dim=1), model(tokens).logits.detach(), rtol=1e-5, atol=1e-5)
    assert names["ledger"].drain_metrics()["ledger/live_groups"] == 0
