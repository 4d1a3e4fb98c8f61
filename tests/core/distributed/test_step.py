"""A step of uneven rows: clipped, of any scale, without tokens, and with a bad number on one rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.gloo import make_step, run_on_ranks
from trainer.data.loader import Carry, MicroBatch
from trainer.distributed.env import gather_from_ranks
from trainer.distributed.strategy import Replicated, Strategy
from trainer.ledger import Ledger, LedgerOptions
from trainer.metrics.gradient_noise import GradientNoiseScale
from trainer.model.encoder import build
from trainer.objective import Objective
from trainer.options import ObjectiveOptions
from trainer.training.extension import Flag, StepOutcome

ROWS, LENGTH, VOCABULARY = 8, 12, 11
CPU = torch.device("cpu")


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """8 rows of ragged length; row 5 has nothing to predict at all."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    targets = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    for row, length in enumerate([12, 1, 7, 3, 12, 0, 5, 9]):
        targets[row, length:] = -100
    return tokens, targets


def micro_batch(tokens: torch.Tensor, targets: torch.Tensor, first_group: int) -> MicroBatch:
    size = len(tokens)
    groups = np.arange(first_group, first_group + size)
    carry = Carry(groups, np.zeros(size, dtype=np.int64), np.zeros(size, dtype=bool))
    return MicroBatch({"tokens": tokens}, targets, carry, {})


Numbers = tuple[StepOutcome, dict[str, torch.Tensor], int]


def one_step(rank: int, world: int, micros: int, clip: float = 0.0, poisoned: int | None = None) -> Numbers:
    """Rank `rank`'s share of the rows, trained on for one step: the outcome, the weights and the groups held."""
    torch.manual_seed(0)
    inner = build(VOCABULARY, dim=8, num_layers=2).double()
    strategy = Replicated(world_size=world, device=CPU) if world > 1 else Strategy()
    ledger = Ledger(LedgerOptions(capacity=32, wipe_mode="none"), state_width=16, dtype=torch.float64)
    gns = GradientNoiseScale(inner, process_group=torch.distributed.group.WORLD if world > 1 else None)
    settings = {"ledgers": [ledger], "objective": Objective(ObjectiveOptions(z_loss=1e-2)), "gns": gns}
    step = make_step(inner, strategy, world_size=world, clip_grad_norm=clip, **settings)
    tokens, targets = rows()
    share = ROWS // (world * micros)
    window = []
    for index in range(micros):
        first = (rank * micros + index) * share
        window.append(micro_batch(tokens[first : first + share], targets[first : first + share], 100 + first))
    if poisoned == rank:
        with torch.no_grad():
            inner.embedding.weight[window[-1].inputs["tokens"][0, 0]] = float("nan")
    before = {name: value.clone() for name, value in inner.state_dict().items()}
    step.accumulate(1, window)
    outcome = step.finish(step.launch(lr=1.0))
    change = {name: before[name] - value for name, value in inner.state_dict().items()}
    return outcome, change, int(ledger.drain_metrics()["ledger/live_groups"])


def test_clipping_shrinks_the_true_gradient_to_the_limit():
    outcome, change, _ = one_step(0, 1, 2, 0.01)
    assert outcome.grad_norm > 0.01
    norm = float(torch.stack([c.square().sum() for c in change.values()]).sum().sqrt())
    assert norm == pytest.approx(0.01, rel=1e-3)


def noise_scale(max_tokens: int) -> dict[str, float]:
    torch.manual_seed(0)
    model = build(VOCABULARY, dim=8, num_layers=2).double()
    step = make_step(model, Strategy(), gns=GradientNoiseScale(model), max_tokens_per_micro=max_tokens)
    tokens, targets = rows()
    window = [micro_batch(tokens[first : first + 4], targets[first : first + 4], first) for first in (0, 4)]
    step.accumulate(1, window)
    step.finish(step.launch(lr=1.0))
    assert step.gns is not None
    return step.gns.metrics()


def test_the_noise_scale_does_not_depend_on_how_the_loss_is_scaled():
    """To the rounding of float64, in which the factor of a micro-batch is computed."""
    assert noise_scale(50) == pytest.approx(noise_scale(4999), rel=1e-11)
    assert noise_scale(50)["gns/tr_sigma"] != 0.0


def test_a_step_without_tokens_changes_nothing(monkeypatch):
    tokens, targets = rows()
    monkeypatch.setitem(globals(), "rows", lambda: (tokens, torch.full_like(targets, -100)))
    outcome, change, _ = one_step(0, 1, 2)
    assert outcome.tokens == 0
    assert outcome.is_finite
    assert Flag.EXHAUSTED not in outcome.flags  # the next batch may have targets
    assert all(bool((c == 0).all()) for c in change.values())


def poisoned_step(rank: int, world: int) -> Numbers:
    assert gather_from_ranks(rank or None, world_size=world) == [None, 1]
    return one_step(rank, world, 1, poisoned=1)


@pytest.mark.distributed
def test_a_bad_number_on_one_rank_skips_the_step_on_all_and_finite_states_stay():
    for outcome, change, live_groups in run_on_ranks(poisoned_step, 2):
        assert not outcome.is_finite
        assert Flag.EXHAUSTED not in outcome.flags
        assert all(bool((c == 0).all()) for c in change.values() if not c.isnan().any())
        # No weight was changed, so the states computed with them are the right continuation.
        assert live_groups == ROWS // 2
