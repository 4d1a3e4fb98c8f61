"""Ownership by hash, and look-up and store through owners: real processes on gloo against one ledger without ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from trainer.ledger import COUNTER_KEYS, Ledger, owner_of, splitmix64
from trainer.ledger.counters import Counters
from trainer.ledger.shard import LedgerShard
from trainer.ledger.store import StateStore

WIDTH = 3
NUM_STEPS = 12


def test_hash_is_splitmix64() -> None:
    # The first three outputs of the reference generator seeded with 0; each call adds the golden gamma to the state.
    gamma = 0x9E3779B97F4A7C15
    seeds = np.array([0, gamma, 2 * gamma % 2**64], np.uint64).view(np.int64)
    assert [hex(x) for x in splitmix64(seeds).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


@pytest.mark.parametrize("stride", [1, 8, 4096])
def test_owners_are_spread_whatever_the_stride_of_the_ids(stride: int) -> None:
    shares = Counter(owner_of(np.arange(8000) * stride, 8).tolist())
    assert len(shares) == 8
    assert max(shares.values()) < 1150


def test_shard_refuses_a_group_that_it_does_not_own() -> None:
    store = StateStore(
        width=1, capacity=2, device=torch.device("cpu"), dtype=torch.float32, has_recency=False, keep_undo=False
    )
    shard = LedgerShard(
        store,
        Counters(),
        wipe_mode="none",
        stale_threshold=0,
        sweep_every=1,
        wipe_every=0,
        is_owned=lambda groups: groups % 2 == 0,
    )
    shard.begin_step(1)
    no = np.array([False])
    with pytest.raises(RuntimeError, match="group 7 belongs to another rank's ledger"):
        shard.store(np.array([7]), no, no, torch.ones(1, 1))


def schedule(rank: int, world_size: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, torch.Tensor]]:
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


def run_rank(rank: int, world_size: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=world_size)
    shared = {"state_width": WIDTH, "capacity": 16, "wipe_mode": "periodic_stale", "stale_threshold": 1}
    ranks = {"ownership": "exchange", "rank": rank, "world_size": world_size}
    ledger = Ledger(**shared, **ranks, keep_undo=True)
    found, counts = [], []
    for step, (groups, cells, is_last, states) in enumerate(schedule(rank, world_size), start=1):
        ledger.begin_step(step)
        if step == 5:
            ledger.store(groups, np.ones_like(groups), np.zeros_like(is_last), states * 9)
            ledger.rollback()
            ledger.begin_step(step)
        found.append(ledger.lookup(groups, cells))
        ledger.store(groups, cells, is_last, states)
        if step == 7:
            ledger.release(groups)
        counts.append(ledger.drain_metrics())
        if step == 9:
            shards: list[object] = [None] * world_size
            dist.all_gather_object(shards, ledger.state_dict())
            torch.save(shards, f"{directory}/shards_{rank}")
            ledger = Ledger(**shared, **ranks, keep_undo=True)
            ledger.load_state_dict(shards)
    torch.save({"found": found, "counts": counts, "groups": ledger.state_dict()["groups"]}, f"{directory}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_exchange_equals_one_ledger_without_ranks(
    world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    mp.spawn(run_rank, (world_size, str(tmp_path)), nprocs=world_size)
    ranks = [torch.load(tmp_path / str(rank)) for rank in range(world_size)]

    whole = Ledger(state_width=WIDTH, capacity=64, wipe_mode="periodic_stale", stale_threshold=1)
    schedules = [schedule(rank, world_size) for rank in range(world_size)]
    total = Counter()
    for step in range(NUM_STEPS):
        groups, cells, is_last, states = (
            (torch.cat if isinstance(parts[0], torch.Tensor) else np.concatenate)(parts)
            for parts in zip(*(batches[step] for batches in schedules), strict=True)
        )
        whole.begin_step(step + 1)
        expected = whole.lookup(groups, cells)
        assert torch.equal(torch.cat([rank["found"][step] for rank in ranks]), expected)
        whole.store(groups, cells, is_last, states)
        if step == 6:
            whole.release(groups)
        drained = whole.drain_metrics()
        for key in (*COUNTER_KEYS, "ledger/live_groups"):
            assert sum(rank["counts"][step][key] for rank in ranks) == drained[key], (key, step)
            total[key] += drained[key]
    assert all(total[f"ledger/{key}"] for key in ("evictions/stale", "false_evictions/stale", "cold_starts"))
    assert total["ledger/refused_rows"] == world_size

    for rank, result in enumerate(ranks):
        assert (owner_of(result["groups"].numpy(), world_size) == rank).all()


@pytest.mark.distributed
def test_checkpoint_follows_its_owners_to_another_world_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    mp.spawn(run_rank, (2, str(tmp_path)), nprocs=2)
    shards = torch.load(tmp_path / "shards_0")
    saved = {int(g): row for s in shards for g, row in zip(s["groups"], s["rows"].tolist(), strict=True)}
    assert saved
    mp.spawn(load_resharded, (3, str(tmp_path), saved), nprocs=3)


def load_resharded(rank: int, world_size: int, directory: str, saved: dict[int, list[float]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/again", rank=rank, world_size=world_size)
    ledger = Ledger(
        state_width=WIDTH, capacity=16, wipe_mode="none", ownership="exchange", rank=rank, world_size=world_size
    )
    ledger.load_state_dict(torch.load(f"{directory}/shards_0"))
    groups = np.array(sorted(saved) if rank == 1 else [], np.int64)
    found = ledger.lookup(groups, np.ones_like(groups))
    assert found.tolist() == [saved[group] for group in groups.tolist()]
    dist.barrier()
    dist.destroy_process_group()
