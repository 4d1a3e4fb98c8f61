"""What evaluates a run: made from its plan, for the run itself and for `train eval`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import nn

from trainer.data.loader import Loader
from trainer.data.mixing import StreamMixingDataset
from trainer.data.tokenizer import Tokenizer
from trainer.distributed.agree import gather_from_ranks
from trainer.distributed.env import RankInfo
from trainer.import_path import resolve_target
from trainer.metrics.best_effort import BestEffort, Diagnostics
from trainer.metrics.values import as_number, checked
from trainer.objective.compose import Loss
from trainer.training.evaluator import EvalSet, Evaluator
from trainer.training.setup.parts import autocast_context, make_dataset, make_eval_ledger, make_objective
from trainer.training.setup.plan import Plan
from trainer.training.step.details import StepDetails
from trainer.training.step.microbatch import accepted_inputs


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

    def batches() -> Iterator[dict[str, Any]]:
        for dataset, beginning in zip(datasets, beginnings, strict=True):
            dataset.load_state_dict(beginning)
        # Generators, which have neither state nor metrics: an evaluation needs none.
        loaders = [iter(Loader((batch for batch in each), device=device, prefetch=0)) for each in datasets]
        in_turn = (loaded for turn in zip_longest(*loaders) for loaded in turn if loaded is not None)
        for loaded in islice(in_turn, limit):
            yield loaded.batch

    next(batches(), None)
    return EvalSet(name, batches)


def make_details(plan: Plan, diagnostics: Diagnostics) -> StepDetails:
    """What is collected beside the loss, of logged steps and of evaluations."""
    objective, is_by_source = plan.config.objective, plan.config.metrics.per_source
    modalities = {stream.modality for source in plan.sources for stream in source.streams}
    return StepDetails(
        make_objective(objective).components,
        token_types=plan.tokenizer.token_type_names if objective.token_types else (),
        sources=[source.name for source in plan.sources] if is_by_source else (),
        modalities=sorted(modalities) if is_by_source else (),
        diagnostics=diagnostics,
    )


def make_evaluator(
    plan: Plan,
    model: nn.Module,
    cell_model: nn.Module,
    loss: Loss,
    info: RankInfo,
    device: torch.device,
    diagnostics: Diagnostics,
    sets: Sequence[EvalSet],
    *,
    most: Callable[[int], int],
) -> Evaluator:
    """The evaluator of a run.

    Args:
        model: the run's, which a task of the user's own gets.
        cell_model: what a row is run through; with `chunk_tokens` the model without its output layer.
        most: see `Strategy.most`.
    """
    table, autocast = plan.config.eval, autocast_context(plan.config, device)
    task = None
    if table.target is not None:
        task = OwnTask(
            resolve_target(table.target, "eval.target"),
            args=table.args,
            model=model,
            tokenizer=plan.tokenizer,
            autocast=autocast,
            rank=info.rank,
            world_size=info.world_size,
            device=device,
            guard=diagnostics.best_effort("eval.target"),
        )
    return Evaluator(
        model=cell_model,
        accepted=accepted_inputs(model),
        objective=loss,
        sets=sets,
        task=task,
        make_ledger=make_eval_ledger(plan, model, device),
        details=make_details(plan, diagnostics),
        guard=diagnostics.best_effort("evaluation"),
        autocast=autocast,
        is_bytes=plan.config.data.tokenizer == "bytes",
        most=most,
        world_size=info.world_size,
        device=device,
    )


class OwnTask:
    """Calls the user's function on every rank; what rank 0 returns is logged.

    Args:
        function: called with `model`, `tokenizer`, `step`, `device`, `rank` and `world_size`, and with `args`. Returns a
            mapping of names to numbers; other ranks may return anything.
        autocast: the precision's context.
        guard: a task that fails on any rank is switched off on all, with one warning; the run goes on.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        args: Mapping[str, Any],
        model: nn.Module,
        tokenizer: Tokenizer,
        autocast: Callable[[], AbstractContextManager[None]],
        rank: int,
        world_size: int,
        device: torch.device,
        guard: BestEffort,
    ) -> None:
        self._function = function
        self._given = {"device": device, "rank": rank, "world_size": world_size, "tokenizer": tokenizer, **args}
        self._model = model
        self._autocast = autocast
        self._rank, self._world_size, self._device = rank, world_size, device
        self._guard = guard
        self._is_off = False  # the same on all ranks

    def run(self, step: int, taken: Set[str] = frozenset()) -> dict[str, float]:
        """The task's numbers as `eval/<name>`, the same on every rank, without names that are taken; empty once it has failed.
        The model is in evaluation mode, without gradients, and torch's random numbers are afterwards what they were."""
        if self._is_off:
            return {}
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            found = self._guard.run(self._call, step, taken)
        by_rank = gather_from_ranks((found, self._guard.enabled), world_size=self._world_size)
        self._is_off = not all(works for _, works in by_rank)
        return {} if self._is_off else by_rank[0][0] or {}

    def _call(self, step: int, taken: Set[str]) -> dict[str, float]:
        with torch.no_grad(), self._autocast():
            found = self._function(model=self._model, step=step, **self._given)
        if self._rank != 0:
            return {}
        if not isinstance(found, Mapping):
            raise TypeError(f"eval.target returned a {type(found).__name__}, not a mapping of names to numbers")
        values = checked(found, self._guard.leave_out, as_number)
        own = {f"eval/{name}": value for name, value in values.items() if value is not None}
        for key in sorted(own.keys() & taken):
            self._guard.leave_out(key, "the evaluation of [[eval.source]] reports a metric of this name itself")
        return {key: value for key, value in own.items() if key not in taken}
