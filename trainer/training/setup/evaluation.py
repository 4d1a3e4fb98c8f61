"""What evaluates a run: made from its plan, for the run itself and for `train eval`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from trainer.data.batch import MicroBatch, accepted_inputs
from trainer.data.blend import BlendSource
from trainer.data.lanes import LaneBlend
from trainer.data.loader import Loader
from trainer.data.tokenizer import token_bytes
from trainer.data.weights import ConstantWeight
from trainer.distributed.env import RankInfo
from trainer.distributed.strategy import Strategy
from trainer.hashing import keyed_generator
from trainer.import_path import resolve_target
from trainer.metrics.best_effort import Diagnostics
from trainer.metrics.logger import get_logger
from trainer.objective.auxiliary import Auxiliary
from trainer.objective.loss import Loss
from trainer.training.evaluator import EvalSet, Evaluator, OwnTask
from trainer.training.setup.evaluation_sample import draw_sample
from trainer.training.setup.parts import autocast_context, make_eval_ledger
from trainer.training.setup.plan import Plan
from trainer.training.setup.sources import Source, evaluated_rows, make_held_out, runs_on
from trainer.training.step.details import StepDetails
from trainer.wording import few

logger = get_logger(__name__)
SHARE = 0.15
"""Cells that an evaluation may run by default, of those that one rank trains on between two evaluations. A forward is a third
of the work of a training step: about 5 % of its time on one rank, less on several. `eval.depth` runs later cells twice."""
ALL = 2**62
"""More micro-batches than any set has."""


def eval_sets(plan: Plan, info: RankInfo, device: torch.device, *, has_state: bool = True) -> list[EvalSet]:
    """The held-out documents, and each `[[eval.source]]`; empty without evaluations.
    Without `has_state`, `eval.depth` costs nothing.

    Raises:
        UserError: no document of a source is held out; a set has no document.
    """
    table, sets = plan.config.eval, []
    if not table.every:
        return []
    own = [source for source in plan.sources if source.streams]
    if table.holdout_fraction > 0 and own:
        sets.append(_eval_set("", plan, own, table.batches, info, device, 2 if table.depth and has_state else 1))
    for each, source in zip(table.source, plan.eval_sources, strict=True):
        sets.append(_eval_set(each.name, plan, [source], each.batches or ALL, info, device, 1))
    return sets


def _eval_set(
    name: str, plan: Plan, sources: Sequence[Source], num_batches: int, info: RankInfo, device: torch.device, runs: int
) -> EvalSet:
    """A set: all documents of `sources`, or drawn ones. `num_batches`: 0: as many as cost little, if each cell but a document's
    first is run `runs` times; `ALL` or more: all."""
    datasets = [make_held_out(plan, source, info, is_whole=bool(name)) for source in sources]
    for dataset in datasets:
        dataset.refuse_nothing()
    read, riders, rows = "all documents", [], evaluated_rows(plan)
    if num_batches < ALL:
        steps = min(plan.config.eval.every, plan.facts.steps)
        cells = plan.config.micro_batches.least * rows * plan.config.train.tbptt_cells
        budget = num_batches * rows * plan.facts.data_shards or int(SHARE * steps * cells)
        generator = keyed_generator("evaluation", name, plan.config.run.seed)
        read, drawn = draw_sample(plan, sources, datasets, budget, 1 if num_batches else runs, info, generator)
        if drawn is not None:
            datasets, rider = drawn
            riders.append(rider)
            logger.info("%s: each evaluation reads %s, drawn by run.seed", name or "held-out documents", read)
    # Documents of a sample have weights of their own, and depth counts from the cell: each begins a row.
    is_aligned = bool(riders) or plan.config.eval.depth or not runs_on(plan, None)
    blend = LaneBlend(
        [BlendSource(dataset.name, dataset, ConstantWeight(1.0)) for dataset in datasets],
        seed=plan.config.run.seed,
        rows=rows,
        row_tokens=plan.config.data.seq_len,
        runs_on=not is_aligned,
        tokenizer=plan.tokenizer,
    )
    beginning = blend.state_dict()

    def batches(accepted: frozenset[str] | None) -> Iterator[MicroBatch]:
        blend.load_state_dict(beginning)
        # A generator, which has neither state nor metrics: an evaluation needs none.
        return Loader((batch for batch in blend), device=device, accepted=accepted, prefetch=0)

    filler = next(Loader([blend.masked()], device=device, prefetch=0)).masked()
    return EvalSet(name, batches, filler, read, riders[0].sample if riders else None, riders)


def make_details(plan: Plan, diagnostics: Diagnostics, auxiliary: Auxiliary, **further: Any) -> StepDetails:
    """What is collected beside the loss, of logged steps and of evaluations. `further`: arguments of `StepDetails`."""
    objective, is_by_source = plan.config.objective, plan.config.metrics.per_source
    modalities = {stream.modality for source in plan.sources for stream in source.streams}
    return StepDetails(
        [*objective.components, *auxiliary.losses],
        token_types=plan.tokenizer.token_type_names if objective.token_types else (),
        sources=[source.name for source in plan.sources] if is_by_source else (),
        modalities=sorted(modalities) if is_by_source else (),
        diagnostics=diagnostics,
        **further,
    )


def make_evaluator(
    plan: Plan,
    model: nn.Module,
    cell_model: nn.Module,
    loss: Loss,
    auxiliary: Auxiliary,
    info: RankInfo,
    device: torch.device,
    diagnostics: Diagnostics,
    sets: Sequence[EvalSet],
    *,
    strategy: Strategy,
) -> Evaluator:
    """The evaluator of a run. A task of the user's own gets `model`; a row is run through `cell_model`, which with
    `chunk_tokens` has no output layer."""
    table = plan.config.eval
    if auxiliary.metric_keys and any(each.sample is not None and not each.name for each in sets):
        text = "held-out documents: the model's own metrics (%s) are left out: of a sample each row has another weight"
        logger.info(text, few(auxiliary.metric_keys))
    task = None
    if table.target is not None:
        task = OwnTask(
            function=resolve_target(table.target, "eval.target"),
            args=table.args,
            model=model,
            tokenizer=plan.tokenizer,
            guard=diagnostics.best_effort("eval.target"),
        )
    components = plan.config.objective.components
    if table.depth and {"own", "token_ce"} & {*components}:
        make, guard = plan.parts.need("losses by depth", "eval.depth"), diagnostics.best_effort("eval.depth")
        is_cut = plan.config.data.max_group_cells > 0
        sets = [each._replace(riders=[*each.riders, make(each.sample, guard, is_cut=is_cut)]) for each in sets]
    sizes, problem = token_bytes(plan.tokenizer)
    if "token_ce" not in components:
        sizes, problem = None, "the cross-entropy is not trained on"
    if sizes is None:
        logger.info("evaluations report no bits per byte: %s", problem)
    bytes_of = None if sizes is None else torch.from_numpy(sizes).to(device)
    return Evaluator(
        model=cell_model,
        accepted=accepted_inputs(model),
        objective=loss,
        token_ce=plan.config.objective.token_ce,
        auxiliary=auxiliary,
        sets=sets,
        task=task,
        make_ledger=make_eval_ledger(plan, model, device),
        details=make_details(plan, diagnostics, auxiliary, model_metrics=auxiliary.metric_keys, bytes_of=bytes_of),
        guard=diagnostics.best_effort("evaluation"),
        autocast=autocast_context(plan.config, device),
        strategy=strategy,
        info=info,
        device=device,
    )
