"""Reductions over real gloo processes, against the same numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.gloo import run_on_ranks
from trainer.metrics.aggregate import SumCount, Value
from trainer.metrics.best_effort import BestEffort
from trainer.metrics.rank_reduction import rank_operations, reduce_loss_metrics, reduce_over_ranks

PLAN = rank_operations(
    [
        "loss",
        "grad_norm",
        "ledger/cold_starts",
        "stream_mixing/active/remaining_min",
        "stream_mixing/active/remaining_max",
        "stream_mixing/active/modalities/python",
        "stream_mixing/refill/exhaust_events",
        "accuracy",
        "loss_spike",
        "gns/b_simple",
    ]
)


def local_values(rank: int) -> dict[str, Value]:
    """What each of three ranks has; rank 1 has nothing at all in the second group of keys."""
    values: dict[str, Value] = {
        "loss": SumCount(torch.tensor(2.0 * (rank + 1)), torch.tensor(rank + 1)) if rank else SumCount(0.0, 0.0),
        "ledger/cold_starts": float(rank * 10),
        "loss_spike": float(rank == 2),
    }
    if rank != 1:
        values |= {
            "grad_norm": torch.tensor(1.0 + rank),
            "stream_mixing/active/remaining_min": 5.0 + rank,
            "stream_mixing/active/remaining_max": -5.0 - rank,
            "stream_mixing/active/modalities/python": 2.0,
            "stream_mixing/refill/exhaust_events": torch.tensor(3, dtype=torch.int64),
            "accuracy": math.nan if rank == 2 else 0.5,
        }
    return values


class CountingGather:
    """Counts the collectives that pass through torch.distributed."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __enter__(self) -> CountingGather:
        self._saved = {name: getattr(dist, name) for name in ("all_gather", "all_reduce", "broadcast", "gather")}
        for name, function in self._saved.items():
            setattr(dist, name, lambda *a, _n=name, _f=function, **k: (self.calls.append(_n), _f(*a, **k))[1])
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._saved.items():
            setattr(dist, name, function)


def reduce_three(rank: int, world_size: int) -> tuple[dict[str, float], list[str]]:
    with CountingGather() as counting:
        reduced = reduce_over_ranks(local_values(rank), PLAN, device="cpu", world_size=world_size)
    empty = reduce_over_ranks({}, PLAN, device="cpu", world_size=world_size)
    assert empty == {}
    return reduced, counting.calls


@pytest.mark.distributed
def test_three_ranks_agree_in_one_collective() -> None:
    results = run_on_ranks(reduce_three, 3)
    for reduced, calls in results:
        assert calls == ["all_gather"]
        assert math.isnan(reduced.pop("accuracy")), "a NaN on one rank must not be averaged away"
        assert reduced == {
            "loss": (4.0 + 6.0) / (2 + 3),
            "grad_norm": (1.0 + 3.0) / 2,
            "ledger/cold_starts": 30.0,
            "ledger/cold_starts_max": 20.0,
            "stream_mixing/active/remaining_min": 5.0,
            "stream_mixing/active/remaining_max": -5.0,
            "stream_mixing/active/modalities/python": 4.0,
            "stream_mixing/refill/exhaust_events": 6.0,
            "loss_spike": 1.0,
        }


def reduce_four(rank: int, world_size: int) -> tuple[dict[str, float], list[str]]:
    values: dict[str, Any] = {"plain": float(rank), "token_loss": 1.0 + rank, "evicted": torch.tensor(rank)}
    counts: dict[str, Any] = {"token_loss": 10.0 * rank, "nobody": 0.0}
    if rank == 0:
        values["token_loss"] = math.nan  # the mean over no tokens
    if rank == 3:
        del values["evicted"]
    with CountingGather() as counting:
        reduced = reduce_loss_metrics(values, counts, ["evicted", "never"], device="cpu", world_size=world_size)
    return reduced, counting.calls


@pytest.mark.distributed
def test_four_ranks_reduce_means_weighted_means_and_totals() -> None:
    expected = {
        "plain": 1.5,
        "token_loss": (2 * 10 + 3 * 20 + 4 * 30) / 60,
        "evicted": 3.0,
        "evicted_max": 2.0,
        "never": 0.0,
        "never_max": 0.0,
    }
    for reduced, calls in run_on_ranks(reduce_four, 4):
        assert calls == ["all_gather"]
        assert reduced == expected


def test_one_rank_needs_no_process_group() -> None:
    reduced = reduce_over_ranks(local_values(2), PLAN, device="cpu", world_size=1)
    assert reduced["loss"] == 2.0
    assert reduced["ledger/cold_starts"] == reduced["ledger/cold_starts_max"] == 20.0
    assert reduce_loss_metrics({"a": 2.0}, {"a": 3}, ["b"], device="cpu", world_size=1) == {
        "a": 2.0,
        "b": 0.0,
        "b_max": 0.0,
    }


def test_a_mean_over_nothing_is_absent() -> None:
    for value in (math.nan, torch.tensor(math.nan)):
        for count in (0, torch.tensor(0)):
            assert reduce_loss_metrics({"a": value}, {"a": count}, device="cpu", world_size=1) == {}
    local: dict[str, Value] = {"loss": SumCount(0.0, 0.0)}
    assert reduce_over_ranks(local, PLAN, device="cpu", world_size=1) == {}


def test_infinities_survive() -> None:
    local: dict[str, Value] = {"stream_mixing/active/remaining_min": math.inf, "grad_norm": -math.inf}
    assert reduce_over_ranks(local, PLAN, device="cpu", world_size=1) == local


def test_the_plan_is_the_same_however_the_keys_are_collected() -> None:
    # The order too: it is the order of the numbers in the collective.
    assert list(rank_operations(reversed(list(PLAN))).items()) == list(PLAN.items())
    assert list(rank_operations([*PLAN, "loss"]).items()) == list(PLAN.items())
    assert rank_operations(["my/thing"]) == {"my/thing": "mean"}, "a key outside the catalog is a gauge"


def test_with_a_guard_what_cannot_be_packed_costs_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    guard = BestEffort("reduction")
    for _ in range(2):
        assert reduce_over_ranks({"lr": 1.0}, PLAN, device="cpu", world_size=1, guard=guard) == {}
    assert capsys.readouterr().err.count("reduction failed and is off") == 1


def test_a_key_outside_the_plan_is_refused() -> None:
    with pytest.raises(KeyError, match="not among the keys of the reduction: lr"):
        reduce_over_ranks({"lr": 1.0}, PLAN, device="cpu", world_size=1)
