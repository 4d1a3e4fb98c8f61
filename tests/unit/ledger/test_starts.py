"""Groups that begin from other states than zero: which, from what, counted how, and the same after a resume."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.rules import check_state_rules
from trainer.config.schema import LedgerTable
from trainer.errors import UserError
from trainer.extensions.starts import MOST_SAMPLED, ZERO_KEY, Start, StartingLedger
from trainer.ledger import COUNTER_KEYS, Ledger
from trainer.model.protocol import StateLayout

WIDTH = 3
KINDS: tuple[Start, ...] = ("carried", "noise")


def ledger_of(start: Start, *, share: float = 0.5, seed: int = 0, **settings: Any) -> StartingLedger:
    given = {"state_width": WIDTH, "capacity": 6, "wipe_mode": "lru", **settings}
    return StartingLedger(start=start, share=share, seed=seed, **given)


def starts(ledger: StartingLedger, groups: list[int], epoch: int = 0) -> torch.Tensor:
    return ledger.lookup(np.array(groups), np.zeros(len(groups), np.int64), epoch)


def hold(ledger: Ledger, rows: torch.Tensor, step: int = 1) -> None:
    ledger.begin_step(step)
    ids = 10**6 + np.arange(len(rows))
    ledger.store(ids, np.zeros(len(rows), np.int64), np.zeros(len(rows), bool), rows)


Batches = list[list[tuple[int, bool]]]
batches_of = st.lists(
    st.lists(st.tuples(st.integers(-1, 9), st.booleans()), min_size=1, max_size=5, unique_by=lambda each: each[0]),
    min_size=2,
    max_size=12,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(batches_of, st.sampled_from(KINDS), st.sampled_from(["float32", "bfloat16"]), st.integers(0, 10**6))
def test_beside_a_plain_ledger_only_the_chosen_first_cells_differ(
    batches: Batches, start: Start, dtype: str, seed: int
) -> None:
    """With evictions, ends and states that are not finite: all that is counted of a plain ledger stays as it is. Half-way the
    run is resumed, by a ledger that the state of the first was loaded into."""
    kind = {"dtype": getattr(torch, dtype)}
    ledger, plain = ledger_of(start, seed=seed, **kind), Ledger(state_width=WIDTH, capacity=6, wipe_mode="lru", **kind)
    held: dict[int, torch.Tensor] = {}  # of the plain ledger, as it would look them up
    cells: dict[int, int] = {}
    expected = dict.fromkeys((ZERO_KEY, f"ledger/starts/{start}"), 0)
    random = torch.Generator().manual_seed(seed)
    for step, batch in enumerate(batches, 1):
        if step == len(batches) // 2:
            again = ledger_of(start, seed=seed, **kind)
            again.load_state_dict([ledger.state_dict()])
            again.load_undrained(ledger.undrained())
            assert again.undrained() == ledger.undrained()
        for each in (ledger, plain):
            each.begin_step(step)
        ids = np.array([group for group, _ in batch])
        index = np.array([cells.get(group, 0) for group, _ in batch])
        states, without = ledger.lookup(ids, index, 3), plain.lookup(ids, index)
        ages, plain_ages = ledger.lookup_age(), plain.lookup_age()
        if step >= len(batches) // 2 >= 1:
            again.begin_step(step)
            assert torch.equal(again.lookup(ids, index, 3), states)
        for row, (group, cell) in enumerate(zip(ids.tolist(), index.tolist(), strict=True)):
            is_chosen = group >= 0 and ledger_chooses(group, seed, 3)
            assert ages[row] == (-1 if is_chosen else plain_ages[row])
            is_elsewhere = cell == 0 and is_chosen and len(held) >= (1 if start == "carried" else 2)
            if group >= 0 and cell == 0 and not (is_elsewhere and any(map(is_finite, held.values()))):
                expected[ZERO_KEY] += 1
            elif group >= 0 and cell == 0 and start == "carried":
                assert (
                    any(torch.equal(states[row], each) for each in held.values() if is_finite(each))
                    or not states[row].any()
                )
                expected[f"ledger/starts/{start if states[row].any() else 'zero'}"] += 1
                continue
            elif group >= 0 and cell == 0:
                finite = [each for each in held.values() if is_finite(each)]
                expected[f"ledger/starts/{start if len(finite) >= 2 else 'zero'}"] += 1
                assert bool(states[row].any()) == (len(finite) >= 2)
                continue
            assert torch.equal(states[row], without[row])
        rows = torch.randn(len(batch), WIDTH, generator=random) + 5
        rows[torch.rand(len(batch), generator=random) < 0.1] = torch.nan
        last = np.array([ends for _, ends in batch])
        for each in (ledger, plain, again) if step >= len(batches) // 2 >= 1 else (ledger, plain):
            each.store(ids, index, last, rows)
        for (group, ends), row in zip(batch, rows.to(kind["dtype"]).float(), strict=True):
            cells[group] = 0 if ends else cells.get(group, 0) + 1
            if group >= 0:
                held.pop(group, None)
                held |= {} if ends else {group: row}
        slots = {int(group) for group in ledger.state_dict()["groups"]}
        held = {group: row for group, row in held.items() if group in slots}
    counted, plainly = ledger.drain_metrics(), plain.drain_metrics()
    assert {key: counted[key] for key in COUNTER_KEYS} == {key: plainly[key] for key in COUNTER_KEYS}
    assert {key: counted[key] for key in expected} == expected


def is_finite(row: torch.Tensor) -> bool:
    return bool(row.isfinite().all())


def ledger_chooses(group: int, seed: int, epoch: int) -> bool:
    """By a ledger that holds one state, of another number of ranks and capacity."""
    ledger = ledger_of("carried", seed=seed, capacity=2)
    hold(ledger, torch.ones(1, WIDTH))
    return bool(starts(ledger, [group], epoch).any())


def test_the_choice_depends_on_seed_group_and_epoch_and_has_the_share() -> None:
    groups = np.random.default_rng(0).integers(0, 2**63 - 1, 4000).tolist()
    found = []
    for seed, epoch, share in ((0, 0, 0.2), (0, 0, 0.7), (0, 1, 0.7), (1, 0, 0.7)):
        ledger = ledger_of("carried", share=share, seed=seed)
        hold(ledger, torch.ones(1, WIDTH))
        found.append(starts(ledger, groups, epoch).any(1).numpy())
        assert abs(found[-1].mean() - share) < 0.04
    assert (found[1] >= found[0]).all()  # a larger share adds groups
    for other in found[2:]:
        assert 0.5 < (found[1] == other).mean() < 0.66  # 0.58 if independent


def test_carried_starts_are_spread_over_the_held_states() -> None:
    ledger = ledger_of("carried", share=1.0)
    hold(ledger, torch.arange(1.0, 7.0)[:, None].expand(6, WIDTH).contiguous())
    counts = starts(ledger, list(range(6000)))[:, 0].long().bincount(minlength=7)
    assert counts[0] == 0
    assert (abs(counts[1:] - 1000) < 150).all()


def test_noise_has_the_moments_of_the_held_states() -> None:
    ledger = ledger_of("noise", share=1.0, capacity=MOST_SAMPLED)
    rows = torch.randn(MOST_SAMPLED, WIDTH) * torch.tensor([1.0, 10.0, 0.0]) + torch.tensor([0.0, -50.0, 7.0])
    hold(ledger, rows)
    drawn = starts(ledger, list(range(8000)))
    spread = rows.std(0, correction=0)
    assert ((drawn.mean(0) - rows.mean(0)).abs() <= 5 * spread / 8000**0.5 + 1e-5).all()
    assert torch.allclose(drawn.std(0), spread, rtol=0.05, atol=1e-5)
    assert abs(torch.corrcoef(drawn[:, :2].T)[0, 1]) < 0.06
    assert torch.equal(starts(ledger, [17, 3]), drawn[[17, 3]])
    assert not torch.equal(starts(ledger, [17], epoch=1), drawn[[17]])


def test_what_cannot_be_begun_so_is_refused() -> None:
    def config(start: str) -> Any:
        train = SimpleNamespace(tbptt_cells=1)
        ledger, objective = LedgerTable.model_validate({"start": start}), SimpleNamespace(losses={})
        return SimpleNamespace(ledger=ledger, train=train, objective=objective, distributed=SimpleNamespace(context=1))

    position = StateLayout({"h": torch.zeros(2, 3), "position": torch.zeros(2, dtype=torch.long)})
    counting = SimpleNamespace(state_width=position.width, state_layout=position)
    check_state_rules(config("carried"), counting)
    with pytest.raises(UserError, match=r'"noise" makes no sense for state\[\'position\'\], which is torch.int64'):
        check_state_rules(config("noise"), counting)
    check_state_rules(config("noise"), SimpleNamespace(state_width=2))
    for start in KINDS:
        with pytest.raises(UserError, match="no state to begin from"):
            check_state_rules(config(start), SimpleNamespace(state_width=0))
    with pytest.raises(ValueError, match="start_share has no effect"):
        LedgerTable.model_validate({"start_share": 0.1})
