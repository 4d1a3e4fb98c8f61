"""Evaluates a checkpoint without a run: on its config's validation sets, on others, or on its held-out documents."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trainer.config.data_tables import EvalSourceTable, MixingTable
from trainer.config.schema import RunConfig, SchedulerTable
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.metrics.best_effort import Diagnostics
from trainer.metrics.logger import get_logger
from trainer.tools.trained.saved_model import SavedModel, load_model, refuse_code
from trainer.training.setup.data import EvalSet, eval_sets
from trainer.training.setup.evaluation import make_evaluator
from trainer.training.setup.parts import model_and_loss
from trainer.training.setup.plan import Plan, make_plan
from trainer.training.setup.plausible import trained_on
from trainer.training.setup.sources import resolve_eval_sources, resolve_sources
from trainer.wording import counted, few

logger = get_logger(__name__)
ALL = 2**62  # micro-batches
PROGRESS_SEC = 10.0


@dataclass(frozen=True)
class Evaluated:
    """What was found.

    Args:
        step: of the checkpoint; None: an exported model that does not say.
        metrics: by catalog key.
    """

    step: int | None
    metrics: dict[str, float]


def evaluate_checkpoint(
    directory: str | Path,
    sources: Sequence[EvalSourceTable],
    *,
    step: int | None,
    batches: int | None = None,
    held_out: bool = False,
    device: torch.device,
    tokenizer: str | None = None,
    trust_code: bool = False,
) -> Evaluated:
    """Evaluate the model of a run, or an exported one, in one process.

    With `sources` or `[[eval.source]]` in its config those are read, otherwise all of its held-out documents. Of two sets of
    one name that of `sources` is read; if `sources` are given, sets of the config whose files are not there are left out. A
    task of the user's own (`[eval] target`) is called as in the run.

    Args:
        held_out: read the held-out documents although the config has sets.
        step: of the checkpoint; None: the latest.
        batches: of each set at most; None: all, or as many as its config says.
        tokenizer: path of the tokenizer.json, if it has moved.
        trust_code: import the code that the config of the model names.

    Raises:
        UserError: the config names code; there is no such model, nothing to evaluate on, or the data cannot be read.
    """
    directory = Path(directory).absolute()
    with chdir(os.curdir):  # which the model's code may leave, and its config's paths are relative to
        saved = load_model(directory, step=step, device=device, tokenizer=tokenizer, trust_code=trust_code)
    refuse_code(saved.config, directory, "data", "eval", trusted=trust_code)
    if held_out:
        saved = _without_sets(saved, sources, directory)
    plan = _plan(saved, sources, Path(directory), batches)
    info, diagnostics = RankInfo(), Diagnostics()
    cell_model, loss = model_and_loss(saved.model, plan.config, device)
    sets = [_announced(each, plan) for each in eval_sets(plan, info, device)]
    evaluator = make_evaluator(plan, saved.model, cell_model, loss, info, device, diagnostics, sets, most=int)
    found = evaluator.run(saved.step or 0)
    if not found:
        raise UserError(str(directory), "gave no number", "; ".join(diagnostics.summary()) or "look at the data")
    return Evaluated(saved.step, found)


def _announced(each: EvalSet, plan: Plan) -> EvalSet:
    """The set, which logs its size when it is read, and now and then how far it is."""
    sources = [source for source in plan.eval_sources or plan.sources if each.name in ("", source.name)]
    size = sum(os.path.getsize(stream.path) for source in sources for stream in source.streams)
    name = each.name or "held-out documents"

    def batches() -> Iterator[dict[str, Any]]:
        text = "%s: %.1f MB in files" if each.name else "%s: a part of %.1f MB in files"
        logger.info(text, name, size / 1e6)
        said = time.monotonic()
        for number, batch in enumerate(each.batches(), start=1):
            yield batch
            if time.monotonic() - said > PROGRESS_SEC:
                said = time.monotonic()
                logger.info("%s: %s read", name, counted(number, "micro-batch"))

    return EvalSet(each.name, batches)


def _warn_if_trained_on(config: RunConfig, plan: Plan, path: Path) -> None:
    """As far as the training data are still where the run read them."""
    with suppress(UserError):
        for doubt in trained_on(resolve_sources(config, path, 1), plan.eval_sources):
            logger.warning("%s", doubt.message)


def _without_sets(saved: SavedModel, given: Sequence[EvalSourceTable], directory: str | Path) -> SavedModel:
    """The model with a config that evaluates its held-out documents alone.

    Raises:
        UserError: it holds out none, or sets are given too.
    """
    if given:
        raise UserError("--held-out", "cannot be combined with --source", "evaluate the two one after the other")
    if not saved.config.eval.holdout_fraction:
        problem = f"the config of {directory} holds out no documents: eval.holdout_fraction is 0"
        raise UserError("--held-out", problem, "name a set with --source NAME=PATH")
    return replace(saved, config=_changed(saved.config, {}, source=[], target=None))


def _missing(config: RunConfig) -> dict[str, UserError]:
    """Why sets of the config cannot be read, by name."""
    found = {}
    for each in config.eval.source:
        try:
            resolve_eval_sources(_changed(config, {}, source=[each]))
        except UserError as error:
            found[each.name] = error
    return found


def _without_missing(
    saved: SavedModel, missing: Mapping[str, UserError], directory: Path, *, is_given: bool
) -> SavedModel:
    """The model with a config without the sets that cannot be read, which a warning names.

    Args:
        is_given: whether there are others to evaluate on.

    Raises:
        UserError: there are not.
    """
    first = next(iter(missing.values()))
    if not is_given:
        problem = f"{first.problem} (a set of the config of {directory}; paths are relative to the working directory)"
        raise UserError(first.key, problem, "go there, or name sets with --source NAME=PATH")
    text = "%s: leaves out %s of its config, whose files cannot be read here: %s"
    logger.warning(text, directory, counted(len(missing), "eval.source"), few([e.message for e in missing.values()]))
    left = [each for each in saved.config.eval.source if each.name not in missing]
    return replace(saved, config=_changed(saved.config, {}, source=left))


def _plan(saved: SavedModel, given: Sequence[EvalSourceTable], directory: Path, batches: int | None) -> Plan:
    new = {each.name for each in given}
    config = _changed(saved.config, {}, source=[each for each in saved.config.eval.source if each.name not in new])
    named = [*config.eval.source, *given]
    if batches is not None:
        named = [each.model_copy(update={"batches": batches}) for each in named]
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
        "metrics": config.metrics.model_copy(update={"profile": 0}),
    }
    path = directory / "config.resolved.toml"
    if not named:
        return make_plan(_changed(config, changed, source=[], every=1, batches=batches or ALL), path, 1)
    # The training data may be elsewhere: the sets take its place. They need not have the modalities of the training data.
    data = config.data.model_copy(update={"source": [each.as_source() for each in named], "mixing": MixingTable()})
    without = _changed(config, {**changed, "data": data}, source=[], target=None, every=0, holdout_fraction=0.0)
    try:
        plan = make_plan(without, path, 1)
    except UserError as error:
        missing = _missing(config)
        if not missing:
            raise UserError(error.key.replace("source ", "--source "), error.problem, error.fix) from None
        return _plan(_without_missing(saved, missing, directory, is_given=bool(given)), given, directory, batches)
    data = data.model_copy(update={"mixing": config.data.mixing})
    config = _changed(plan.config, {"data": data}, source=named, target=config.eval.target, every=1)
    plan = replace(plan, config=config, eval_sources=plan.sources)
    _warn_if_trained_on(saved.config, plan, path)
    return plan


def _changed(config: RunConfig, tables: Mapping[str, object], **eval_keys: object) -> RunConfig:
    return config.model_copy(update={**tables, "eval": config.eval.model_copy(update=eval_keys)})
