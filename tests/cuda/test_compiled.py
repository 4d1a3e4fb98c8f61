"""`train.compile = true`: blocks compile without a graph break and once more for other shapes, and a run's numbers stay."""

from __future__ import annotations

from functools import partialmethod
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.fault_runs import events
from tests.support.on_device import differences, train_here
from tests.support.runs import FULL_ROWS

pytestmark = pytest.mark.cuda
# Batches of 4 and of 2 rows, a last evaluation batch of fewer, and every step measured and logged.
SETS = ("train.steps=6", "checkpoint.every=0", "eval.every=3", "eval.holdout_fraction=0.2")
AGAIN = ("objective.chunk_tokens=16", "train.activation_checkpointing=block")
RUNS = {
    "rglru": (),
    "rglru, full rows": (FULL_ROWS, "sample.every=3"),
    "gated_delta, full rows": ('model.family="gated_delta"', FULL_ROWS),
    "transformer": ('model.family="transformer"',),
    "gru": ('model.family="gru"',),
    "blocks run again, head in chunks": AGAIN,
    "bf16, head in chunks": ("train.precision=bf16", "objective.chunk_tokens=16"),
}
MOST_GRAPHS = {"rglru, full rows": 1, "gated_delta, full rows": 1, "gru": 6}
"""Of others 2: for the first shape and for all others; evaluations run uncompiled. What a row's second cell begins with needs a
gradient, or comes without; a model without blocks compiles with what takes its state apart."""


# Of inductor on a CPU: it takes a C++ compiler minutes, and on a busy machine longer than other tests may take.
@pytest.mark.parametrize(
    "kind", [*RUNS, pytest.param("by inductor", marks=[pytest.mark.slow, pytest.mark.timeout(5400)])]
)
def test_a_compiled_run_is_the_same_run(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: torch.device, kind: str
) -> None:
    changes = RUNS.get(kind, AGAIN)
    if changes is not AGAIN:
        request.getfixturevalue("chosen_device")  # takes long
    if kind not in RUNS:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # others may write to the usual one
    elif device.type == "cpu":
        monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    from torch._dynamo.utils import counters  # a second, in each process that collects

    sets = (*SETS, *changes)
    eager = train_here(tmp_path / "eager", device, *sets)
    torch.compiler.reset()
    counters.clear()
    compiled = train_here(tmp_path / "compiled", device, *sets, "train.compile=true")
    assert counters["graph_break"] == {}
    assert 0 < counters["stats"]["unique_graphs"] <= MOST_GRAPHS.get(kind, 2)
    assert [event for event in events(compiled) if event["event"] == "diagnostic_disabled"] == []
    names = ("loss", "grad_norm", "eval_loss", "gns/tr_sigma", "ledger/fill_fraction")
    assert differences(eager, compiled, 3e-2 if kind.startswith("bf16") else 1e-4, names) == {}
