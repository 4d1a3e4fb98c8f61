"""Branches of a run: short runs from one of its checkpoints, which differ in the batch alone.

RUN_DIR/cbs/STEP holds what they gave, and is never mixed with results of other settings:

    study.json                  what all branches here have in common
    batch_2-lr_0.001-seed_0/    one branch: a run directory, and its result.json once it is done
    cbs.json                    the answer of the latest call
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

from trainer.cli.parts import PARTS
from trainer.config.load import to_toml
from trainer.config.schema import RunConfig, SchedulerTable
from trainer.ending import PARENT
from trainer.errors import UserError
from trainer.files import open_descriptor, open_plain, read_bytes, read_json, remove_tree, write_file, write_json
from trainer.import_path import PROGRAM
from trainer.metrics.run_status import LOCK_NAME, take_lock
from trainer.tools.runs.load import RunRecord, load_run
from trainer.tools.trained.saved_model import config_of, config_path_of, refuse_code
from trainer.training.checkpointing import checkpoint
from trainer.training.checkpointing.tensor_files import (
    CheckpointError,
    Rows,
    TensorFiles,
    pack,
    rank_file,
    read_rank,
    unpack,
    write_tensors,
)
from trainer.training.run_dir import FINISHED, RunDir
from trainer.training.setup.plan import make_plan
from trainer.training.step.optimizer import make_schedule

STUDY_FILE, RESULT_FILE, ANSWER_FILE, OUTPUT_FILE = "study.json", "result.json", "cbs.json", "output.txt"
FACTORS = (Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(2), Fraction(4))
DEFAULT_SHARE = 0.2  # of the tokens so far
LEAST_STEPS = 16  # of the largest batch, by default
STEPS_UNIT = 4  # of a branch's steps, so that the last quarter of its tokens is whole steps
LAST_PART = 4  # the last quarter of the steps counts, without held-out documents
NEVER = 10**9  # steps between evaluations: there is one after the last step
EVAL_BATCHES = 64  # unless the run's config says: the same documents for every batch
EPOCHS, BATCHES = 2**20, 2**32  # farther than any run gets: every order has its own
POLL_SEC = 0.1
SHOWN_OUTPUT = 300


class BranchFailed(Exception):
    """A branch ended otherwise than by its end, a stop or a loss that is not finite."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason  # what the program said last


@dataclass(frozen=True)
class Origin:
    """The checkpoint that branches start from, and what was in force there."""

    run: RunRecord
    path: Path
    step: int
    config: RunConfig  # the run's; its sources without includes, and with the weights in force
    micro_batches: int  # per step and rank; all other numbers are over all ranks
    num_ranks: int
    lr: float
    tokens_seen: int
    tokens_per_step: float  # of today's batch, on average so far
    sequences_per_step: float  # of the latest row
    marker: str  # digest of the checkpoint's files


@contextmanager
def reserved(run_dir: Path) -> Iterator[None]:
    """Keep the run from being resumed, and its checkpoints, while branches start from it.
    Raises UserError: the run, or other branches of it, are being trained."""
    with ExitStack() as held:
        with suppress(FileNotFoundError):  # a copy of a run: nobody trains it
            descriptor = open_descriptor(run_dir / LOCK_NAME, os.O_RDONLY)
            held.callback(os.close, descriptor)
            try:  # shared, or a killed run would look as if it were running
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                problem = "is still being trained, and may delete its checkpoint meanwhile"
                fix = "wait for it, or stop it: it can be resumed afterwards"
                raise UserError(str(run_dir), problem, fix) from None
            except OSError:  # a file system without locks
                pass
        # Two studies would write the same branches, so the directory has a lock of its own.
        (run_dir / "cbs").mkdir(exist_ok=True)
        held.enter_context(take_lock(run_dir / "cbs"))
        yield


def open_origin(run_dir: Path, path: Path, *, trust_code: bool = False) -> Origin:
    """Read what is needed of the run and its checkpoint at `path`.
    `trust_code`: import the code that its config names.
    Raises UserError: a damaged checkpoint, lost data, a rate of 0, or code without trust."""
    try:
        saved = checkpoint.verify(path)
    except CheckpointError as error:
        raise UserError("--at", str(error), "choose another checkpoint") from None
    step, world_size = saved["step"], saved["world_size"]
    tokens_seen = saved["tracker"]["tokens_seen"]
    config = config_of(saved, path)
    refuse_code(config, path, trusted=trust_code)
    config_path = config_path_of(saved.get("environment", {}), run_dir)
    plan = make_plan(config, config_path, world_size, parts=PARTS)
    micro_batches = config.micro_batches.at(saved["step"])
    lr = make_schedule(config, plan.length)(saved.get("reached", step))
    # Branches keep this rate throughout: the end of a schedule would compare nothing.
    if lr <= 0:
        problem = f"the learning rate at step {step} is 0, at which no branch learns"
        raise UserError("--at", problem, "choose another step")
    batches = read_rank(path, 0)["data"]["batch_index"]
    sources, reached = [], {"step": step + 1, "batch": batches}
    for source in plan.sources:  # under its full name, with the weight that it has reached
        weight = source.weight.evaluate(reached[source.weight.unit])
        sources.append(source.table.model_copy(update={"name": source.name, "weight": weight}))
    run, data = load_run(run_dir), config.data.model_copy(update={"source": sources})
    rows = zip(*run.train.column("gns/b_big"), strict=True)
    sizes = [float(plan.facts.cells_per_step), *(size for at, size in rows if at <= step)]
    return Origin(
        run=run,
        path=path,
        step=step,
        config=config.model_copy(update={"data": data}),
        micro_batches=micro_batches,
        num_ranks=world_size,
        lr=lr,
        tokens_seen=tokens_seen,
        # Not over steps, which may have had other numbers of micro-batches.
        tokens_per_step=tokens_seen / batches * micro_batches,
        sequences_per_step=sizes[-1],
        marker=hashlib.sha256(read_bytes(path / checkpoint.MARKER)).hexdigest(),
    )


def base_steps_for(tokens: float, tokens_per_step: float, factors: Iterable[Fraction]) -> int:
    """Steps of today's batch with `tokens` or more in multiples of `STEPS_UNIT` for every factor."""
    unit = math.lcm(*((STEPS_UNIT * factor).numerator for factor in factors))
    return max(math.ceil(tokens / tokens_per_step / unit), 1) * unit


@dataclass(frozen=True)
class Branch:
    """One short run, with `factor` times today's batch and a constant learning rate."""

    factor: Fraction
    micro_batches: int
    lr_scale: float
    lr: float
    # 0 reads on where the checkpoint stopped; any other number is an order of the data of its own.
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"batch_{str(self.factor).replace('/', '_of_')}-lr_{self.lr:.6g}-seed_{self.seed}"


@dataclass(frozen=True)
class Study:
    """Branches from one checkpoint."""

    directory: Path  # `RUN_DIR/cbs/STEP`
    origin: Origin
    base_steps: int  # steps of today's batch whose tokens every branch trains on
    branches: Sequence[Branch]

    @property
    def is_held_out(self) -> bool:
        """Whether the held-out loss decides, not the training loss."""
        return self.origin.config.eval.holdout_fraction > 0

    @property
    def tokens(self) -> float:
        """Expected target tokens of each branch."""
        return self.base_steps * self.origin.tokens_per_step

    @property
    def num_seeds(self) -> int:
        return len({branch.seed for branch in self.branches})

    @property
    def common(self) -> dict[str, Any]:
        """Facts that all results of the directory must share, or their losses do not compare."""
        return {"checkpoint": self.origin.marker, "tokens": round(self.tokens)}

    def results(self) -> dict[Branch, float | None]:
        """The losses of the branches that are done; None: that or the gradient ceased to be finite."""
        found = {}
        for branch in self.branches:
            result = read_kept(self.directory / branch.name / RESULT_FILE)
            if result is not None and "loss" in result:
                found[branch] = result["loss"]
        return found


def read_kept(path: Path) -> dict[str, Any] | None:
    """A JSON file that an earlier call left; None if there is none that can be read."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def make_study(
    origin: Origin,
    directory: Path,
    *,
    factors: Sequence[Fraction] | None,
    lr_grid: Sequence[Fraction],
    num_seeds: int,
    tokens: int | None,
) -> Study:
    """The branches of all factors.

    The learning rate follows the square root of the batch for optimizers that normalize their
    updates (Malladi et al. 2022, arXiv 2205.10287), and the batch itself for SGD (Goyal et al.
    2017, arXiv 1706.02677).

    Args:
        factors: None: those of `FACTORS` that are whole micro-batches.
        tokens: of each branch at least; None: a share of those so far.

    Raises:
        UserError: a factor is no whole number of micro-batches, or there are fewer than two; orders
            of the data are asked for that cannot be made; or the directory has results that would
            not compare.
    """
    own = [source.name for source in origin.config.data.source if source.target is not None]
    if own and num_seeds > 1:
        problem = f"source {own[0]} is a target of your own, whose order only it knows"
        raise UserError("--seeds", problem, "use --seeds 1, without error bars")
    chosen = sorted(set(factors or FACTORS))
    parts = [str(factor) for factor in chosen if (factor * origin.micro_batches).denominator > 1]
    if factors is None:
        chosen = [factor for factor in chosen if str(factor) not in parts]
    elif parts or len(chosen) < 2:
        problem = f"{', '.join(parts or map(str, chosen))} of {origin.micro_batches} micro-batches"
        raise UserError("--factors", problem, "name two or more that give whole ones, such as 1,2,4")
    least = LEAST_STEPS * float(chosen[-1]) * origin.tokens_per_step
    base_tokens = tokens or max(DEFAULT_SHARE * origin.tokens_seen, least)
    base_steps = base_steps_for(base_tokens, origin.tokens_per_step, chosen)
    exponent = 1.0 if origin.config.optimizer.name == "sgd" else 0.5
    branches = []
    for factor in chosen:
        lr, steps = origin.lr * float(factor) ** exponent, (base_steps / factor).numerator
        micro_batches = (factor * origin.micro_batches).numerator
        for seed, scale in product(range(num_seeds), sorted(set(map(float, lr_grid)))):
            branches.append(Branch(factor, micro_batches, scale, lr * scale, seed, steps))
    study = Study(directory, origin, base_steps, branches)
    before = read_kept(directory / STUDY_FILE)
    if before is not None and any(before.get(key) != value for key, value in study.common.items()):
        problem = f"holds branches of {before.get('tokens')} tokens, or of another checkpoint, not of"
        problem += f" {study.common['tokens']}: their losses do not compare"
        raise UserError(str(directory), problem, "give the same options, or move the directory away")
    return study


def parse_numbers(option: str, text: str) -> list[Fraction]:
    """`1/4,0.5,2` as exact numbers. Raises UserError: one is no positive number."""
    numbers = []
    for word in text.split(","):
        with suppress(ValueError, ZeroDivisionError):
            numbers.append(Fraction(word.strip()))
            if numbers[-1] > 0:
                continue
        raise UserError(option, f"{word!r} is no positive number", "separate numbers by commas: 1/2,1,2")
    return numbers


def run_branch(study: Study, branch: Branch, should_stop: Callable[[], bool]) -> bool:
    """Train a branch and keep its loss. False: stopped; it starts from the fork the next time.
    Raises BranchFailed, OSError."""
    path, end = study.directory / branch.name, study.origin.step + branch.steps
    study.directory.mkdir(parents=True, exist_ok=True)
    write_json(study.directory / STUDY_FILE, study.common)
    shutil.rmtree(path, ignore_errors=True)
    fork(study.origin.path, path, order=branch.seed)
    if not run_program(study.origin.num_ranks, training_config(study, branch), path, should_stop):
        return False
    run = load_run(path)
    if run.status.get("state") == FINISHED and run.status.get("last_step") != end:
        raise BranchFailed(f"{path}: the data ended before step {end}; give fewer --tokens")
    loss = None
    if not _has_diverged(run):
        loss = last_training_loss(run, last=end, num_steps=branch.steps)
        if study.is_held_out:
            loss = dict(zip(*run.evals.column("eval_loss"), strict=True)).get(end)
        if loss is None:
            raise BranchFailed(f"{path}: no loss was logged at step {end}; see {path / OUTPUT_FILE}")
    remove_tree(RunDir(path).checkpoints)
    write_json(path / RESULT_FILE, {"loss": loss})
    return True


def _has_diverged(run: RunRecord) -> bool:
    """Whether the loss or the gradient ceased to be finite, which ended the run."""
    has_met = any(event.get("event") == "non_finite" for event in run.events)
    return has_met and run.status.get("state") == "failed"


def last_training_loss(run: RunRecord, *, last: int, num_steps: int) -> float | None:
    """Mean training loss per token over the last quarter of the steps; None if one is missing."""
    losses = dict(zip(*run.train.column("loss"), strict=True))
    tokens = dict(zip(*run.train.column("tokens_in_step"), strict=True))
    steps = range(last - num_steps // LAST_PART + 1, last + 1)
    if any(step not in losses for step in steps):
        return None
    return sum(losses[step] * tokens[step] for step in steps) / sum(tokens[step] for step in steps)


def run_program(
    num_ranks: int,
    config: RunConfig,
    run_dir: Path,
    should_stop: Callable[[], bool],
    *,
    threads: int | None = None,
) -> bool:
    """Train in `run_dir`, from its own checkpoint. False: stopped, as was the program.
    `threads`: of each rank; None: as this process's environment says.
    Raises BranchFailed: it failed, but for a loss that is not finite."""
    config_file, output_file = run_dir / "branch.toml", run_dir / OUTPUT_FILE
    write_file(config_file, to_toml(config))
    command = [sys.executable, str(PROGRAM), "--config", str(config_file)]
    command += ["--run-dir", str(run_dir)]
    if num_ranks > 1:
        command += ["--nproc", str(num_ranks)]
    environment = {**os.environ, PARENT: str(os.getpid())}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    with open_plain(output_file, "ab") as output:
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        # A session of its own: Ctrl-C reaches this process alone.
        process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        is_told = False  # a second signal would kill it before it has saved
        code = process.poll()
        while code is None:
            if should_stop() and not is_told:
                process.send_signal(signal.SIGTERM)
                is_told = True
            time.sleep(POLL_SEC)
            code = process.poll()
    # An exit code alone does not tell a stop from an end, or a diverged loss from a failure.
    status = RunDir(run_dir).status()
    if code == 0 and status.get("state") == FINISHED:
        return True
    if should_stop() or (code == 0 and status.get("state") == "stopped"):
        return False
    if status.get("state") == "failed" and _has_diverged(load_run(run_dir, allow_empty=True)):
        return True
    said = output_file.read_text(encoding="utf-8", errors="replace").strip()
    reason = status.get("reason") or said[-SHOWN_OUTPUT:] or "no output"
    message = f"{run_dir}: the branch failed with exit code {code}: {reason}; see {output_file}"
    raise BranchFailed(message, reason)


def training_config(study: Study, branch: Branch) -> RunConfig:
    """The config of a branch: the run's at the checkpoint, with another batch and a constant
    learning rate, and without samples, other sinks, stores, and checkpoints but at its end."""
    config, end = study.origin.config, study.origin.step + branch.steps
    changed: dict[str, dict[str, Any]] = {
        "train": {"steps": end, "tokens": 0, "micro_batches": branch.micro_batches},
        "optimizer": {"lr": branch.lr},
        "ledger": _ledger(config, branch.factor, branch.seed),
        "eval": {"every": 0, "batches": config.eval.batches or EVAL_BATCHES},
        "gns": {"enabled": False},
        "checkpoint": {"keep_last": 1, "keep_every": 0, "background": False, "resume": "auto"},
        "metrics": {"log_interval": 1},
    }
    changed["train"]["on_non_finite"] = "stop"
    if study.is_held_out:
        changed["eval"]["every"] = NEVER
    constant = {"scheduler": SchedulerTable(name="constant")}
    return with_tables(config, changed).model_copy(update=constant)


def with_tables(config: RunConfig, changed: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """The config with these changes, and without samples, other sinks, stores and checkpoints."""
    wandb = config.metrics.wandb.model_copy(update={"mode": "disabled"})
    quiet: dict[str, dict[str, Any]] = {
        "metrics": {"profile": 0, "stdout": "off", "tensorboard": False, "wandb": wandb},
        "sample": {"every": 0},
        "checkpoint": {"every": 0, "every_minutes": 0.0, "remote": None},
    }
    copies = {}
    for name in quiet.keys() | changed.keys():
        update = {**quiet.get(name, {}), **changed.get(name, {})}
        copies[name] = getattr(config, name).model_copy(update=update)
    return config.model_copy(update=copies)


def _ledger(config: RunConfig, factor: Fraction, seed: int) -> dict[str, Any]:
    """The settings of the ledger that count steps, changed to last as many tokens as before."""
    table = config.ledger
    changed: dict[str, Any] = {}
    for name in ("stale_threshold", "wipe_every"):
        if getattr(table, name):
            changed[name] = math.ceil(getattr(table, name) / factor)
    if table.wipe_mode == "none" and seed:
        # Groups that the run had in flight are never read on, and "none" would keep them.
        changed["wipe_mode"] = "lru"
    return changed


def fork(source: Path, run_dir: Path, *, order: int = 0) -> None:
    """Copy a checkpoint into the directory of another run, which `--resume auto` continues.
    `order`: 0: the data continue where they were; see `reordered`.
    Raises OSError: the disk is full or read-only."""
    state, checkpoints = checkpoint.read_state(source), RunDir(run_dir).checkpoints
    staging = checkpoint.staging_dir(checkpoints, state["step"])
    marks = shutil.ignore_patterns(checkpoint.MARKER, checkpoint.STATE_FILE)
    shutil.copytree(source, staging, ignore=marks)
    if order:
        for path in (staging / rank_file(rank) for rank in range(state["data_shards"])):
            files = TensorFiles([path])
            part = unpack(files.values, files.read)
            values, tensors = pack({**part, "data": reordered(part["data"], order)})
            rows = {name: Rows.all_of(tensor) for name, tensor in tensors.items()}
            write_tensors(path, rows, values)
    checkpoint.finish(checkpoints, state["step"], {**state, "evaluation_is_due": False})


def reordered(state: Mapping[str, Any], order: int) -> dict[str, Any]:
    """The state of a rank's blend at the beginning of another epoch, with other choices.

    Every choice of blend and mixing is a function of run.seed, the epoch and the batch's index, so
    epochs and indices that the run itself never reaches are an order of their own. run.seed stays:
    the held-out documents follow from it. All ranks must begin the same epoch.
    """
    beginning: dict[str, Any] = {"epoch": order * EPOCHS, "index": 0, "turn": 0, "is_ended": False}
    beginning |= {"pool": [], "points": []}
    fresh: dict[str, Any] = {"batch_index": state["batch_index"] + order * BATCHES, "sources": []}
    for source in state["sources"]:
        observed = {**source["observed"], "waits": []}
        number = source["num_picks"] + order * BATCHES
        fresh["sources"].append({**source, **beginning, "num_picks": number, "observed": observed})
    fresh["ended"] = [False for _ in state["ended"]]
    if "lanes" in state:
        fresh["lanes"] = []
    return {**state, **fresh}
