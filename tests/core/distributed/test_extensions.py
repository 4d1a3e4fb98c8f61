"""An extension that fails on one rank is off on all of them, with one warning."""

from __future__ import annotations

import pytest
import torch

from tests.support.gloo import run_on_ranks
from trainer.metrics.best_effort import Diagnostics
from trainer.training.extension import Extension, Extensions

pytestmark = pytest.mark.distributed
STEPS, BAD = 5, 3


class Fails(Extension):
    """Notes the moments that it is called at; raises in one of them, or returns too many sums, on rank 1, in step 3."""

    num_sums = 1

    def __init__(self, moment: str, rank: int) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.moment, self.rank, self.step = moment, rank, 0
        self.called: list[tuple[str, int]] = []

    def at(self, moment: str) -> None:
        self.called.append((moment, self.step))
        if (moment, self.step, self.rank) == (self.moment, BAD, 1):
            raise ArithmeticError("broken on purpose")

    def micro_done(self, micro, result):
        self.at("micro_done")

    def updated(self):
        self.at("updated")
        return torch.ones(1 + ((self.moment, self.step, self.rank) == ("sums", BAD, 1)), dtype=torch.float64)

    def summed(self, sums, **numbers):
        assert list(sums) == [2.0]
        self.at("summed")


def ride(rank: int, world_size: int, moment: str) -> tuple[list[tuple[str, int]], int]:
    """Five steps as the loop takes them: what was called, and how many parts were off for a failure here."""
    fails, diagnostics, events = Fails(moment, rank), Diagnostics(), []
    diagnostics.on_event = events.append
    extensions = Extensions({"fails": fails}, diagnostics, device=torch.device("cpu"), world_size=world_size)
    for fails.step in range(1, STEPS + 1):
        extensions.begin_step(fails.step, [], is_logged=True)
        for call in extensions.on_micro:
            call(None, None)
        if (measured := extensions.sum_up()) is not None:
            extensions.summed(measured, grad_sq=1.0, grad_factor=1.0, is_taken=True)
    return fails.called, len(events)


def ride_with_each(rank: int, world_size: int) -> dict[str, tuple[list[tuple[str, int]], int]]:
    return {moment: ride(rank, world_size, moment) for moment in ("micro_done", "updated", "sums", "summed")}


def test_one_that_fails_on_one_rank_is_off_on_all_with_one_warning():
    results = run_on_ranks(ride_with_each, 2)
    for moment in results[0]:
        (healthy, no_warning), (failed, one_warning) = (each[moment] for each in results)
        assert (no_warning, one_warning) == (0, 1)
        assert failed[-1] == ("updated" if moment == "sums" else moment, BAD)
        # A failure after the sums is known to the other rank with the sums of the next step.
        last = BAD + 1 if moment == "summed" else BAD
        assert healthy[-1] == ("updated", last)
        assert [step for name, step in healthy if name == "summed"] == list(range(1, last))
