"""Runs branches: each a process of the program, and none begins once a stop is requested.

RUN_DIR/cbs/STEP holds what they gave, and is never mixed with results of other settings:

    study.json                  what all branches here have in common
    batch_2-lr_0.001-seed_0/    one branch: a run directory, and its result.json once it is done
    cbs.json                    the answer of the latest call
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from trainer.config.load import to_toml
from trainer.config.schema import RunConfig, SchedulerTable
from trainer.ending import PARENT
from trainer.files import open_plain, read_json, remove_tree, write_file, write_json
from trainer.import_path import PROGRAM
from trainer.tools.branching.study import Branch, Study
from trainer.tools.runs.load import RunRecord, load_run
from trainer.training.checkpointing import checkpoint
from trainer.training.checkpointing.tensor_files import Rows, TensorFiles, pack, rank_file, unpack, write_tensors
from trainer.training.run_dir import FINISHED, RunDir

STUDY_FILE, RESULT_FILE, ANSWER_FILE, OUTPUT_FILE = "study.json", "result.json", "cbs.json", "output.txt"
LAST_PART = 4  # the last quarter of the steps counts, without held-out documents
LOGGED_ROWS = 20  # of a branch at least, if its training loss is not what counts
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
class BranchResult:
    """One branch that is done."""

    loss: float | None  # at the end; None: that or the gradient ceased to be finite
    tokens: int  # targets that it trained on
    seconds: float  # without what was lost by interruptions


def read_kept(path: Path) -> dict[str, Any] | None:
    """A JSON file that an earlier call left; None if there is none that can be read."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def results_of(study: Study) -> dict[Branch, BranchResult]:
    """The results of the branches that are done."""
    found = {}
    for branch in study.branches:
        result = read_kept(study.directory / branch.name / RESULT_FILE)
        if result is not None:
            found[branch] = BranchResult(**result)
    return found


def run_branches(
    study: Study,
    branches: Sequence[Branch],
    *,
    should_stop: Callable[[], bool],
    on_result: Callable[[Branch, BranchResult], None],
) -> None:
    """Run branches that are not done yet, one after the other, until a stop is requested.
    `should_stop`: asked often. `on_result`: called for each branch that is done.
    Raises BranchFailed, OSError: one failed; those before it are done."""
    study.directory.mkdir(parents=True, exist_ok=True)
    write_json(study.directory / STUDY_FILE, study.common)
    for branch in branches:
        result = None if should_stop() else _run_branch(study, branch, should_stop)
        if result is None:
            return
        on_result(branch, result)


def _run_branch(study: Study, branch: Branch, should_stop: Callable[[], bool]) -> BranchResult | None:
    """Train a branch, from its checkpoint if it has one, and evaluate it. None: stopped."""
    # A branch without a checkpoint was killed before it trained: it starts from the fork again.
    started, end = time.monotonic(), study.origin.step + branch.steps
    path = study.directory / branch.name
    if not checkpoint.complete_checkpoints(RunDir(path).checkpoints):
        shutil.rmtree(path, ignore_errors=True)
        fork(study.origin.path, path, order=branch.seed)
    if RunDir(path).status().get("state") != FINISHED:
        config = training_config(study, branch)
        if not run_program(study.origin.num_ranks, config, path, should_stop):
            return None
    run = load_run(path)
    tokens = round(max(run.train.column("tokens_seen")[1], default=0.0)) - study.origin.tokens_seen
    if run.status.get("state") == FINISHED and run.status.get("last_step") != end:
        ended = f"the data ended after {tokens:,} of {study.tokens:,.0f} tokens"
        raise BranchFailed(f"{path}: {ended}; give fewer --tokens")
    loss = None
    if not _has_diverged(run):
        if study.is_held_out:
            loss = dict(zip(*run.evals.column("eval_loss"), strict=True)).get(end)
        else:
            loss = last_training_loss(run, last=end, num_steps=branch.steps)
        if loss is None:
            raise BranchFailed(f"{path}: no loss was logged at step {end}; see {path / OUTPUT_FILE}")
    result = BranchResult(loss, tokens, time.monotonic() - started)
    # Before the result: after a kill between the two the branch starts again.
    remove_tree(RunDir(path).checkpoints)
    write_json(path / RESULT_FILE, asdict(result))
    return result


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
    learning rate, and without samples, probes, other sinks, stores, and checkpoints but at its
    end."""
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
    # Without held-out documents the training loss of every step decides.
    if study.is_held_out:
        changed["eval"]["every"] = NEVER
        changed["metrics"]["log_interval"] = max(branch.steps // LOGGED_ROWS, 1)
    constant = {"scheduler": SchedulerTable(name="constant")}
    return with_tables(config, changed).model_copy(update=constant)


def with_tables(config: RunConfig, changed: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """The config with these changes, and without samples, other sinks, stores and checkpoints."""
    wandb = config.metrics.wandb.model_copy(update={"mode": "disabled"})
    quiet: dict[str, dict[str, Any]] = {
        "metrics": {"profile": 0, "stdout": "off", "tensorboard": False, "wandb": wandb},
        "sample": {"every": 0},
        "alert": {"command": [], "url": None},
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
    changed: dict[str, Any] = {"probe_every": 0}
    for name in ("stale_threshold", "wipe_every"):
        if getattr(table, name):
            changed[name] = math.ceil(getattr(table, name) / factor)
    if table.wipe_mode == "none" and seed:
        # Groups that the run had in flight are never read on, and "none" would keep them.
        changed["wipe_mode"] = "lru"
    return changed


def fork(source: Path, run_dir: Path, *, order: int = 0) -> None:
    """Put a checkpoint into the directory of another run, which `--resume auto` continues.

    Files that stay the same are linked (copied, where the file system has no links).

    Args:
        order: 0: the data continue where they were; see `reordered`.

    Raises:
        OSError: the disk is full or read-only.
    """
    state = checkpoint.read_state(source)
    checkpoints = RunDir(run_dir).checkpoints
    staging = checkpoint.staging_dir(checkpoints, state["step"])
    staging.mkdir(parents=True)
    ranks = {rank_file(rank) for rank in range(state["data_shards"])}
    for path in source.iterdir():
        target = staging / path.name
        if path.name in ranks and order:
            files = TensorFiles([path])
            part = unpack(files.values, files.read)
            values, tensors = pack({**part, "data": reordered(part["data"], order)})
            rows = {name: Rows.all_of(tensor) for name, tensor in tensors.items()}
            write_tensors(target, rows, values)
        elif path.name not in (checkpoint.MARKER, checkpoint.STATE_FILE):
            try:
                os.link(path, target)
            except OSError:
                shutil.copyfile(path, target)
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
