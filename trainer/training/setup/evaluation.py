"""Makes the evaluator of a plan, for a run and for `train eval`."""

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
from trainer.objective.loss import Auxiliary, Loss
from trainer.training.evaluator import EvalSet, Evaluator
from trainer.training.setup.parts import autocast_context, make_eval_ledger
from trainer.training.setup.plan import Plan
from trainer.training.setup.sources import Source, evaluated_rows, make_held_out, runs_on
from trainer.training.step.details import StepDetails
from trainer.wording import few

logger = get_logger(__name__)
SHARE = 0.15
"""Cells that an evaluation may run by default, over those that a rank trains on between two.

A forward is a third of a step's work: about 5 % of the time on one rank, less on several."""
ALL = 2**62
"""More micro-batches than any set has."""


def eval_sets(plan: Plan, info: RankInfo, device: torch.device, *, has_state: bool = True) -> list[EvalSet]:
    """The held-out documents, and each `[[eval.source]]`. A UserError if a set has no document.

    `eval.depth` costs nothing if the model does not `has_state`.
    """
    table, sets = plan.config.eval, []
    if not table.every:
        return []
    own = [source for source in plan.sources if source.streams]
    if table.holdout_fraction > 0 and own:
        runs = 2 if table.depth and has_state else 1
        sets.append(_eval_set("", plan, own, table.batches, info, device, runs))
    for each, source in zip(table.source, plan.eval_sources, strict=True):
        sets.append(_eval_set(each.name, plan, [source], each.batches or ALL, info, device, 1))
    return sets


def _eval_set(
    name: str, plan: Plan, sources: Sequence[Source], num_batches: int, info: RankInfo, device: torch.device, runs: int
) -> EvalSet:
    """A set: all documents of `sources`, or drawn ones.

    Args:
        num_batches: 0: as many as cost little; `ALL`: all.
        runs: how often each cell but a document's first is run, by `eval.depth`.
    """
    datasets = [make_held_out(plan, source, info, is_whole=bool(name)) for source in sources]
    for dataset in datasets:  # an evaluation of nothing would report nothing
        dataset.refuse_nothing()
    read, riders, rows = "all documents", [], evaluated_rows(plan)
    if num_batches < ALL:
        steps = min(plan.config.eval.every, plan.facts.steps)
        # At least so many: batches that grow later only make the share smaller.
        cells = plan.config.micro_batches.least * rows * plan.config.train.tbptt_cells
        budget = num_batches * rows * plan.facts.data_shards or int(SHARE * steps * cells)
        runs = 1 if num_batches else runs
        draw = plan.parts.need("evaluation on a sample", "eval.batches")
        generator = keyed_generator("evaluation", name, plan.config.run.seed)
        read, drawn = draw(plan, sources, datasets, budget, runs, info, generator)
        if drawn is not None:
            datasets, rider = drawn
            riders.append(rider)
            shown = name or "held-out documents"
            logger.info("%s: each evaluation reads %s, drawn by run.seed", shown, read)
    # Each document begins a row if it has its own weight, or if depth counts from its cell.
    is_aligned = bool(riders) or plan.config.eval.depth or not runs_on(plan, None)
    blend = LaneBlend(
        [BlendSource(dataset.name, dataset, ConstantWeight(1.0)) for dataset in datasets],
        seed=plan.config.run.seed,
        rows=rows,
        row_tokens=plan.config.data.seq_len,
        runs_on=not is_aligned,
        tokenizer=plan.tokenizer,
    )
    beginning = blend.state_dict()  # every evaluation reads the same batches

    def batches(accepted: frozenset[str] | None) -> Iterator[MicroBatch]:
        blend.load_state_dict(beginning)
        # A generator, which has neither state nor metrics: an evaluation needs none.
        return Loader((batch for batch in blend), device=device, accepted=accepted, prefetch=0)

    filler = next(Loader([blend.masked()], device=device, prefetch=0)).masked()
    sample = riders[0].sample if riders else None
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
    """The evaluator of a run. A custom task gets `model`; rows run through `cell_model`."""
    table, task = plan.config.eval, None
    if auxiliary.metric_keys and any(each.sample is not None and not each.name for each in sets):
        text = "held-out documents: the model's own metrics (%s) are left out: "
        text += "of a sample each row has another weight"
        logger.info(text, few(auxiliary.metric_keys))
    if table.target is not None:
        task = plan.parts.need("own evaluation", "eval.target")(
            function=resolve_target(table.target, "eval.target"),
            args=table.args,
            model=model,
            tokenizer=plan.tokenizer,
            guard=diagnostics.best_effort("eval.target"),
        )
    components = plan.config.objective.components
    if table.depth and {"own", "token_ce"} & {*components}:
        make = plan.parts.need("losses by depth", "eval.depth")
        settings = {"guard": diagnostics.best_effort("eval.depth"), "is_cut": plan.config.data.max_group_cells > 0}
        sets = [each._replace(riders=[*each.riders, make(each.sample, **settings)]) for each in sets]
    sizes, problem = token_bytes(plan.tokenizer)
    # Bits per byte are cross-entropy per byte of text.
    if "token_ce" not in components:
        sizes, problem = None, "the cross-entropy is not trained on"
    bytes_of = None
    if sizes is None:
        logger.info("evaluations report no bits per byte: %s", problem)
    else:
        bytes_of = torch.from_numpy(sizes).to(device)
    further = {"model_metrics": auxiliary.metric_keys, "bytes_of": bytes_of}
    return Evaluator(
        model=cell_model,
        accepted=accepted_inputs(model),
        objective=loss,
        token_ce=plan.config.objective.token_ce,
        auxiliary=auxiliary,
        sets=sets,
        task=task,
        make_ledger=make_eval_ledger(plan, model, device),
        details=make_details(plan, diagnostics, auxiliary, **further),
        guard=diagnostics.best_effort("evaluation"),
        autocast=autocast_context(plan.config, device),
        strategy=strategy,
        info=info,
        device=device,
    )
