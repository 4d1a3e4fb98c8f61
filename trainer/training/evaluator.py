"""Evaluation on documents that are not trained on. It never changes training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.data.batch import MicroBatch
from trainer.distributed.env import RankInfo, gather_from_ranks
from trainer.distributed.strategy import Strategy
from trainer.ledger.ledger import Ledger
from trainer.metrics.aggregate import reduce_over_ranks
from trainer.metrics.best_effort import BestEffort
from trainer.metrics.catalog.lookup import EVAL_PREFIX
from trainer.model.protocol import ModelOutput, evaluating, extras_of
from trainer.objective.loss import Auxiliary, Loss, ObjectiveOutput
from trainer.training.step.details import StepDetails

OF_A_SET = ("loss", "loss_se", "accuracy", "perplexity", "bits_per_byte")
"""The numbers that are logged of an `[[eval.source]]`."""

RowResults = Sequence[tuple[slice, ObjectiveOutput]]


class EvalRider:
    """Measures more of a set in the pass of its evaluation; such extensions are loaded by name."""

    def begin(self, evaluator: Evaluator) -> None:
        """An evaluation of the set begins."""

    def micro_done(self, micro: MicroBatch, state: Tensor | None, results: RowResults) -> None:
        """After a micro-batch that began from `state`. If it runs a forward, all ranks must."""

    def part(self) -> Any:
        """This rank's share, which all ranks get."""

    def metrics(self, by_rank: Sequence[Any]) -> dict[str, float]:
        """The set's further numbers, from the parts of all ranks; the same on every rank."""
        return {}


class EvalSet(NamedTuple):
    """The documents of an evaluation."""

    name: str
    """The name of an `[[eval.source]]`; empty: the held-out documents."""
    batches: Callable[[frozenset[str] | None], Iterator[MicroBatch]]
    """Makes an iterator of this rank's micro-batches for a model that takes such inputs (None:
    any), always the same ones. Another rank may have more."""
    filler: MicroBatch
    """A masked micro-batch, which a rank runs while others still have some."""
    read: str = "all documents"
    """How much of the set is read, in words."""
    sample: Any = None
    """The drawn documents and their weights, if only a part is read."""
    riders: Sequence[EvalRider] = ()


def rows_of(output: Any, rows: slice) -> ModelOutput:
    """The logits and losses of some rows; a loss [] covers all. Metrics cannot be weighted."""
    losses, _ = extras_of(output)
    own = dict(losses or {})
    for name, value in own.items():
        if getattr(value, "ndim", 0):
            own[name] = value[rows]
    return ModelOutput(output.logits[rows], None, own)


@dataclass(kw_only=True, eq=False, repr=False)
class Evaluator:
    """Runs evaluations, each over the same micro-batches."""

    model: nn.Module
    """Runs a row, without DDP: evaluation reduces only its sums."""
    accepted: frozenset[str] | None
    """The inputs that it takes; None: any."""
    objective: Loss
    token_ce: float = 1.0
    """The weight of the cross-entropy in the objective."""
    auxiliary: Auxiliary
    sets: Sequence[EvalSet]
    task: Any = None
    """Runs `eval.target`, if there is one."""
    make_ledger: Callable[[], Ledger] | None
    """An empty ledger for one set; None for a model without state."""
    details: StepDetails
    """Collects the sums."""
    guard: BestEffort
    """Guards `details`: a failure on any rank ends the evaluations on all, but not the run."""
    autocast: Callable[[], AbstractContextManager[None]]
    """The precision's context."""
    strategy: Strategy = field(default_factory=Strategy)
    info: RankInfo
    device: torch.device
    is_off: bool = False
    """The same on all ranks."""

    def run(self, step: int, should_stop: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        """Evaluate; the same numbers on every rank, by catalog key.

        Numbers of held-out documents are missing if no rank had one. Nothing is returned once the
        details have failed on any rank: the sums would cover only part of the documents.

        Args:
            step: the last step, for a custom task.
            should_stop: asked between micro-batches. If it is true on any rank, all return None, at
                the latest at the end of a set.
        """
        found: dict[str, float] = {}
        with evaluating(self.model):  # without dropout, and back to training afterwards
            for each in self.sets:
                values = self._run_set(each, should_stop)
                if values is None:
                    return None
                found |= values
            if self.task is not None:
                # Also those that this evaluation happens not to have.
                taken = found.keys() | {f"eval/{each.name}/{key}" for each in self.sets for key in OF_A_SET}
                found |= self.task.run(self, step, taken)
        return found

    @torch.no_grad()
    def _run_set(self, each: EvalSet, should_stop: Callable[[], bool]) -> dict[str, float] | None:
        details, guard, ledger = self.details, self.guard, None
        if self.is_off:
            return {}
        guard.run(details.drain_metrics)  # of an evaluation that was stopped
        if self.make_ledger is not None:
            ledger = self.make_ledger()  # training's states stay as they are
        for rider in each.riders:
            rider.begin(self)
        for number, micro in enumerate(chain(each.batches(self.accepted), repeat(each.filler)), start=1):
            # Under FSDP all ranks run equally many forwards: those without work run fillers.
            vote = 2 if should_stop() else int(not micro.is_filler)
            if self.strategy.most(vote) != 1:
                break
            self._evaluate(number, micro, ledger, each)
        local = guard.run(details.drain_metrics) or {}
        parts = [rider.part() for rider in each.riders]
        # Reached by all ranks, whatever has failed on this one.
        by_rank = gather_from_ranks((should_stop(), guard.enabled, parts), world_size=self.info.world_size)
        if any(stops for stops, _, _ in by_rank):
            return None
        self.is_off = not all(works for _, works, _ in by_rank)
        if self.is_off:
            return {}
        how: dict[str, Any] = {"device": self.device, "world_size": self.info.world_size, "guard": guard}
        reduced = self._with_perplexity(reduce_over_ranks(local, details.metric_keys, **how))
        found: dict[str, float] = {}
        if "loss" in reduced:
            for index, rider in enumerate(each.riders):
                found |= rider.metrics([of_rank[index] for _, _, of_rank in by_rank])
        return _named(each.name, reduced, found)

    def _evaluate(self, step: int, micro: MicroBatch, ledger: Ledger | None, each: EvalSet) -> None:
        """Add the sums of a micro-batch to the details, and show its losses to the set's riders."""
        state, carry = None, micro.carry
        if ledger is not None and carry is not None:
            ledger.begin_step(step)
            state = ledger.lookup(carry.group_ids, carry.cell_index)
        with self.autocast():
            output = self.model(**micro.inputs, state=state)
            results = []
            for rows, part, weight in _weighted_parts(each, micro):
                own = output
                if each.sample is not None:
                    own = rows_of(output, rows)
                result = self.objective(own.logits, part.targets, meta=micro.located)
                result = self.auxiliary(result, own, part)
                results.append((rows, result))
                self.guard.run(self.details.add, part, result, weight)
            for rider in each.riders:
                rider.micro_done(micro, state, results)
        if ledger is not None and carry is not None and output.state is not None:
            ends = {"end_ids": carry.end_ids, "end_cell_index": carry.end_cell_index}
            ledger.store(carry.group_ids, carry.cell_index, carry.is_last, output.state, **ends)

    def _with_perplexity(self, reduced: dict[str, float]) -> dict[str, float]:
        if not reduced.keys() & {"loss", "accuracy"}:
            return {}
        if "loss" in reduced:
            # Losses by rows have another mean than those by tokens.
            reduced["loss"] += sum(reduced.get(key, 0.0) for key in self.auxiliary.by_rows)
        if "objective/token_ce" in reduced:
            cross_entropy = reduced["objective/token_ce"] / self.token_ce
            # Beyond 700 exp overflows a float64, and such a model has learnt nothing anyway.
            if cross_entropy < 700:
                reduced["perplexity"] = math.exp(cross_entropy)
        return reduced


def _named(name: str, reduced: dict[str, float], found: dict[str, float]) -> dict[str, float]:
    """The numbers of a set and of its riders, by catalog key."""
    if name:
        reduced = {key: reduced[key] for key in OF_A_SET if key in reduced}
        return {f"eval/{name}/{key}": value for key, value in {**reduced, **found}.items()}
    named = {f"{EVAL_PREFIX}{key}": value for key, value in reduced.items()}
    for key, value in found.items():  # those by depth have names in parts, as those of a set
        named[f"eval/{key}" if "/" in key else f"{EVAL_PREFIX}{key}"] = value
    return named


def _weighted_parts(each: EvalSet, micro: MicroBatch) -> Iterator[tuple[slice, MicroBatch, float]]:
    """The rows of a micro-batch and their weight: all, or the drawn documents one by one."""
    if each.sample is None:
        return iter([(slice(None), micro, 1.0)])
    parts: Iterator[tuple[slice, MicroBatch, float]] = each.sample.parts(micro)
    return parts
