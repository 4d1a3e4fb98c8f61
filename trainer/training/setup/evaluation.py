"""What evaluates a run: made from its plan, for the run itself and for `train eval`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, zip_longest

import torch
from torch import nn

from trainer.data.batch import MicroBatch, accepted_inputs
from trainer.data.loader import Loader
from trainer.data.mixing import StreamMixingDataset
from trainer.distributed.env import RankInfo
from trainer.import_path import resolve_target
from trainer.metrics.best_effort import Diagnostics
from trainer.objective.auxiliary import Auxiliary
from trainer.objective.loss import Loss
from trainer.training.evaluator import EvalSet, Evaluator, OwnTask
from trainer.training.setup.parts import autocast_context, make_dataset, make_eval_ledger, make_objective
from trainer.training.setup.plan import Plan
from trainer.training.step.details import StepDetails


def eval_sets(plan: Plan, info: RankInfo, device: torch.device) -> list[EvalSet]:
    """The held-out documents, the sources in turn from the beginning, and each `[[eval.source]]`; empty without evaluations.

    Raises:
        UserError: no document of a source is held out; a set has no document.
    """
    table, sets = plan.config.eval, []
    if not table.every:
        return []
    if table.holdout_fraction > 0:
        own = [source for source in plan.sources if source.streams]
        datasets = [make_dataset(plan, source, info, is_holdout=True) for source in own]
        sets.append(_eval_set("", datasets, table.batches, device))
    for each, source in zip(table.source, plan.eval_sources, strict=True):
        dataset = make_dataset(plan, source, info, is_holdout=True, is_whole=True)
        sets.append(_eval_set(each.name, [dataset], each.batches or None, device))
    return sets


def _eval_set(name: str, datasets: list[StreamMixingDataset], limit: int | None, device: torch.device) -> EvalSet:
    beginnings = [dataset.state_dict() for dataset in datasets]

    def batches(accepted: frozenset[str] | None) -> Iterator[MicroBatch]:
        for dataset, beginning in zip(datasets, beginnings, strict=True):
            dataset.load_state_dict(beginning)
        # Generators, which have neither state nor metrics: an evaluation needs none.
        loaders = [Loader((batch for batch in each), device=device, accepted=accepted, prefetch=0) for each in datasets]
        in_turn = (micro for turn in zip_longest(*loaders) for micro in turn if micro is not None)
        return islice(in_turn, limit)

    next(batches(None), None)
    return EvalSet(name, batches)


def make_details(
    plan: Plan, diagnostics: Diagnostics, auxiliary: Auxiliary, *, model_metrics: Sequence[str] = ()
) -> StepDetails:
    """What is collected beside the loss, of logged steps and of evaluations."""
    objective, is_by_source = plan.config.objective, plan.config.metrics.per_source
    modalities = {stream.modality for source in plan.sources for stream in source.streams}
    return StepDetails(
        [*make_objective(objective).components, *auxiliary.losses],
        token_types=plan.tokenizer.token_type_names if objective.token_types else (),
        model_metrics=model_metrics,
        sources=[source.name for source in plan.sources] if is_by_source else (),
        modalities=sorted(modalities) if is_by_source else (),
        diagnostics=diagnostics,
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
    most: Callable[[int], int],
) -> Evaluator:
    """The evaluator of a run. A task of the user's own gets `model`; a row is run through `cell_model`, which with
    `chunk_tokens` has no output layer."""
    table, autocast = plan.config.eval, autocast_context(plan.config, device)
    task = None
    if table.target is not None:
        task = OwnTask(
            function=resolve_target(table.target, "eval.target"),
            args=table.args,
            model=model,
            tokenizer=plan.tokenizer,
            autocast=autocast,
            info=info,
            device=device,
            guard=diagnostics.best_effort("eval.target"),
        )
    return Evaluator(
        model=cell_model,
        accepted=accepted_inputs(model),
        objective=loss,
        auxiliary=auxiliary,
        sets=sets,
        task=task,
        make_ledger=make_eval_ledger(plan, model, device),
        details=make_details(plan, diagnostics, auxiliary, model_metrics=auxiliary.metric_keys),
        guard=diagnostics.best_effort("evaluation"),
        autocast=autocast,
        is_bytes=plan.config.data.tokenizer == "bytes",
        most=most,
        world_size=info.world_size,
        device=device,
    )
