"""`train.compile = true`: blocks compile without a graph break and once more for other shapes, and a run's numbers stay."""

from __future__ import annotations

from functools import partialmethod
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.support.late import events
from tests.support.on_device import differences, train_here
from tests.support.runs import FULL_ROWS

pytestmark = pytest.mark.cuda
# Batches of 4 and of 2 rows, a last evaluation batch of fewer, and every step measured and logged.
SETS = ("train.steps=6", "checkpoint.every=0", "eval.every=3", "eval.holdout_fraction=0.2")
RUNS = {
    "rglru": (),
    "gated_delta, full rows": ('model.family="gated_delta"', FULL_ROWS),
    "transformer": ('model.family="transformer"',),
    "gru": ('model.family="gru"',),
    "cells": ("train.tbptt_cells=2",),
    "blocks run again, head in chunks": ("objective.chunk_tokens=16", "train.activation_checkpointing=block"),
    "bf16, head in chunks": ("train.precision=bf16", "objective.chunk_tokens=16"),
}
MOST_GRAPHS = {"gru": 12, "cells": 8}
"""Of others 4: with gradients and without, each for the first shape and for all others. What a row's second cell begins with
needs a gradient, or comes without; a model without blocks compiles with what takes its state apart."""


@pytest.mark.parametrize("kind", RUNS)
def test_a_compiled_run_is_the_same_run(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: torch.device, kind: str
) -> None:
    if kind != "blocks run again, head in chunks":
        request.getfixturevalue("chosen_device")  # takes long
        if device.type == "cpu":  # with a C++ compiler even longer
            monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    sets = (*SETS, *RUNS[kind])
    eager = train_here(tmp_path / "eager", device, *sets)
    torch.compiler.reset()
    counters.clear()
    compiled = train_here(tmp_path / "compiled", device, *sets, "train.compile=true")
    assert counters["graph_break"] == {}
    assert 0 < counters["stats"]["unique_graphs"] <= MOST_GRAPHS.get(kind, 4)
    assert [event for event in events(compiled) if event["event"] == "diagnostic_disabled"] == []
    names = ("loss", "grad_norm", "eval_loss", "gns/tr_sigma", "ledger/fill_fraction")
    assert differences(eager, compiled, 3e-2 if kind.startswith("bf16") else 1e-4, names) == {}
