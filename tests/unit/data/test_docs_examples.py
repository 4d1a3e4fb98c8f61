"""The examples of docs/mixing.md run as they stand."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np

from tests.support.runs import ROOT, make_corpus

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "mixing.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_corpus(tmp_path / "data" / "pytext")
    assert len(BLOCKS) == 2
    seen: list[dict[str, Any]] = []
    mine = [{"tokens": np.ones((2, 4)), "targets": np.ones((2, 4))}] * 20
    scope: dict[str, Any] = {"my_dataset": mine, "train_on": seen.append}
    exec(BLOCKS[0], scope)
    assert "(8, 256) {'stream_mixing/active/remaining_min'" in capsys.readouterr().out
    endless = BLOCKS[1].replace("BlendDataset(sources, seed=0)", "islice(BlendDataset(sources, seed=0), 30)")
    assert endless != BLOCKS[1]
    exec(endless, scope | {"islice": itertools.islice})
    assert {batch["tokens"].shape[1] for batch in seen} == {4, 256}
