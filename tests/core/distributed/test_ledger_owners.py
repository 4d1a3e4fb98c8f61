"""Owners on real processes: look-up, store, counts and checkpoints against one ledger without ranks."""

from __future__ import annotations

import io
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.gloo import run_on_ranks
from trainer.ledger import COUNTER_KEYS, Ledger, LedgerOptions, Owners, Ownership, owner_of

pytestmark = pytest.mark.distributed

WIDTH = 3
NUM_STEPS = 12
RELOADED_AFTER = 9
SETTINGS: dict[str, Any] = {"wipe_mode": "periodic_stale", "stale_threshold": 1}
Batch = tuple[np.ndarray, np.ndarray, np.ndarray, torch.Tensor]


def schedule(rank: int, world_size: int) -> list[Batch]:
    """Micro-batches of one rank: groups follow their lane for four cells; some ranks have nothing on some steps."""
    batches = []
    for step in range(NUM_STEPS):
        lanes = np.arange(0 if (step + rank) % 5 == 0 else 1 + (step // 4 + rank) % 3)
        groups = (step // 4 * 3 + lanes) * world_size + rank + 1
        if lanes.size and step % 3 == 1:
            groups[0] = -1
        cells = np.full(lanes.size, step % 4)
        values = torch.from_numpy(groups + step / 100).float()[:, None].expand(-1, WIDTH).contiguous()
        if step == 6 and lanes.size:
            values[-1, 0] = float("nan")
        batches.append((groups, cells, cells == 3, values))
    return batches


def new_ledger(rank: int, world_size: int, ownership: Ownership) -> Ledger:
    return Ledger(LedgerOptions(capacity=16, **SETTINGS), state_width=WIDTH, owners=Owners(ownership, rank, world_size))


def gathered(ledger: Ledger, world_size: int) -> list[dict[str, Any]]:
    """The shards of all ranks, each through `torch.save` as in a checkpoint."""
    shards: list[Any] = [None] * world_size
    if world_size == 1:
        shards = [ledger.state_dict()]
    else:
        torch.distributed.all_gather_object(shards, ledger.state_dict())
    buffer = io.BytesIO()
    torch.save(shards, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def run_schedule(rank: int, world_size: int, ownership: Ownership) -> dict[str, Any]:
    """One rank's share of the steps, with a resume from a checkpoint."""
    ledger = new_ledger(rank, world_size, ownership)
    found, counts, shards = [], [], []
    for step, (groups, cells, is_last, states) in enumerate(schedule(rank, world_size), start=1):
        ledger.begin_step(step)
        found.append(ledger.lookup(groups, cells))
        ledger.store(groups, cells, is_last, states)
        counts.append(ledger.drain_metrics())
        if step == RELOADED_AFTER:
            shards = gathered(ledger, world_size)
            ledger = new_ledger(rank, world_size, ownership)
            ledger.load_state_dict(shards)
    groups = ledger.state_dict()["groups"].numpy()
    return {"found": found, "counts": counts, "groups": groups, "shards": shards}


def both_ownerships(rank: int, world_size: int) -> dict[Ownership, dict[str, Any]]:
    return {"exchange": run_schedule(rank, world_size, "exchange"), "reader": run_schedule(rank, world_size, "reader")}


@cache
def results_of(world_size: int) -> list[dict[Ownership, dict[str, Any]]]:
    """Both runs of every rank."""
    return run_on_ranks(both_ownerships, world_size) if world_size > 1 else [both_ownerships(0, 1)]


def check_against_one_ledger(ranks: list[dict[str, Any]], world_size: int) -> None:
    """States, and the counts of every step, are those of one ledger that is given all ranks' rows."""
    whole = Ledger(LedgerOptions(capacity=128, **SETTINGS), state_width=WIDTH)
    schedules = [schedule(rank, world_size) for rank in range(world_size)]
    total: Counter[str] = Counter()
    for step in range(NUM_STEPS):
        parts = list(zip(*(batches[step] for batches in schedules), strict=True))
        groups, cells, is_last = (np.concatenate(arrays) for arrays in parts[:3])
        whole.begin_step(step + 1)
        expected = whole.lookup(groups, cells)
        assert torch.equal(torch.cat([rank["found"][step] for rank in ranks]), expected)
        whole.store(groups, cells, is_last, torch.cat(parts[3]))
        drained = whole.drain_metrics()
        for key in (*COUNTER_KEYS, "ledger/live_groups"):
            assert sum(rank["counts"][step][key] for rank in ranks) == drained[key], (key, step)
            total[key] += drained[key]
    assert all(total[f"ledger/{key}"] for key in ("evictions/stale", "false_evictions/stale", "cold_starts"))
    assert total["ledger/refused_rows"] == sum(len(batches[6][0]) > 0 for batches in schedules)


@pytest.mark.parametrize("world_size", [1, 2, *(pytest.param(world, marks=pytest.mark.slow) for world in (4, 8))])
def test_any_number_of_ranks_equals_one_ledger_under_both_ownerships(world_size: int) -> None:
    results = results_of(world_size)
    for ownership in ("exchange", "reader"):
        check_against_one_ledger([rank[ownership] for rank in results], world_size)
    for rank, result in enumerate(results):
        exchanged = result["exchange"]
        assert (owner_of(exchanged["groups"], world_size) == rank).all()


def load_on(
    rank: int, world_size: int, shards: dict[Ownership, list[dict[str, Any]]], wanted: list[int]
) -> dict[str, Any]:
    """Load four ranks' shards on this many; rank 1 asks for everything by exchange, every rank has all as a reader."""
    groups = np.array(wanted if rank == 1 else [], np.int64)
    exchanged = new_ledger(rank, world_size, "exchange")
    exchanged.load_state_dict(shards["exchange"])
    everything = new_ledger(rank, world_size, "reader")
    everything.load_state_dict(shards["reader"])
    dealt = new_ledger(rank, world_size, "reader")
    dealt.load_state_dict(shards["reader"], owned=lambda groups: groups % world_size == rank)
    ones = np.ones(len(wanted), np.int64)
    return {
        "found": exchanged.lookup(groups, np.ones_like(groups)).tolist(),
        "read": everything.lookup(np.array(wanted), ones).tolist(),
        "owned": exchanged.state_dict()["groups"].tolist(),
        "evicted": dict(exchanged._index.evicted),
        "dealt": dealt.state_dict()["groups"].tolist(),
    }


def test_checkpoint_of_four_ranks_keeps_every_entry_on_three() -> None:
    world_size = 3
    saved = results_of(4)[0]
    shards: dict[Ownership, list[dict[str, Any]]] = {name: saved[name]["shards"] for name in ("exchange", "reader")}
    rows = {
        name: {int(g): row for s in parts for g, row in zip(s["groups"], s["rows"].tolist(), strict=True)}
        for name, parts in shards.items()
    }
    assert len(rows["exchange"]) > 4
    assert rows["exchange"] == rows["reader"]
    evicted = {int(group) for shard in shards["exchange"] for group in shard["evicted_groups"]}
    assert evicted
    wanted = sorted(rows["exchange"])
    results = run_on_ranks(load_on, world_size, shards, wanted)
    assert results[1]["found"] == [rows["exchange"][group] for group in wanted]
    assert all(result["read"] == results[1]["found"] for result in results)
    assert sorted(group for result in results for group in result["owned"]) == wanted
    assert sorted(group for result in results for group in result["dealt"]) == wanted
    assert sorted(group for result in results for group in result["evicted"]) == sorted(evicted)
    for rank, result in enumerate(results):
        assert all(owner_of(np.array([group]), world_size)[0] == rank for group in result["owned"])
        assert all(group % world_size == rank for group in result["dealt"])
