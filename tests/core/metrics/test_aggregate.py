"""Micro-steps become a step, and ranks one row: over real gloo processes, against numbers worked out by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.gloo import run_on_ranks
from trainer.lab.moments import Moments
from trainer.lab.own_loop import reduce_loss_metrics
from trainer.metrics.aggregate import Recorder, SumCount, Value, rank_operations, reduce_over_ranks
from trainer.metrics.best_effort import BestEffort

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
            "grad_norm": torch.tensor(math.inf * (1 - rank)),  # the mean of inf and -inf
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
    with CountingGather() as counting, np.errstate(all="raise"):
        reduced = reduce_over_ranks(local_values(rank), PLAN, device="cpu", world_size=world_size)
    empty = reduce_over_ranks({}, PLAN, device="cpu", world_size=world_size)
    assert empty == {}
    return reduced, counting.calls


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[str, Any]]:
    """What each of three ranks finds, in one start of them."""
    return run_on_ranks(everything, 3)


@pytest.mark.distributed
def test_three_ranks_agree_in_one_collective(on_ranks: list[dict[str, Any]]) -> None:
    for reduced, calls in (found["plan"] for found in on_ranks):
        assert calls == ["all_gather"]
        is_nan = [math.isnan(reduced.pop(key)) for key in ("accuracy", "grad_norm")]
        assert all(is_nan), "a NaN on one rank must not be averaged away"
        assert reduced == {
            "loss": (4.0 + 6.0) / (2 + 3),
            "ledger/cold_starts": 30.0,
            "ledger/cold_starts_max": 20.0,
            "stream_mixing/active/remaining_min": 5.0,
            "stream_mixing/active/remaining_max": -5.0,
            "stream_mixing/active/modalities/python": 4.0,
            "stream_mixing/refill/exhaust_events": 6.0,
            "loss_spike": 1.0,
        }


def reduce_losses(rank: int, world_size: int) -> tuple[dict[str, float], list[str]]:
    values: dict[str, Any] = {"plain": float(rank), "token_loss": 1.0 + rank, "evicted": torch.tensor(rank)}
    counts: dict[str, Any] = {"token_loss": 10.0 * rank, "nobody": 0.0}
    if rank == 0:
        values["token_loss"] = math.nan  # the mean over no tokens
    if rank == 2:
        del values["evicted"]
    with CountingGather() as counting:
        reduced = reduce_loss_metrics(values, counts, ["evicted", "never"], device="cpu", world_size=world_size)
    return reduced, counting.calls


@pytest.mark.distributed
def test_ranks_reduce_means_weighted_means_and_totals(on_ranks: list[dict[str, Any]]) -> None:
    expected = {"plain": 1.0, "token_loss": (2 * 10 + 3 * 20) / 30}
    expected |= {"evicted": 1.0, "evicted_max": 1.0, "never": 0.0, "never_max": 0.0}
    for reduced, calls in (found["losses"] for found in on_ranks):
        assert calls == ["all_gather"]
        assert reduced == expected


class Odd:
    def __float__(self) -> float:
        raise ZeroDivisionError

    def __repr__(self) -> str:
        raise ZeroDivisionError


MORE = (np.complex64(2), Odd(), Moments(*[1.0] * 6), (1.0, 2.0, 3.0), (1.0, None))
BAD = [10**6000, "1.5", [1.0], torch.zeros(3), torch.empty((), device="meta"), 2j, torch.tensor(2j), *MORE]


@pytest.mark.parametrize("bad", [None, *BAD], ids=lambda bad: type(bad).__name__)
def test_a_bad_value_costs_its_key_alone(bad: object, capsys: pytest.CaptureFixture[str]) -> None:
    guard = BestEffort("reduction")
    keys = ("lr", "blend/ended_sources", "stream_mixing/refill/exhaust_events", "my/own")
    for key in keys:
        local = {**dict.fromkeys(keys, 2.0), key: bad}
        for _ in range(2):
            reduced = reduce_over_ranks(local, keys, device="cpu", world_size=1, guard=guard)  # type: ignore[arg-type]
            assert reduced == {other: 2.0 for other in keys if other != key}
    warnings = capsys.readouterr().err
    assert warnings.count("is left out") == (0 if bad is None else len(keys))  # None says itself that it is not known
    assert guard.enabled


def partial_ranks(rank: int, world_size: int) -> tuple[dict[str, float], dict[str, float]]:
    keys = ("ledger/cold_starts", "my/own", "gns/skipped", "stream_mixing/active/remaining_min")
    local: dict[str, Any] = dict.fromkeys(keys, 1.0 + rank)
    absent = {} if rank == 1 else local
    guard = BestEffort("reduction")
    unknown: dict[str, Any] = {**local, **(dict.fromkeys(keys, 10**400) if rank == 1 else {})}
    options: dict[str, Any] = {"device": "cpu", "world_size": world_size, "guard": guard}
    return reduce_over_ranks(absent, keys, **options), reduce_over_ranks(unknown, keys, **options)


@pytest.mark.distributed
def test_a_rank_without_a_key_leaves_the_others_and_one_that_failed_takes_totals_and_extremes_away(
    on_ranks: list[dict[str, Any]],
) -> None:
    for absent, unknown in (found["partial"] for found in on_ranks):
        assert unknown == {"my/own": 2.0}
        assert absent["ledger/cold_starts"] == 4.0
        assert absent["stream_mixing/active/remaining_min"] == 1.0


def everything(rank: int, world_size: int) -> dict[str, Any]:
    calls = {"plan": reduce_three, "losses": reduce_losses, "partial": partial_ranks}
    return {name: call(rank, world_size) for name, call in calls.items()}


def test_the_error_covers_the_truth_as_often_as_it_should() -> None:
    """Units of random weights, whose totals depend on them: 2000 samples of 40."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randint(1, 20, (2000, 40), generator=generator).double()
    totals = weights * (0.3 + torch.randn(2000, 40, generator=generator, dtype=torch.float64) / weights.sqrt())
    samples = [Moments.of(y, w) for y, w in zip(totals, weights, strict=True)]
    covered = sum(abs(found.mean() - 0.3) <= 1.96 * found.wide_error() for found in samples)
    assert 0.93 <= covered / 2000 <= 0.97


def test_tensors_stay_tensors_and_carry_no_graph() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    window = Recorder()
    for _ in range(2):
        window.add({"loss": (weight * 3, torch.tensor(2)), "grad_norm": weight * 1})
    result = window.drain_metrics()
    total, count = result["loss"]  # type: ignore[misc]
    assert isinstance(total, torch.Tensor)
    assert not total.requires_grad
    assert (float(total), float(count)) == (12.0, 4.0)
    assert float(result["grad_norm"]) == 2.0  # type: ignore[arg-type]
    half, yes, buffer = torch.tensor(0.5).bfloat16(), torch.tensor(True), torch.tensor(0.5).double()
    for _ in range(320):  # a sum of 16 bits would end at 128, and one of bools at 1
        window.add({"grad_norm": half, "my/own": yes, "lr": buffer})
    buffer.zero_()  # the caller uses it again
    means: Any = window.drain_metrics()
    assert [float(means[key]) for key in ("grad_norm", "my/own", "lr")] == [0.5, 1.0, 0.5]


@pytest.mark.parametrize("tensor", [False, True])
def test_nan_is_a_value_and_not_an_absence(tensor: bool) -> None:
    nan = torch.tensor(torch.nan) if tensor else math.nan
    for first, second in ((nan, 1.0), (1.0, nan)):
        window = Recorder()
        for value in (first, second):
            window.add({"grad_norm": value, "loss_spike": value, "ledger/cold_starts": value})
        assert all(math.isnan(float(value)) for value in window.drain_metrics().values())  # type: ignore[arg-type]


def test_a_total_of_which_a_part_is_not_known_is_not_known_and_stays_so_over_a_restart() -> None:
    window = Recorder()
    for value in (1.0, None, 2.0):
        window.add({"ledger/cold_starts": value, "grad_norm": value, "loss_spike": value, "lr": value})
    again = Recorder()
    again.load_state_dict(json.loads(json.dumps(window.state_dict())))
    for each in (window, again):
        assert each.drain_metrics() == {"ledger/cold_starts": None, "grad_norm": 1.5, "loss_spike": None, "lr": 2.0}
        each.add({"ledger/cold_starts": 1.0})
        assert each.drain_metrics() == {"ledger/cold_starts": 1.0}
