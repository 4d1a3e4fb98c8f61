"""Evaluation on documents that are not trained on, with a ledger of its own that is thrown away; it never changes training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer.arrays import Ints
from trainer.data.batch import MicroBatch
from trainer.data.tokenizer import Tokenizer
from trainer.distributed.agree import gather_from_ranks
from trainer.distributed.env import RankInfo
from trainer.ledger.ledger import Ledger
from trainer.metrics.aggregate import Moments, reduce_over_ranks
from trainer.metrics.best_effort import BestEffort, as_number, checked
from trainer.metrics.catalog.lookup import EVAL_PREFIX
from trainer.model.protocol import ModelOutput, extras_of
from trainer.objective.auxiliary import Auxiliary
from trainer.objective.loss import Loss
from trainer.training.step.details import StepDetails

OF_A_SET = ("loss", "loss_se", "accuracy", "perplexity", "bits_per_byte")  # what is logged of an [[eval.source]]


@dataclass(frozen=True)
class Sample:
    """The documents that were drawn of a set, n of them, with probabilities in proportion to their tokens; of a document that
    `max_group_cells` cuts, each part counts as one.

    Their sums are weighted by 1 / probability, so that those of all metrics have the sums over the whole set as expectations.

    Args:
        groups: group id -> number of the document, from 0.
        tokens: of each, int64 [n].
        chances: of each to be drawn, float64 [n]; 1: always.
        spread: see `Drawn`.
        files: the file of each, numbers from 0, int64 [n], if documents were drawn from some of the files alone.
        file_chances: the probability that its file was drawn, float64 [n].
    """

    groups: Mapping[int, int]
    tokens: Ints
    chances: NDArray[np.float64]
    spread: float
    files: Ints | None = None
    file_chances: NDArray[np.float64] | float = 1.0

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        """What the sums of each document are multiplied by, [n]."""
        return 1 / (self.chances * self.file_chances)

    def error(self, losses: NDArray[np.float64]) -> float | None:
        """The standard error of the mean loss per token over the whole set; None if it is not known.

        Of documents, Hartley and Rao's (1962): 0 for those that are always drawn. Of documents in drawn files, that of a ratio
        of sums over the files (see `Moments`).

        Args:
            losses: the sum over each document's tokens, [n].
        """
        means, parts = losses / self.tokens, self.tokens * self.weights
        if self.files is not None:
            totals = [torch.from_numpy(np.bincount(self.files, weights)) for weights in (parts * means, parts)]
            error = Moments.of(*totals).error()
            return None if math.isnan(error) else error
        is_open = self.chances < 1
        means, chances, num = means[is_open], self.chances[is_open], np.count_nonzero(is_open)
        if num < 2:
            return None
        means = means - means.mean()
        squares = means @ means
        # Over pairs i < j: (1 - chance_i - chance_j + spread / n) (mean_i - mean_j)^2.
        pairs = (1 + self.spread / num) * num * squares
        pairs -= num * (chances @ np.square(means)) + chances.sum() * squares
        share = parts[is_open].sum() / parts.sum()
        return float(share * np.sqrt(np.maximum(pairs, 0.0) / (num * num * (num - 1))))


class EvalSet(NamedTuple):
    """What an evaluation reads."""

    name: str
    """Of an `[[eval.source]]`; empty: the held-out documents."""
    batches: Callable[[frozenset[str] | None], Iterator[MicroBatch]]
    """Makes an iterator of this rank's micro-batches for a model that takes such inputs (None: any), always the same ones: as
    many on every rank, since `per_stream` batching masks the rows of a rank whose part has ended."""
    read: str = "all documents"
    """How much of the set is read, in words."""
    sample: Sample | None = None
    """None: all of it."""


def row_of(output: Any, row: int) -> ModelOutput:
    """One row's logits, losses and metrics, [1, ...]. A loss or metric [] is of all rows."""
    losses, metrics = extras_of(output)
    own = {name: value[row : row + 1] if value.ndim else value for name, value in (losses or {}).items()}
    return ModelOutput(output.logits[row : row + 1], None, own, metrics)


def _by_document(sums: Sequence[tuple[int, Tensor]], num: int) -> NDArray[np.float64]:
    """The sum of each document's rows on this rank, [num]. Waits for the device."""
    values = torch.stack([value for _, value in sums]).cpu().numpy() if sums else np.zeros(0)
    totals = np.zeros(num)
    np.add.at(totals, np.array([document for document, _ in sums], dtype=np.int64), values)
    return totals


@dataclass(kw_only=True, eq=False, repr=False)
class OwnTask:
    """Calls the user's function on every rank; what rank 0 returns is logged."""

    function: Callable[..., Any]
    """Called with `model`, `tokenizer`, `step`, `device`, `rank` and `world_size`, and with `args`. Returns a mapping of names
    to numbers; other ranks may return anything."""
    args: Mapping[str, Any]
    model: nn.Module
    tokenizer: Tokenizer
    autocast: Callable[[], AbstractContextManager[None]]
    """The precision's context."""
    info: RankInfo
    device: torch.device
    guard: BestEffort
    """A task that fails on any rank is switched off on all, with one warning; the run goes on."""
    is_off: bool = False
    """The same on all ranks."""

    def run(self, step: int, taken: Set[str] = frozenset()) -> dict[str, float]:
        """The task's numbers as `eval/<name>`, the same on every rank, without names that are taken; empty once it has failed.
        The model is in evaluation mode, without gradients, and torch's random numbers are afterwards what they were."""
        if self.is_off:
            return {}
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            found = self.guard.run(self._call, step, taken)
        by_rank = gather_from_ranks((found, self.guard.enabled), world_size=self.info.world_size)
        self.is_off = not all(works for _, works in by_rank)
        return {} if self.is_off else by_rank[0][0] or {}

    def _call(self, step: int, taken: Set[str]) -> dict[str, float]:
        with torch.no_grad(), self.autocast():
            given = {"device": self.device, "rank": self.info.rank, "world_size": self.info.world_size, **self.args}
            found = self.function(model=self.model, tokenizer=self.tokenizer, step=step, **given)
        if not self.info.is_main:
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
    most: Callable[[int], int] = int
    """The largest number of the ranks that must run as many forwards and stop together, as shards of a model make them."""
    world_size: int
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
        was_training = self.model.training
        self.model.eval()
        try:
            for each in self.sets:
                values = self._run_set(each, should_stop)
                if values is None:
                    return None
                found |= values
            if self.task is not None:
                taken = {f"eval/{each.name}/{key}" for each in self.sets for key in OF_A_SET}
                found |= self.task.run(step, taken)
        finally:
            self.model.train(was_training)
        return found

    @torch.no_grad()
    def _run_set(self, each: EvalSet, should_stop: Callable[[], bool]) -> dict[str, float] | None:
        details, guard = self.details, self.guard
        if self.is_off:
            return {}
        guard.run(details.drain_metrics)
        ledger = self.make_ledger() if self.make_ledger is not None else None
        sums: list[tuple[int, Tensor]] = []
        for number, micro in enumerate(each.batches(self.accepted), start=1):
            if self.most(int(should_stop())):  # before the next micro-batch, of which every rank has as many
                break
            self._evaluate(number, micro, ledger, each.sample, sums)
        local = guard.run(details.drain_metrics) or {}
        losses = None if each.sample is None else guard.run(_by_document, sums, len(each.sample.tokens))
        told = gather_from_ranks((should_stop(), guard.enabled, losses), world_size=self.world_size)
        if any(stops for stops, _, _ in told):
            return None
        self.is_off = not all(works for _, works, _ in told)
        if self.is_off:
            return {}
        reduced = self._with_perplexity(
            reduce_over_ranks(local, details.metric_keys, device=self.device, world_size=self.world_size, guard=guard)
        )
        if each.sample is not None and reduced:
            error = each.sample.error(np.sum([found for _, _, found in told if found is not None], axis=0))
            reduced |= {} if error is None else {"loss_se": error}
        if not each.name:
            return {f"{EVAL_PREFIX}{key}": value for key, value in reduced.items()}
        return {f"eval/{each.name}/{key}": reduced[key] for key in OF_A_SET if key in reduced}

    def _evaluate(
        self, step: int, micro: MicroBatch, ledger: Ledger | None, sample: Sample | None, sums: list[tuple[int, Tensor]]
    ) -> None:
        """Add the sums of a micro-batch to the details, and of a sample each row's document and loss to `sums`."""
        state, carry = None, micro.carry
        if ledger is not None and carry is not None:
            ledger.begin_step(step)
            state = ledger.lookup(carry.group_ids, carry.cell_index)
        with self.autocast():
            output = self.model(**micro.inputs, state=state)
            if sample is None:
                result = self.objective(output.logits, micro.targets, meta=micro.meta)
                self.guard.run(self.details.add, micro, self.auxiliary(result, output, micro))
            else:
                assert carry is not None
                for row, group in enumerate(carry.group_ids.tolist()):
                    if (document := sample.groups.get(group)) is None:  # a masked row
                        continue
                    part, own = micro.rows(slice(row, row + 1)), row_of(output, row)
                    result = self.objective(own.logits, part.targets, meta=micro.meta)
                    result = self.auxiliary(result, own, part)
                    self.guard.run(self.details.add, part, result, float(sample.weights[document]))
                    sums.append((document, result.loss_sum.double()))
        if ledger is not None and carry is not None and output.state is not None:
            ledger.store(carry.group_ids, carry.cell_index, carry.is_last, output.state)

    def _with_perplexity(self, reduced: dict[str, float]) -> dict[str, float]:
        cross_entropy = reduced.get("objective/token_ce")
        if cross_entropy is None:
            return {}
        reduced["loss"] += sum(reduced.get(key, 0.0) for key in self.auxiliary.by_rows)
        # Beyond 700 exp overflows a float64, and such a model has learnt nothing anyway.
        if cross_entropy < 700:
            reduced["perplexity"] = math.exp(cross_entropy)
        return reduced
