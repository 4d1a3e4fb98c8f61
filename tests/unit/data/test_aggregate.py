"""Reduction of pool metrics over real processes, one of which has nothing to say."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.gloo import run_on_ranks
from trainer.data.mixing.dataset import StreamMixingDataset
from trainer.data.mixing.reduction import REDUCTIONS, MetricsMerger, pool_ops, reduce_over_ranks
from trainer.data.streams.layout import discover_nested
from trainer.data.tokenizer import BytesTokenizer

A = "stream_mixing/active/"
EXHAUST = "stream_mixing/refill/exhaust_events"


def local_metrics(rank: int) -> dict[str, float]:
    """Ranks 0 and 2 have a pool, rank 1 has none."""
    if rank == 1:
        return {}
    return {
        A + "remaining_min": 5.0 + rank,
        A + "remaining_max": 50.0 + rank,
        A + "remaining_fraction_min": 0.25 - rank / 100,
        A + "remaining_fraction_max": 0.5,
        A + "steps_since_pick_max": 7.0 - rank,
        A + "pick_surprise_max": 1.5 * rank,
        A + "modalities/a": 0.0,
        A + "modalities/b": 3.0,
        EXHAUST: float(2**40 + rank),
    }


EXPECTED = {
    A + "remaining_min": 5.0,
    A + "remaining_max": 52.0,
    A + "remaining_fraction_min": 0.23,
    A + "remaining_fraction_max": 0.5,
    A + "steps_since_pick_max": 7.0,
    A + "pick_surprise_max": 3.0,
    A + "modalities/a": 0.0,
    A + "modalities/b": 6.0,
    EXHAUST: float(2**41 + 2),
}


def reduce_and_count_calls(rank: int, world_size: int) -> None:
    calls: list[str] = []
    original = dist.all_reduce

    def counted(tensor: torch.Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM, group: object = None) -> None:
        calls.append(str(op))
        original(tensor, op=op, group=group)

    dist.all_reduce = counted
    ops = pool_ops(["a", "b"])
    found = reduce_over_ranks(local_metrics(rank), ops, world_size=world_size, device="cpu")
    assert found == EXPECTED, found
    assert len(calls) == len(set(calls)) == 2, calls
    assert reduce_over_ranks({}, ops, world_size=world_size, device="cpu") == {}
    dist.all_reduce = original


@pytest.mark.distributed
def test_three_ranks_reduce_with_one_max_and_one_sum_and_an_empty_rank_changes_nothing() -> None:
    run_on_ranks(reduce_and_count_calls, 3)


def test_one_rank_needs_no_process_group() -> None:
    ops = pool_ops(["a", "b"])
    assert reduce_over_ranks(local_metrics(0), ops, world_size=1, device="cpu") == local_metrics(0)
    assert reduce_over_ranks({}, ops, world_size=1, device="cpu") == {}


def test_merging_sources_equals_reducing_ranks_and_forgets_counted_events() -> None:
    merger = MetricsMerger({**pool_ops(["a", "b"]), "blend/max_share_error": "max"}, 3)
    assert merger.merged() == {}
    for source in (2, 0):
        merger.update(source, dict.fromkeys(local_metrics(source), 99.0))
        merger.update(source, local_metrics(source))
    assert merger.merged() == EXPECTED
    assert merger.merged() == {**EXPECTED, EXHAUST: 0.0}


@pytest.mark.parametrize("seed", range(20))
def test_merged_peaks_equal_those_of_all_that_was_said_after_any_updates(seed: int) -> None:
    generator = random.Random(seed)
    ops = pool_ops(["a"])
    merger, said = MetricsMerger(ops, 3), {key: {} for key in ops}
    for _ in range(200):
        source = generator.randrange(3)
        metrics = {key: float(generator.randrange(5)) for key in ops if generator.random() < 0.7}
        merger.update(source, metrics)
        for key, value in metrics.items():
            said[key][source] = value
        if generator.random() < 0.6:
            expected = {key: REDUCTIONS[ops[key]](list(of.values())) for key, of in said.items() if of}
            assert merger.merged() == expected
            said[EXHAUST] = dict.fromkeys(said[EXHAUST], 0.0)


def pool_of_a_rank(rank: int, world_size: int, root: str) -> tuple[dict[str, float], dict[str, float]]:
    """What a rank's own dataset says after two picks, and what all of them together say."""
    dataset = StreamMixingDataset(
        discover_nested(root),
        name="s",
        tokenizer=BytesTokenizer(),
        seq_len=4,
        batch_size=1,
        batching_mode="device_per_stream",
        rank=rank,
        world_size=world_size,
    )
    for _ in range(2):
        next(dataset)
    local = dataset.drain_step_metrics()
    return local, dataset.aggregate_step_metrics(local, world_size, "cpu")


@pytest.mark.distributed
def test_three_real_pools_one_of_them_empty_reduce_to_the_right_numbers(tmp_path: Path) -> None:
    """Two streams of two equal groups each: of three slices the one in the middle gets nothing."""
    for modality, length in (("a", 32), ("b", 12)):
        (tmp_path / modality).mkdir()
        (tmp_path / modality / "s.jsonl").write_text(f'{{"text": "{"x" * length}"}}\n' * 2)
    results = run_on_ranks(pool_of_a_rank, 3, str(tmp_path))
    assert results[1][0] == {}
    reduced = results[0][1]
    assert all(each == reduced for _, each in results)
    assert set(reduced) == set(pool_ops(["a", "b"]))
    for key, op in pool_ops(["a", "b"]).items():
        assert reduced[key] == {"min": min, "max": max, "sum": sum}[op](results[rank][0][key] for rank in (0, 2))
    assert reduced[A + "modalities/a"] == reduced[A + "modalities/b"] == 2  # two ranks with both streams each
    assert 7 <= reduced[A + "remaining_max"] <= 8
    assert 2 <= reduced[A + "remaining_min"] <= 3
    assert reduced[EXHAUST] == 0
