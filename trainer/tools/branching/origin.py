"""The checkpoint that branches start from, and what was in force there."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import ValidationError

from trainer.config.data_tables import SourceTable
from trainer.config.schema import RunConfig
from trainer.errors import UserError
from trainer.tools.branching.batches import micro_batches_in_force
from trainer.tools.runs.load import RunRecord, load_run
from trainer.tools.trained.saved_model import refuse_code
from trainer.training.checkpointing import checkpoint
from trainer.training.checkpointing.checkpoint import CheckpointError
from trainer.training.run_dir import RunDir
from trainer.training.setup.plan import Plan, make_plan
from trainer.training.setup.sources import Source
from trainer.training.step.schedule import make_schedule
from trainer.untrusted import open_descriptor, read_bytes

RATE_ROWS = 10  # logged rows before the checkpoint, over which the median speed is taken


@dataclass(frozen=True)
class Origin:
    """A checkpoint of a run.

    Args:
        config: the run's at the checkpoint; its sources without includes, and with the weights in force as constants.
        today: micro-batches per step and rank, on `num_ranks` ranks (a fraction if the run had another number).
        num_ranks: of the branches.
        lr: the learning rate in force.
        tokens_seen: target tokens so far, over all ranks.
        tokens_per_step, sequences_per_step: of today's batch, over all ranks: averages so far, and of the latest row.
        marker: digest of the checkpoint's files.
    """

    run: RunRecord
    path: Path
    step: int
    saved: dict[str, Any]
    config: RunConfig
    today: Fraction
    num_ranks: int
    lr: float
    tokens_seen: int
    tokens_per_step: float
    sequences_per_step: float
    marker: str

    @property
    def tokens_per_sec(self) -> float | None:
        """Median speed of the rows before the checkpoint; None if none were logged."""
        steps, values = self.run.train.column("tokens_per_sec")
        before = [value for step, value in zip(steps, values, strict=True) if step <= self.step]
        return median(before[-RATE_ROWS:]) if before else None


@contextmanager
def reserved(run_dir: Path) -> Iterator[None]:
    """Keep the run from being resumed, and its checkpoints from being pruned, while branches start from it.

    Raises:
        UserError: the run is still being trained, or other branches of it are.
    """
    cbs = run_dir / "cbs"
    with _locked(run_dir / ".lock", fcntl.LOCK_SH, flags=os.O_RDONLY) as is_free:
        if not is_free:
            problem = "is still being trained, and may delete its checkpoint meanwhile"
            raise UserError(str(run_dir), problem, "wait for it, or stop it: it can be resumed afterwards")
        try:
            cbs.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(str(cbs), f"cannot be written: {error.strerror}", "branch from a copy of the run") from None
        with _locked(cbs / ".lock", fcntl.LOCK_EX, flags=os.O_RDWR | os.O_CREAT) as is_free:
            if not is_free:
                raise UserError(str(cbs), "is in use by another train cbs", "wait for it, or stop it")
            yield


@contextmanager
def _locked(path: Path, kind: int, *, flags: int) -> Iterator[bool]:
    try:
        descriptor = open_descriptor(path, flags)
    except FileNotFoundError:  # a copy of a run: nobody trains it
        yield True
        return
    except OSError as error:
        raise UserError(str(path), f"cannot be used: {error.strerror}", "remove it, or branch from a copy") from None
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        except OSError:  # a file system without locks
            yield True
        else:
            yield True
    finally:
        os.close(descriptor)


def find_checkpoint(run_dir: Path, at: int | None) -> Path:
    """The run's checkpoint after step `at`; None: the latest.

    Raises:
        UserError: there is none.
    """
    found = checkpoint.complete_checkpoints(RunDir(run_dir).checkpoints)
    if not found:
        fix = "set checkpoint.every (and keep_last or keep_every, so that they stay) in the run, or let it finish"
        raise UserError(str(run_dir), "has no checkpoint to branch from", fix)
    if at is None:
        return found[0]
    for path in found:
        if checkpoint.step_of(path) == at:
            return path
    steps = ", ".join(str(checkpoint.step_of(path)) for path in reversed(found))
    fix = "choose one of them; checkpoint.every, keep_last and keep_every say which a run keeps"
    raise UserError("--at", f"{run_dir} has no checkpoint at step {at}; there are {steps}", fix)


def open_origin(run_dir: Path, path: Path, *, num_ranks: int | None, trust_code: bool = False) -> Origin:
    """Read what is needed of the run and its checkpoint.

    Args:
        trust_code: import the code that its config names.

    Raises:
        UserError: the checkpoint is damaged; the data are gone; the learning rate there is zero; or its config names code.
    """
    try:
        saved = checkpoint.verify(path)
    except CheckpointError as error:
        raise UserError("--at", str(error), "choose another checkpoint") from None
    step, world_size = saved["step"], saved["world_size"]
    config = _config_of(saved, path)
    refuse_code(config, path, trusted=trust_code)
    plan = _plan_of(config, _config_path(saved, run_dir), world_size)
    micro_batches = micro_batches_in_force(config, saved)
    lr = make_schedule(config, plan.length)(saved.get("reached", step)) * config.micro_batches.lr_factor(micro_batches)
    if lr <= 0:
        problem = f"the learning rate at step {step} is 0, at which no branch learns"
        raise UserError("--at", problem, "choose another step")
    batches = checkpoint.read_rank(path, 0)["data"]["batch_index"]
    leaves = [_frozen(source, step, batches) for source in plan.sources]
    run = load_run(run_dir)
    tokens_seen = saved["tracker"]["tokens_seen"]
    return Origin(
        run=run,
        path=path,
        step=step,
        saved=saved,
        config=_with_sources(config, leaves),
        today=Fraction(micro_batches * world_size, num_ranks or world_size),
        num_ranks=num_ranks or world_size,
        lr=lr,
        tokens_seen=tokens_seen,
        # Not over steps, which may have had other numbers of micro-batches.
        tokens_per_step=tokens_seen / batches * micro_batches,
        sequences_per_step=_latest(run, "gns/b_big", step) or float(plan.facts.cells_per_step),
        marker=hashlib.sha256(read_bytes(path / checkpoint.MARKER)).hexdigest(),
    )


def _plan_of(config: RunConfig, config_path: Path, world_size: int) -> Plan:
    try:
        return make_plan(config, config_path, world_size)
    except UserError as error:
        if not error.key.startswith("source "):
            raise
        fix = "put the data back where the run read them, and call train cbs from its working directory"
        raise UserError(error.key, error.problem, fix, where=error.where) from None


def _frozen(source: Source, step: int, batches: int) -> SourceTable:
    """A source under its full name, with the weight that it has after a step and so many batches."""
    weight = source.weight.evaluate(step + 1 if source.weight.unit == "step" else batches)
    return source.table.model_copy(update={"name": source.name, "weight": weight})


def _config_of(saved: dict[str, Any], path: Path) -> RunConfig:
    try:
        return RunConfig.model_validate(saved.get("config"))
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{path} holds a config that this version does not read: {'.'.join(map(str, first['loc']))}"
        raise UserError("--at", problem, "branch with the version that trained it") from None


def _config_path(saved: dict[str, Any], run_dir: Path) -> Path:
    """The file that the run's included files are relative to."""
    command = saved.get("environment", {}).get("command", [])
    named = [
        word.partition("=")[2] or following
        for word, following in zip(command, [*command[1:], ""], strict=True)
        if word in ("--config", "-c") or word.startswith("--config=")
    ]
    return Path(named[-1]) if named else RunDir(run_dir).resolved_config


def _with_sources(config: RunConfig, leaves: Sequence[SourceTable]) -> RunConfig:
    return config.model_copy(update={"data": config.data.model_copy(update={"source": list(leaves)})})


def _latest(run: RunRecord, key: str, step: int) -> float | None:
    """The last value that was logged by `step`."""
    found = [value for at, value in zip(*run.train.column(key), strict=True) if at <= step]
    return found[-1] if found else None
