"""Evaluation on held-out documents, with a ledger of its own that is thrown away; it never changes training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from trainer.distributed.agree import gather_from_ranks, most_of_ranks
from trainer.ledger.ledger import Ledger
from trainer.metrics.best_effort import BestEffort
from trainer.metrics.rank_reduction import reduce_over_ranks
from trainer.objective.compose import Loss
from trainer.training.step.details import StepDetails
from trainer.training.step.microbatch import split

BITS_PER_NAT = 1 / math.log(2)


class Evaluator:
    """Runs evaluations, each over the same micro-batches.

    Args:
        model: the model itself, without DDP: evaluation reduces nothing but its sums.
        batches: makes an iterator of this rank's held-out micro-batches, on the device, always the same ones, as many on every
            rank.
        make_ledger: an empty ledger for one evaluation; None for a model without state.
        details: collects the sums.
        guard: of `details`, whose failure on any rank costs the evaluations, on all ranks, but not the run.
        autocast: the precision's context.
        is_bytes: the tokens are bytes, so that bits per byte are known.
        in_lockstep: the ranks hold shards of the model, so that all of them must run as many forwards, and stop together.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        accepted: frozenset[str] | None,
        objective: Loss,
        batches: Callable[[], Iterator[dict[str, Any]]],
        make_ledger: Callable[[], Ledger] | None,
        details: StepDetails,
        guard: BestEffort,
        autocast: Callable[[], AbstractContextManager[None]],
        is_bytes: bool,
        in_lockstep: bool = False,
        world_size: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._accepted = accepted
        self._objective = objective
        self._batches = batches
        self._make_ledger = make_ledger
        self._details = details
        self._guard = guard
        self._is_off = False  # the same on all ranks
        self._autocast = autocast
        self._is_bytes = is_bytes
        self._in_lockstep = in_lockstep
        self._world_size = world_size
        self._device = device

    @torch.no_grad()
    def run(self, should_stop: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        """Evaluate; the same numbers on every rank, without the prefix `eval_`. Empty if no rank had a document, and
        if the details have failed on any rank: what is left of the sums would be of a part of the documents.

        None on all ranks when `should_stop` says so on any of them: each asks it between micro-batches, and they agree at the
        end, or in lockstep after each.
        """
        details, guard = self._details, self._guard
        if self._is_off:
            return {}
        guard.run(details.drain_metrics)
        ledger = self._make_ledger() if self._make_ledger is not None else None
        was_training = self._model.training
        self._model.eval()
        try:
            for step, batch in enumerate(self._batches(), start=1):
                if self._stops(should_stop):
                    break
                self._evaluate(step, batch, ledger)
        finally:
            self._model.train(was_training)
        local = guard.run(details.drain_metrics) or {}
        told = gather_from_ranks((should_stop(), guard.enabled), world_size=self._world_size)
        if any(stops for stops, _ in told):
            return None
        self._is_off = not all(works for _, works in told)
        if self._is_off:
            return {}
        reduced = reduce_over_ranks(
            local, details.metric_keys, device=self._device, world_size=self._world_size, guard=guard
        )
        return self._named(reduced)

    def _stops(self, should_stop: Callable[[], bool]) -> bool:
        """Whether to stop before the next micro-batch, of which every rank has as many."""
        if not self._in_lockstep:
            return should_stop()
        return bool(most_of_ranks(int(should_stop()), device=self._device, world_size=self._world_size)[0])

    def _evaluate(self, step: int, batch: dict[str, Any], ledger: Ledger | None) -> None:
        micro = split(batch, self._accepted)
        state = None
        if ledger is not None and micro.carry is not None:
            ledger.begin_step(step)
            state = ledger.lookup(micro.carry.group_ids, micro.carry.cell_index)
        with self._autocast():
            output = self._model(**micro.inputs, state=state)
            result = self._objective(output.logits, micro.targets, meta=micro.meta)
        if ledger is not None and micro.carry is not None and output.state is not None:
            carry = micro.carry
            ledger.store(carry.group_ids, carry.cell_index, carry.is_last, output.state)
        self._guard.run(self._details.add, micro, result)

    def _named(self, reduced: dict[str, float]) -> dict[str, float]:
        cross_entropy = reduced.get("objective/token_ce")
        if cross_entropy is None:
            return {}
        # Beyond 700 exp overflows a float64, and such a model has learnt nothing anyway.
        if cross_entropy < 700:
            reduced["perplexity"] = math.exp(cross_entropy)
        if self._is_bytes:
            reduced["bits_per_byte"] = cross_entropy * BITS_PER_NAT
        return reduced
