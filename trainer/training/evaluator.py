"""Evaluation on documents that are not trained on, with a ledger of its own that is thrown away; it never changes training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.data.batch import MicroBatch
from trainer.data.tokenizer import Tokenizer
from trainer.distributed.env import RankInfo, gather_from_ranks
from trainer.distributed.strategy import Strategy
from trainer.ledger.ledger import Ledger
from trainer.metrics.aggregate import reduce_over_ranks
from trainer.metrics.best_effort import BestEffort, as_number, checked
from trainer.metrics.catalog.lookup import EVAL_PREFIX
from trainer.model.protocol import ModelOutput, evaluating, extras_of
from trainer.objective.auxiliary import Auxiliary
from trainer.objective.loss import Loss, ObjectiveOutput
from trainer.training.step.details import StepDetails

OF_A_SET = ("loss", "loss_se", "accuracy", "perplexity", "bits_per_byte")  # what is logged of an [[eval.source]]

RowResults = Sequence[tuple[slice, ObjectiveOutput]]


class EvalRider:
    """Measures more of a set in the pass of its evaluation; the extensions that do so are loaded by name."""

    def begin(self, evaluator: Evaluator) -> None:
        """An evaluation of the set begins."""

    def micro_done(self, micro: MicroBatch, state: Tensor | None, results: RowResults) -> None:
        """After a micro-batch that began from `state`, with the losses of its rows. A forward must be run on all ranks."""

    def part(self) -> Any:
        """What all ranks get of this one."""

    def metrics(self, by_rank: Sequence[Any]) -> dict[str, float]:
        """The set's further numbers, from the parts of all ranks; the same on every rank."""
        return {}


class EvalSet(NamedTuple):
    """What an evaluation reads."""

    name: str
    """Of an `[[eval.source]]`; empty: the held-out documents."""
    batches: Callable[[frozenset[str] | None], Iterator[MicroBatch]]
    """Makes an iterator of this rank's micro-batches for a model that takes such inputs (None: any), always the same ones.
    Another rank may have more."""
    filler: MicroBatch
    """What a rank runs while others still have micro-batches: rows of nothing."""
    read: str = "all documents"
    """How much of the set is read, in words."""
    sample: Any = None
    """An `evaluation_sample.Sample` if only a part is read."""
    riders: Sequence[EvalRider] = ()


def rows_of(output: Any, rows: slice) -> ModelOutput:
    """Some rows' logits and losses. A loss [] is of all rows. Metrics, which are of all rows too, cannot be weighted."""
    losses, _ = extras_of(output)
    own = {name: value[rows] if getattr(value, "ndim", 0) else value for name, value in (losses or {}).items()}
    return ModelOutput(output.logits[rows], None, own)


@dataclass(kw_only=True, eq=False, repr=False)
class OwnTask:
    """Calls the user's function on every rank; what rank 0 returns is logged."""

    function: Callable[..., Any]
    """Called with `model`, `tokenizer`, `step`, `device`, `rank` and `world_size`, and with `args`. Returns a mapping of names
    to numbers; other ranks may return anything."""
    args: Mapping[str, Any]
    model: nn.Module
    tokenizer: Tokenizer
    guard: BestEffort
    """A task that fails on any rank is switched off on all, with one warning; the run goes on."""
    is_off: bool = False
    """The same on all ranks."""

    def run(self, evaluator: Evaluator, step: int, taken: Set[str]) -> dict[str, float]:
        """The task's numbers as `eval/<name>`, the same on every rank, without names that are taken; empty once it has failed.
        The model is in evaluation mode, without gradients, and torch's random numbers are afterwards what they were."""
        if self.is_off:
            return {}
        device = evaluator.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            found = self.guard.run(self._call, evaluator, step, taken)
        by_rank = gather_from_ranks((found, self.guard.enabled), world_size=evaluator.info.world_size)
        self.is_off = not all(works for _, works in by_rank)
        return {} if self.is_off else by_rank[0][0] or {}

    def _call(self, evaluator: Evaluator, step: int, taken: Set[str]) -> dict[str, float]:
        info = evaluator.info
        with torch.no_grad(), evaluator.autocast():
            given = {"device": evaluator.device, "rank": info.rank, "world_size": info.world_size, **self.args}
            found = self.function(model=self.model, tokenizer=self.tokenizer, step=step, **given)
        if not info.is_main:
            return {}
        if not isinstance(found, Mapping):
            raise TypeError(f"eval.target returned a {type(found).__name__}, not a mapping of names to numbers")
        values = checked(found, self.guard.leave_out, as_number)
        own = {f"eval/{name}": value for name, value in values.items() if value is not None}
        for key in sorted(own.keys() & taken):
            self.guard.leave_out(key, "the evaluation of [[eval.source]] reports a metric of this name itself")
        return {key: value for key, value in own.items() if key not in taken}


@dataclass(kw_only=True, eq=False, repr=False)
class Evaluator:
    """Runs evaluations, each over the same micro-batches."""

    model: nn.Module
    """What a row is run through, without DDP: evaluation reduces nothing but its sums."""
    accepted: frozenset[str] | None
    """The inputs that it takes; None: any."""
    objective: Loss
    token_ce: float = 1.0
    """The factor of the cross-entropy in it."""
    auxiliary: Auxiliary
    sets: Sequence[EvalSet]
    task: OwnTask | None = None
    make_ledger: Callable[[], Ledger] | None
    """An empty ledger for one set; None for a model without state."""
    details: StepDetails
    """Collects the sums."""
    guard: BestEffort
    """Of `details`, whose failure on any rank costs the evaluations, on all ranks, but not the run."""
    autocast: Callable[[], AbstractContextManager[None]]
    """The precision's context."""
    strategy: Strategy = field(default_factory=Strategy)
    info: RankInfo
    device: torch.device
    is_off: bool = False
    """The same on all ranks."""

    def run(self, step: int, should_stop: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        """Evaluate; the same numbers on every rank, by catalog key. Without those of the held-out documents if no rank had one;
        empty if the details have failed on any rank: what is left of the sums would be of a part of the documents.

        None on all ranks when `should_stop` says so on any of them: each asks it between micro-batches, and they agree at the
        end of a set, or in lockstep after each micro-batch.

        Args:
            step: the last step, for a task of the user's own.
        """
        found: dict[str, float] = {}
        with evaluating(self.model):
            for each in self.sets:
                values = self._run_set(each, should_stop)
                if values is None:
                    return None
                found |= values
            if self.task is not None:
                taken = found.keys() | {f"eval/{each.name}/{key}" for each in self.sets for key in OF_A_SET}
                found |= self.task.run(self, step, taken)
        return found

    @torch.no_grad()
    def _run_set(self, each: EvalSet, should_stop: Callable[[], bool]) -> dict[str, float] | None:
        details, guard = self.details, self.guard
        if self.is_off:
            return {}
        guard.run(details.drain_metrics)
        ledger = self.make_ledger() if self.make_ledger is not None else None
        for rider in each.riders:
            rider.begin(self)
        for number, micro in enumerate(chain(each.batches(self.accepted), repeat(each.filler)), start=1):
            # 0: no rank has anything left; 2: a stop was asked for. Ranks that must run as many continue with fillers.
            if self.strategy.most(2 if should_stop() else int(not micro.is_filler)) != 1:
                break
            self._evaluate(number, micro, ledger, each)
        local = guard.run(details.drain_metrics) or {}
        parts = [rider.part() for rider in each.riders]
        by_rank = gather_from_ranks((should_stop(), guard.enabled, parts), world_size=self.info.world_size)
        if any(stops for stops, _, _ in by_rank):
            return None
        self.is_off = not all(works for _, works, _ in by_rank)
        if self.is_off:
            return {}
        how: dict[str, Any] = {"device": self.device, "world_size": self.info.world_size, "guard": guard}
        reduced = self._with_perplexity(reduce_over_ranks(local, details.metric_keys, **how))
        found: dict[str, float] = {}
        for index, rider in enumerate(each.riders if "loss" in reduced else ()):
            found |= rider.metrics([of_rank[index] for _, _, of_rank in by_rank])
        if each.name:
            reduced = {key: reduced[key] for key in OF_A_SET if key in reduced}
        front = f"eval/{each.name}/" if each.name else EVAL_PREFIX
        deep = front if each.name else "eval/"
        numbers = {f"{front}{key}": value for key, value in reduced.items()}
        return numbers | {f"{deep if '/' in key else front}{key}": value for key, value in found.items()}

    def _evaluate(self, step: int, micro: MicroBatch, ledger: Ledger | None, each: EvalSet) -> None:
        """Add the sums of a micro-batch to the details, and show its losses to the set's riders."""
        state, carry = None, micro.carry
        if ledger is not None and carry is not None:
            ledger.begin_step(step)
            state = ledger.lookup(carry.group_ids, carry.cell_index)
        with self.autocast():
            output = self.model(**micro.inputs, state=state)
            results = []
            for rows, part, weight in [(slice(None), micro, 1.0)] if each.sample is None else each.sample.parts(micro):
                own = output if each.sample is None else rows_of(output, rows)
                result = self.objective(own.logits, part.targets, meta=micro.located)
                results.append((rows, self.auxiliary(result, own, part)))
                self.guard.run(self.details.add, part, results[-1][1], weight)
            for rider in each.riders:
                rider.micro_done(micro, state, results)
        if ledger is not None and carry is not None and output.state is not None:
            ends = {"end_ids": carry.end_ids, "end_cell_index": carry.end_cell_index}
            ledger.store(carry.group_ids, carry.cell_index, carry.is_last, output.state, **ends)

    def _with_perplexity(self, reduced: dict[str, float]) -> dict[str, float]:
        if not reduced.keys() & {"loss", "accuracy"}:
            return {}
        if "loss" in reduced:
            reduced["loss"] += sum(reduced.get(key, 0.0) for key in self.auxiliary.by_rows)
        # Beyond 700 exp overflows a float64, and such a model has learnt nothing anyway.
        weighted = reduced.get("objective/token_ce")
        if weighted is not None and (cross_entropy := weighted / self.token_ce) < 700:
            reduced["perplexity"] = math.exp(cross_entropy)
        return reduced
