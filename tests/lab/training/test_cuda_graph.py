"""A step whose micro-batches are replayed equals the same step without graphs, to the last bit."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.gloo import make_step
from tests.support.models import StatefulDropout
from tests.support.on_device import use_recorded_graphs
from tests.support.runs import FULL_ROWS, write_tiny_config
from trainer.config.load import load_config
from trainer.data.loader import Carry, MicroBatch
from trainer.distributed.strategy import Strategy
from trainer.errors import UserError
from trainer.lab.auxiliary import AuxiliaryLoss, AuxiliaryLosses
from trainer.lab.cuda_graph import MicroGraphs, make_graphs
from trainer.ledger import Ledger, LedgerOptions
from trainer.metrics.best_effort import BestEffort
from trainer.metrics.gradient_noise import GradientNoiseScale
from trainer.objective import Objective
from trainer.options import ObjectiveOptions
from trainer.training.extension import Extension, Extensions

ROWS, LENGTH, VOCABULARY, WIDTH = 4, 6, 11, 8
CPU = torch.device("cpu")


class Keeps(Extension):
    """Keeps results of logged steps."""

    def __init__(self, found: list[Tensor]) -> None:
        super().__init__(SimpleNamespace())  # type: ignore[arg-type]
        self.found = found

    def micro_done(self, micro: MicroBatch, result: Any) -> None:
        """Keeps what the next replay writes again."""
        self.found.append(result.token_loss)


def window(step: int, micros: int, more: dict[str, Any]) -> list[MicroBatch]:
    draw = torch.Generator().manual_seed(step)
    made = []
    for k in range(micros):
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=draw)
        targets = tokens[:, 1:].masked_fill(torch.rand(ROWS, LENGTH, generator=draw) < 0.2, -100)
        resets = torch.rand(ROWS, LENGTH, generator=draw) < 0.05
        groups = np.arange(ROWS) + ROWS * k
        carry = Carry(groups, np.full(ROWS, step), np.full(ROWS, step % 4 == 3))
        made.append(MicroBatch({"tokens": tokens[:, :-1], "resets": resets, **more}, targets, carry, {}))
    return made


def run(graphs: MicroGraphs | None, *, micros: int = 3, steps: int = 7, **more: Any) -> dict[str, Any]:
    """Some steps, of which every third is logged; all that they compute."""
    torch.manual_seed(0)
    model, seen, found = StatefulDropout(VOCABULARY, WIDTH), [], list[Tensor]()
    gns = GradientNoiseScale(model)
    extensions = Extensions(SimpleNamespace(best_effort=_guard), device=CPU, world_size=1)  # type: ignore[arg-type]
    extensions.add({"keeps": Keeps(found)})
    step = make_step(
        model,
        Strategy(),
        gns=gns,
        ledgers=[Ledger(LedgerOptions(capacity=64, wipe_mode="none"), state_width=WIDTH)],
        objective=Objective(ObjectiveOptions(z_loss=1e-2)),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5, fused=True),
        clip_grad_norm=1.0,
        autocast=nullcontext,
        extensions=extensions,
        graphs=graphs,
    )
    for number in range(1, steps + 1):
        step.accumulate(number, window(number, micros, more), is_logged=number % 3 == 0)
        launched = step.launch(lr=0.05)
        seen.append(torch.tensor(launched.numbers.read()))
        step.finish(launched)
    return {"numbers": seen, "kept": found, "model": model.state_dict()}


def _guard(name: str) -> Any:
    return BestEffort(name, on_event=lambda event: pytest.fail(str(event)))


def made(folder: Any, *sets: str, is_own: bool = True, ranks: int = 1, losses: Any = None) -> MicroGraphs | None:
    config = load_config(write_tiny_config(folder), [FULL_ROWS, *sets])
    plan: Any = SimpleNamespace(config=config, has_built_in_model=is_own, facts=SimpleNamespace(world_size=ranks))
    return make_graphs(plan, CPU, Strategy(), AuxiliaryLosses(losses))


@pytest.mark.parametrize(
    ("sets", "given", "reason"),
    [
        (['data.mixing.batching_mode="per_stream"'], {}, "only full rows have one shape"),
        ([], {"losses": {"balance": AuxiliaryLoss()}}, "looked at by Python"),
        (['distributed.strategy="fsdp"'], {"ranks": 2}, "FSDP gathers"),
    ],
)
def test_what_cannot_be_captured_is_refused_by_name_or_runs_without(tmp_path, sets, given, reason):
    assert made(tmp_path, *sets, **given) is None
    with pytest.raises(UserError, match=reason):
        made(tmp_path, *sets, "train.cuda_graph=true", **given)


def test_only_models_whose_python_is_known_are_captured_unasked(tmp_path):
    assert made(tmp_path, is_own=False) is None
    assert made(tmp_path)
    assert made(tmp_path, "train.cuda_graph=true", is_own=False)


@pytest.mark.parametrize("words", [None, ["no tensor"]])
def test_a_capture_that_fails_costs_no_step(monkeypatch, words):
    use_recorded_graphs(monkeypatch)

    def fails(graph: Any, **_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    more = {}
    if words is None:
        monkeypatch.setattr(torch.cuda, "graph", fails)
    else:
        more["words"] = words
    plain = run(None, **more)
    torch.testing.assert_close(run(MicroGraphs(CPU, is_asked=False), **more), plain, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(UserError, match=r"cannot be captured: .*(not permitted|must be Tensor)"):
        run(MicroGraphs(CPU, is_asked=True), **more)


@pytest.mark.parametrize("micros", [1, 2, 4])
def test_replayed_steps_equal_the_same_steps_without_graphs(monkeypatch, micros):
    plain = run(None, micros=micros)
    use_recorded_graphs(monkeypatch)
    graphs = MicroGraphs(CPU, is_asked=True)
    replayed = run(graphs, micros=micros)
    assert sum(each.graph.num_replays for each in graphs._graphs.values()) == 6 * micros
    assert len(graphs._graphs) <= 4
    torch.testing.assert_close(replayed, plain, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(replayed["model"]["unused"], torch.ones(3)), "a parameter without a gradient is not decayed"
