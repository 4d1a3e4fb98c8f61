"""Evaluates a checkpoint without a run: on validation sets, or on its held-out documents."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from contextlib import chdir, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainer.cli.parts import PARTS
from trainer.config.data_tables import EvalSourceTable, MixingTable
from trainer.config.schema import DistributedTable, RunConfig, SchedulerTable
from trainer.data.fingerprint import FINGERPRINT_KEY
from trainer.distributed.env import RankInfo
from trainer.distributed.strategy import Strategy
from trainer.errors import UserError
from trainer.lab.loss_mask import LossMask
from trainer.metrics.best_effort import Diagnostics
from trainer.metrics.logger import get_logger
from trainer.tools.doubts import trained_on
from trainer.tools.saved_model import Step, load_model, refuse_code
from trainer.training.build import model_and_loss, reading
from trainer.training.evaluator import ALL, Evaluator, eval_sets
from trainer.training.plan import Plan, Source, make_auxiliary, make_plan, source_of
from trainer.training.record import check_data

logger = get_logger(__name__)


def evaluate_checkpoint(
    directory: str | Path,
    sources: Sequence[EvalSourceTable],
    *,
    step: Step,
    ema: bool = False,
    batches: int | None = None,
    held_out: bool = False,
    device: torch.device,
    trust_code: bool = False,
) -> tuple[int | None, dict[str, float]]:
    """Evaluate a model, of a run or exported, in one process: (step, metrics by key).

    The step is None for an exported model that does not say. `sources`, otherwise `[[eval.source]]`
    of its config, otherwise all of its held-out documents are read; a task of the user's own
    (`[eval] target`) is called as in the run.

    Args:
        step, ema, trust_code: see `load_model`; the code may be that of data and losses, too.
        batches: of each set, about; None: all, or as many as its config says.
        held_out: read the held-out documents although the config has sets.

    Raises:
        UserError: code without trust, no such model, nothing to evaluate on, or unreadable data.
    """
    directory = Path(directory).absolute()
    # The model's code may leave the directory that its config's paths are relative to.
    with chdir(os.curdir):
        saved = load_model(directory, step=step, ema=ema, device=device, trust_code=trust_code)
    refuse_code(saved.config, directory, "data", "eval", "objective", trusted=trust_code)
    config, sets = saved.config, list(sources) or saved.config.eval.source
    if len({each.name for each in sets}) < len(sets):
        raise UserError("--source", "names one set twice", "give it another name")
    if held_out:
        if sources:
            fix = "evaluate the two one after the other"
            raise UserError("--held-out", "cannot be combined with --source", fix)
        config, sets = _with_eval(config, source=[], target=None), []
    if not (sets or config.eval.target or config.eval.holdout_fraction):
        what = "no" if held_out else "neither [[eval.source]] nor"
        problem = f"has {what} held-out documents to evaluate on"
        raise UserError(str(directory), problem, "name a set with --source NAME=PATH")
    plan = _plan(config, sets, batches, takes_mask=bool(sources))
    if saved.data is not None and config.eval.holdout_fraction and not sets:
        try:  # of changed data, others are held out
            check_data(plan, {FINGERPRINT_KEY: saved.data}, RankInfo())
        except UserError as error:
            if error.key == "--resume":  # other data; else a file cannot be read
                error.key, error.fix = str(directory), "put the data back, or add --source NAME=PATH"
            raise
    info, diagnostics = RankInfo(), Diagnostics()
    row_model, loss = model_and_loss(saved.model, plan, device)
    read = eval_sets(plan, info, device, saved.model)
    auxiliary = make_auxiliary(plan.config.objective, saved.model, plan.parts)
    evaluator = Evaluator(plan, saved.model, row_model, loss, auxiliary, info, device, Strategy(), diagnostics, read)
    found = evaluator.run(saved.step or 0)
    if not found:
        fix = "; ".join(diagnostics.summary()) or "look at the data"
        raise UserError(str(directory), "gave no number", fix)
    return saved.step, found


def _plan(config: RunConfig, sets: Sequence[EvalSourceTable], batches: int | None, *, takes_mask: bool) -> Plan:
    """The plan of an evaluation, whose sets get the `loss_mask` of training if it `takes_mask`."""
    changed = {
        "train": config.train.model_copy(update={"steps": 1, "tokens": 0, "micro_batches": 1, "ema": 0.0}),
        "scheduler": SchedulerTable(name="constant", warmup_steps=0),
        "ledger": config.ledger.model_copy(update={"capacity": ALL, "wipe_mode": "none"}),
        "distributed": DistributedTable(),
        "metrics": config.metrics.model_copy(update={"profile": 0}),
    }
    # An evaluation needs neither the steps nor the schedule nor the ledger of a run.
    trained, config = config, config.model_copy(update=changed)
    if not sets:
        held_out = _with_eval(config, source=[], every=1, batches=batches or ALL)
        return make_plan(held_out, 1, parts=PARTS)
    if batches is not None:
        sets = [each.model_copy(update={"batches": batches}) for each in sets]
    # The training data may be elsewhere: the sets, of any modalities, take its place.
    mode: Any = "per_row" if len({each.target is None for each in sets}) == 1 else "per_stream"
    taken = {"source": [each.as_source() for each in sets], "mixing": MixingTable(batching_mode=mode)}
    data = config.data.model_copy(update=taken)
    without = _with_eval(config, source=[], target=None, every=0, holdout_fraction=0.0)
    plan = make_plan(without.model_copy(update={"data": data}), 1, parts=PARTS)
    data = data.model_copy(update={"mixing": config.data.mixing})
    planned = _with_eval(plan.config, source=sets, target=config.eval.target, every=1)
    planned = planned.model_copy(update={"data": data})
    plan = replace(plan, config=planned, eval_sources=plan.sources)
    training: list[Source] = []
    for table in trained.data.source:
        with suppress(UserError):  # it is no longer where the run read it
            training.append(source_of(table))
    for doubt in trained_on(training, plan.eval_sources):
        logger.warning("%s", UserError(*doubt).message)
    masks = {each.loss_mask for each in trained.data.source if each.loss_mask}
    if not (takes_mask and masks):
        return plan
    return replace(plan, eval_sources=[_masked(plan, each, masks) for each in plan.eval_sources])


def _masked(plan: Plan, source: Source, fields: set[str]) -> Source:
    """A set with the `loss_mask` of training, if there is one and its files have that field."""
    field = ", ".join(sorted(fields))
    if len(fields) > 1:
        text = "--source %s: all tokens count, training has several loss_mask: %s"
        logger.warning(text, source.name, field)
        return source
    masked = replace(source, table=source.table.model_copy(update={"loss_mask": field}))
    _, read, _ = reading(plan, masked)
    try:
        for stream in source.streams:
            deque(LossMask(field).pieces(Path(stream.path), read), maxlen=0)
    except UserError as error:
        text = "--source %s: all tokens count, without loss_mask: %s"
        logger.warning(text, source.name, error.message)
        return source
    logger.info("--source %s: loss_mask = %s, as in training", source.name, field)
    return masked


def _with_eval(config: RunConfig, **changed: object) -> RunConfig:
    return config.model_copy(update={"eval": config.eval.model_copy(update=changed)})
