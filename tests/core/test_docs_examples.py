"""The examples of docs/mixing.md and docs/ledger.md run as they stand."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from tests.support.runs import ROOT, make_corpus
from trainer.ledger import Ledger, LedgerOptions
from trainer.model import build


def examples_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_examples_run(tmp_path, monkeypatch, capsys):
    first, second = examples_of("mixing.md")
    monkeypatch.chdir(tmp_path)
    make_corpus(tmp_path / "data" / "pytext")
    seen: list[dict[str, Any]] = []
    mine = [{"tokens": np.ones((2, 4)), "targets": np.ones((2, 4))}] * 20
    scope: dict[str, Any] = {"my_dataset": mine, "train_on": seen.append, "islice": itertools.islice}
    exec(first, scope)
    assert "(8, 256) {'stream_mixing/active/remaining_min'" in capsys.readouterr().out
    exec(second.replace("BlendDataset(sources, seed=0)", "islice(BlendDataset(sources, seed=0), 30)"), scope)
    assert {batch["tokens"].shape[1] for batch in seen} == {4, 256}


def test_the_loop_of_ones_own_carries_every_state() -> None:
    (example,) = examples_of("ledger.md")
    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (2, 12))
    ids, model, seen = np.array([5, 7]), build(11, 8, 2), []
    batches = []
    for cell, own in enumerate(tokens.split(4, dim=1)):
        last = np.full(2, cell == 2)
        batches.append(
            SimpleNamespace(group_ids=ids, cell_index=np.full(2, cell), is_last=last, tokens=own, targets=own)
        )

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(logits.detach())
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    names = {"Ledger": Ledger, "LedgerOptions": LedgerOptions, "model": model, "batches": batches, "loss_of": loss_of}
    exec(example, names)
    torch.testing.assert_close(torch.cat(seen, dim=1), model(tokens).logits.detach(), rtol=1e-5, atol=1e-5)
    assert names["ledger"].drain_metrics()["ledger/live_groups"] == 0
