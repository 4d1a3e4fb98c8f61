"""Evaluates a checkpoint without a run: on its config's validation sets, on others, or on its held-out documents."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trainer.config.data_tables import EvalSourceTable
from trainer.config.schema import RunConfig, SchedulerTable
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.metrics.best_effort import Diagnostics
from trainer.training.export.saved_model import SavedModel, load_model
from trainer.training.setup.data import eval_sets
from trainer.training.setup.evaluation import make_evaluator
from trainer.training.setup.parts import model_and_loss
from trainer.training.setup.plan import Plan, make_plan

ALL = 2**62  # micro-batches


@dataclass(frozen=True)
class Evaluated:
    """What was found.

    Args:
        step: of the checkpoint; None: an exported model that does not say.
        metrics: by catalog key.
    """

    step: int | None
    metrics: dict[str, float]


def parse_source(text: str) -> EvalSourceTable:
    """`NAME=PATH` of `--source`: a file, a glob, or a directory with everything below it.

    Raises:
        UserError: it is not of this form.
    """
    name, separator, path = text.partition("=")
    if not (separator and path and name) or not all(letter.isalnum() or letter in "_.-" for letter in name):
        raise UserError("--source", f"{text!r} is not NAME=PATH", "write for example --source books=data/books")
    if os.path.isdir(path):
        path = os.path.join(path, "**", "*")
    return EvalSourceTable(name=name, paths=[path])


def evaluate_checkpoint(
    directory: str | Path,
    sources: Sequence[EvalSourceTable],
    *,
    step: int | None,
    device: torch.device,
    tokenizer: str | None = None,
) -> Evaluated:
    """Evaluate the model of a run, or an exported one, in one process.

    With `sources` or `[[eval.source]]` in its config those are read, otherwise all of its held-out documents. A task of the
    user's own (`[eval] target`) is called as in the run.

    Args:
        step: of the checkpoint; None: the latest.
        tokenizer: path of the tokenizer.json, if it has moved.

    Raises:
        UserError: there is no such model, nothing to evaluate on, or the data cannot be read.
    """
    saved = load_model(directory, step=step, device=device, tokenizer=tokenizer)
    plan = _plan(saved, sources, Path(directory))
    info, diagnostics = RankInfo(), Diagnostics()
    cell_model, loss = model_and_loss(saved.model, plan.config, device)
    sets = eval_sets(plan, info, device)
    evaluator = make_evaluator(plan, saved.model, cell_model, loss, info, device, diagnostics, sets, in_lockstep=False)
    found = evaluator.run(saved.step or 0)
    if not found:
        raise UserError(str(directory), "gave no number", "; ".join(diagnostics.summary()) or "look at the data")
    return Evaluated(saved.step, found)


def _plan(saved: SavedModel, given: Sequence[EvalSourceTable], directory: Path) -> Plan:
    config, named = saved.config, [*saved.config.eval.source, *given]
    names = [each.name for each in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError("--source", f"two sets are named {twice[0]}", "give it another name")
    if not (named or config.eval.target or config.eval.holdout_fraction):
        problem = "has neither [[eval.source]] nor held-out documents to evaluate on"
        raise UserError(str(directory), problem, "name some with --source NAME=PATH")
    # How the run was trained is no matter here.
    changed = {
        "train": config.train.model_copy(update={"steps": 1, "tokens": 0, "micro_batches": 1}),
        "scheduler": SchedulerTable(name="constant", warmup_steps=0),
        "ledger": config.ledger.model_copy(update={"capacity": ALL, "burn_in": 0}),
    }
    path = directory / "config.resolved.toml"
    if not named:
        return make_plan(_changed(config, changed, source=[], every=1, batches=ALL), path, 1)
    # The training data may be elsewhere: the sets take its place. They need not have the modalities of the training data.
    mixing = config.data.mixing.model_copy(update={"batch_size_by_modality": {}})
    data = config.data.model_copy(update={"source": [each.as_source() for each in named], "mixing": mixing})
    plan = make_plan(_changed(config, {**changed, "data": data}, source=[], every=0, holdout_fraction=0.0), path, 1)
    data = data.model_copy(update={"mixing": config.data.mixing})
    config = _changed(plan.config, {"data": data}, source=named, every=1)
    return replace(plan, config=config, eval_sources=plan.sources)


def _changed(config: RunConfig, tables: Mapping[str, object], **eval_keys: object) -> RunConfig:
    return config.model_copy(update={**tables, "eval": config.eval.model_copy(update=eval_keys)})
