"""Evaluation on documents that are not trained on, which changes no number of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.data.blend import BlendSource
from trainer.data.lanes import LaneBlend
from trainer.data.loader import Loader, MicroBatch, accepted_inputs
from trainer.data.tokenizer import token_bytes
from trainer.data.weights import ConstantWeight
from trainer.distributed.env import RankInfo, gather_from_ranks
from trainer.distributed.strategy import Strategy
from trainer.ledger.ledger import Ledger
from trainer.metrics.aggregate import reduce_over_ranks
from trainer.metrics.best_effort import Diagnostics
from trainer.metrics.catalog import EVAL_PREFIX
from trainer.metrics.logger import get_logger
from trainer.metrics.sinks import display_key
from trainer.model.protocol import evaluating
from trainer.objective import Auxiliary, Loss, ObjectiveOutput
from trainer.options import DEFAULT_CAPACITY, LedgerOptions
from trainer.training import need
from trainer.training.build import autocast_context, evaluated_rows, make_held_out, runs_on
from trainer.training.core_extensions import StepDetails
from trainer.training.plan import Plan, Source, width_of

logger = get_logger(__name__)
ALL = 2**62
"""More micro-batches than any set has."""
OF_A_SET = ("loss", "loss_se", "accuracy", "perplexity", "bits_per_byte")
"""The numbers that are logged of an `[[eval.source]]`."""


class EvalRider:
    """Measures more of a set in the pass of its evaluation."""

    def begin(self, evaluator: Evaluator) -> None:
        """An evaluation of the set begins."""

    def micro_done(self, micro: MicroBatch, state: Tensor | None, result: ObjectiveOutput) -> None:
        """After a micro-batch that began from `state`. If it runs a forward, all ranks must."""

    def part(self) -> Any:
        """This rank's share, which all ranks get."""

    def metrics(self, by_rank: Sequence[Any]) -> dict[str, float]:
        """The set's further numbers, from the parts of all ranks; the same on every rank."""
        return {}


class EvalSet(NamedTuple):
    """The documents of an evaluation."""

    name: str  # the name of an `[[eval.source]]`; empty: the held-out documents
    batches: Callable[[frozenset[str] | None], Iterator[MicroBatch]]
    """Makes an iterator of this rank's micro-batches for a model that takes such inputs (None:
    any), always the same ones. Another rank may have more."""
    filler: MicroBatch  # a masked micro-batch, which a rank runs while others still have some
    read: str = "all documents"  # how much of the set is read, in words
    sample: Any = None  # the drawn documents, if only a part is read
    riders: Sequence[EvalRider] = ()


class Evaluator:
    """Runs evaluations, each over the same micro-batches.

    `model` is the plain one, for a custom task; `row_model` runs rows, without DDP.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        row_model: nn.Module,
        loss: Loss,
        auxiliary: Auxiliary,
        info: RankInfo,
        device: torch.device,
        strategy: Strategy,
        diagnostics: Diagnostics,
        sets: Sequence[EvalSet],
    ) -> None:
        config, table = plan.config, plan.config.eval
        self.model, self.accepted = row_model, accepted_inputs(model)
        self.objective, self.auxiliary, self.strategy = loss, auxiliary, strategy
        self.info, self.device, self.is_off = info, device, False  # off: the same on all ranks
        self._token_ce = config.objective.token_ce
        width, rows = width_of(model), evaluated_rows(plan)
        if any(each.target is not None for each in table.source):  # whose groups wait
            rows += DEFAULT_CAPACITY
        self.make_ledger = None
        if width:  # the empty ledger of a set: a slot for each row, never swept
            options = LedgerOptions(wipe_mode="none", capacity=rows, dtype=config.ledger.dtype)
            self.make_ledger = partial(Ledger, options, state_width=width, device=device)
        self.autocast = autocast_context(config, device)
        # A failure on any rank ends the evaluations on all, but not the run.
        self.guard = diagnostics.best_effort("evaluation")
        self._task = None
        if table.target is not None:
            own = need(plan.parts.data, "eval.target")
            self._task = own.OwnTask(plan, model, diagnostics.best_effort("eval.target"))
        components = config.objective.components
        if table.depth and {"own", "token_ce"} & {*components}:
            make = need(plan.parts.models, "eval.depth").Depth
            guard = diagnostics.best_effort("eval.depth")
            sets = [each._replace(riders=[*each.riders, make(each.sample, guard)]) for each in sets]
        self.sets = sets
        self.weights: dict[str, Callable[[], AbstractContextManager[None]]] = {"": nullcontext}
        """What is evaluated: the prefix of its keys, and the context in which the model has it."""
        sizes, problem = token_bytes(plan.tokenizer)
        # Bits per byte are cross-entropy per byte of text.
        if sizes is not None and config.data.eod is not None:
            sizes[config.data.eod] = 0
        if "token_ce" not in components:
            sizes, problem = None, "the cross-entropy is not trained on"
        bytes_of = None
        if sizes is None:
            logger.info("evaluations report no bits per byte: %s", problem)
        else:
            bytes_of = torch.from_numpy(sizes).to(device)
        further = {"model_metrics": auxiliary.metric_keys, "bytes_of": bytes_of}
        self._details = make_details(plan, diagnostics, auxiliary, **further)

    def run(self, step: int, should_stop: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        """Evaluate; the same numbers on every rank, by catalog key.

        A set without a known target has none. Nor has any set once the details have failed on a
        rank: the sums would cover only part of the documents. A custom task still runs.

        Args:
            step: the last step, for a custom task.
            should_stop: asked between micro-batches. If it is true on any rank, all return None, at
                the latest at the end of a set.
        """
        found: dict[str, float] = {}
        # The weights themselves last: what riders have found then is recorded.
        for prefix, weights in reversed(self.weights.items()):
            with weights(), evaluating(self.model):  # without dropout; back to training after
                values = self._run_sets(step, should_stop)
            if values is None:
                return None
            found = {f"{prefix}{key}": value for key, value in values.items()} | found
        return found

    def _run_sets(self, step: int, should_stop: Callable[[], bool]) -> dict[str, float] | None:
        found: dict[str, float] = {}
        for each in self.sets:
            values = self._run_set(each, should_stop)
            if values is None:
                return None
            found |= values
        if self._task is not None:
            # As sinks show them; also those that this evaluation happens not to have.
            own = (_named(each.name, dict.fromkeys(OF_A_SET, 0.0), {}) for each in self.sets)
            found |= self._task(self, step, {*map(display_key, chain(found, *own))})
        return found

    @torch.no_grad()
    def _run_set(self, each: EvalSet, should_stop: Callable[[], bool]) -> dict[str, float] | None:
        details, guard, ledger = self._details, self.guard, None
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
        elif not reduced:
            logger.warning("%s: no target is known (loss_mask, NaN)", each.name or "held-out documents")
        return _named(each.name, reduced, found)

    def _evaluate(self, step: int, micro: MicroBatch, ledger: Ledger | None, each: EvalSet) -> None:
        """Add the sums of a micro-batch to the details, and show its losses to the set's riders."""
        state, carry = None, micro.carry
        if ledger is not None and carry is not None:
            ledger.begin_step(step)
            state = ledger.lookup(carry.group_ids, carry.cell_index)
        with self.autocast():
            output = self.model(**micro.inputs, state=state)
            result = self.objective(output.logits, micro.targets, meta=micro.located)
            result = self.auxiliary(result, output, micro)
            self.guard.run(self._details.micro_done, micro, result)
            for rider in each.riders:
                rider.micro_done(micro, state, result)
        if ledger is not None and carry is not None and output.state is not None:
            ends = {"end_ids": carry.end_ids, "end_cell_index": carry.end_cell_index}
            ledger.store(carry.group_ids, carry.cell_index, carry.is_last, output.state, **ends)

    def _with_perplexity(self, reduced: dict[str, float]) -> dict[str, float]:
        """A set's numbers, its perplexity too; none if no target is known."""
        if not reduced.keys() & {"loss", "accuracy"}:
            return {}
        if "loss" in reduced:
            # Losses by rows have another mean than those by tokens.
            reduced["loss"] += sum(reduced.get(key, 0.0) for key in self.auxiliary.by_rows)
        if "objective/token_ce" in reduced:
            cross_entropy = reduced["objective/token_ce"] / self._token_ce
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


def eval_sets(plan: Plan, info: RankInfo, device: torch.device, model: nn.Module | None = None) -> list[EvalSet]:
    """The held-out documents, and each `[[eval.source]]`. A UserError if a set has no document, or
    one of the user's own none that `model` takes; without state, `eval.depth` costs it nothing."""
    table, sets = plan.config.eval, []
    if not table.every:
        return []
    own = [source for source in plan.sources if source.streams and not source.is_off]
    if table.holdout_fraction > 0 and own:
        runs = 1 + (table.depth and (model is None or width_of(model) > 0))
        sets.append(_eval_set("", plan, own, table.batches, info, device, runs))
    for each, source in zip(table.source, plan.eval_sources, strict=True):
        num = each.batches or ALL
        if each.target is None:
            sets.append(_eval_set(each.name, plan, [source], num, info, device, 1))
        else:
            part = need(plan.parts.data, f"eval source {each.name}: target")
            sets.append(part.own_set(plan, source, info, device, num, model))
    return sets


def _eval_set(
    name: str, plan: Plan, sources: Sequence[Source], num_batches: int, info: RankInfo, device: torch.device, runs: int
) -> EvalSet:
    """A set: all documents of `sources`, or drawn ones. `num_batches`: 0: as many as cost little,
    `ALL`: all; `runs`: how often each cell but a document's first is run, by `eval.depth`."""
    datasets = [make_held_out(plan, source, info, is_whole=bool(name)) for source in sources]
    for dataset in datasets:  # an evaluation of nothing would report nothing
        dataset.refuse_nothing()
    read, sample, more = "all documents", None, plan.parts.evaluations
    if num_batches < ALL:
        more = need(more, "eval.batches")
        whole = dict(zip(datasets, sources, strict=True))
        read, datasets, sample = more.draw_sample(plan, name, whole, info, num_batches, runs)
        if sample is not None:
            shown = name or "held-out documents"
            logger.info("%s: each evaluation reads %s, the same for every seed", shown, read)
    # A sample and the depth need documents that begin a row, as does a model without resets.
    is_aligned = sample is not None or plan.config.eval.depth or not runs_on(plan, None)
    blend = LaneBlend(
        [BlendSource(dataset.name, dataset, ConstantWeight(1.0)) for dataset in datasets],
        seed=plan.config.run.seed,
        rows=evaluated_rows(plan),
        row_tokens=plan.config.data.seq_len,
        runs_on=not is_aligned,
        tokenizer=plan.tokenizer,
        shrinks=True,
    )
    beginning = blend.state_dict()  # every evaluation reads the same batches

    def batches(accepted: frozenset[str] | None) -> Iterator[MicroBatch]:
        blend.load_state_dict(beginning)
        # A generator, which has neither state nor metrics: an evaluation needs none.
        return Loader((batch for batch in blend), device=device, accepted=accepted, prefetch=0)

    filler = next(Loader([blend.masked()], device=device, prefetch=0)).masked()
    riders = [] if more is None else [more.DocumentLosses(name, sample)]
    return EvalSet(name, batches, filler, read, sample, riders)


def make_details(plan: Plan, diagnostics: Diagnostics, auxiliary: Auxiliary, **further: Any) -> StepDetails:
    """The details of logged steps and of evaluations. `further`: arguments of `StepDetails`."""
    objective = plan.config.objective
    modalities = {stream.modality for source in plan.sources for stream in source.streams}
    if plan.config.metrics.per_source:
        further |= {"sources": [source.name for source in plan.sources], "modalities": sorted(modalities)}
    return StepDetails(
        [*objective.components, *auxiliary.losses],
        token_types=plan.tokenizer.token_type_names if objective.token_types else (),
        diagnostics=diagnostics,
        **further,
    )
