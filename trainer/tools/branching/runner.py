"""Runs branches: each a process of the program, several at once, and none begins once a stop is requested."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from trainer.config.load import to_toml
from trainer.config.schema import RunConfig
from trainer.errors import UserError
from trainer.files import remove_tree, write_file
from trainer.import_path import PROGRAM
from trainer.tools.branching.branch_config import evaluation_config, training_config
from trainer.tools.branching.fork import fork
from trainer.tools.branching.results import (
    BranchResult,
    held_out_loss,
    last_training_loss,
    read_result,
    write_result,
)
from trainer.tools.branching.study import Branch, Study
from trainer.tools.runs.load import RunRecord, load_run
from trainer.training.checkpointing import checkpoint
from trainer.training.run_dir import FINISHED, RunDir
from trainer.training.signals import PARENT
from trainer.untrusted import open_plain

POLL_SEC = 0.1
OUTPUT_FILE = "output.txt"
SHOWN_OUTPUT = 300


class BranchFailed(Exception):
    """A branch ended by something else than its end, a stop or a loss that is not finite; the message says where to look."""


def slots(num_ranks: int, devices: str | None, parallel: int | None) -> list[dict[str, str]]:
    """The environment variables of each branch that runs at the same time.

    Raises:
        UserError: the devices cannot be shared out, or both options are given.
    """
    if devices is None:
        number = parallel or 1
        if number == 1:
            return [{}]
        threads = max(1, (os.cpu_count() or 1) // (number * num_ranks))
        return [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}] * number
    if parallel is not None:
        raise UserError("--parallel", "beside --devices, which says how many run at once", "give one of them")
    names = [name.strip() for name in devices.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise UserError("--devices", f"{devices!r} is no list of different devices", "write 0,1")
    if len(names) % num_ranks:
        problem = f"{len(names)} devices do not make groups of {num_ranks}, which is the number of ranks of a branch"
        raise UserError("--devices", problem, "name a multiple, or set --nproc")
    groups = [names[at : at + num_ranks] for at in range(0, len(names), num_ranks)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups]


def run_branches(
    study: Study,
    branches: Sequence[Branch],
    *,
    environments: Sequence[Mapping[str, str]],
    should_stop: Callable[[], bool],
    on_result: Callable[[Branch, BranchResult], None],
) -> bool:
    """Run branches that are not done yet, as many at once as there are environments. False: stopped before the end.

    Args:
        should_stop: asked often, from several threads.
        on_result: called for each branch that is done, from one thread at a time.

    Raises:
        BranchFailed: one failed; the others were stopped, and can be resumed.
        UserError: the data were exhausted before the end of a branch.
    """
    free: queue.SimpleQueue[Mapping[str, str]] = queue.SimpleQueue()
    for environment in environments:
        free.put(environment)
    has_failed, one_at_a_time = threading.Event(), threading.Lock()

    def stops() -> bool:
        return has_failed.is_set() or should_stop()

    def run_one(branch: Branch) -> bool:
        environment = free.get()
        try:
            result = None if stops() else run_branch(study, branch, environment, stops)
        except OSError as error:
            has_failed.set()
            path = study.directory / branch.name
            raise BranchFailed(f"{path}: cannot be written: {error.strerror} ({error.filename})") from None
        except BaseException:
            has_failed.set()
            raise
        finally:
            free.put(environment)
        if result is None:
            return False
        with one_at_a_time:
            on_result(branch, result)
        return True

    with ThreadPoolExecutor(len(environments), thread_name_prefix="branch") as pool:
        futures = [pool.submit(run_one, branch) for branch in branches]
        wait(futures, return_when=FIRST_EXCEPTION)
    ended = [future.result() for future in futures]  # every one, or a failure after a stop would be lost
    return all(ended)


def run_branch(
    study: Study, branch: Branch, environment: Mapping[str, str], should_stop: Callable[[], bool]
) -> BranchResult | None:
    """Train a branch, from its own checkpoint if it has one, and evaluate it. None: stopped.

    Raises:
        BranchFailed, UserError: see `run_branches`.
    """
    started, end = time.monotonic(), study.origin.step + branch.steps
    path = study.directory / branch.name
    is_over = _train_in(
        study, path, training_config(study, branch), study.origin.path, environment, should_stop, branch.seed
    )
    if not is_over:
        return None
    run = load_run(path)
    tokens = _tokens_seen(run) - study.origin.tokens_seen
    if run.status.get("state") == FINISHED and run.status.get("last_step") != end:
        problem = f"the data were exhausted after {tokens:,} of {study.tokens:,.0f} tokens"
        raise UserError(str(path), problem, "give fewer --tokens, or set data.mixing.repeat in the run")
    loss: float | None = None
    if not _has_diverged(run):
        evaluated = path
        if study.is_held_out and branch.batch.row_share != 1:
            evaluated = path / "evaluation"
            trained = checkpoint.complete_checkpoints(RunDir(path).checkpoints)[0]
            config = evaluation_config(study, branch)
            if not _train_in(study, evaluated, config, trained, environment, should_stop, evaluates=True):
                return None
            remove_tree(RunDir(evaluated).checkpoints)
        if study.is_held_out:
            loss = held_out_loss(evaluated, end)
        else:
            loss = last_training_loss(run, last=end, num_steps=branch.steps)
        if loss is None:
            raise BranchFailed(f"{path}: no loss was logged at step {end}; see {evaluated / OUTPUT_FILE}")
    result = BranchResult(loss, tokens, time.monotonic() - started)
    remove_tree(
        RunDir(path).checkpoints
    )  # before the result: whoever is killed between the two starts the branch again
    write_result(study, branch, result)
    return result


def _train_in(
    study: Study,
    path: Path,
    config: RunConfig,
    start: Path,
    environment: Mapping[str, str],
    should_stop: Callable[[], bool],
    order: int = 0,
    *,
    evaluates: bool = False,
) -> bool:
    """Run a config to its end in `path`, from its own checkpoint or else from a fork of `start`. False: stopped."""
    run_dir = RunDir(path)
    has_own = bool(checkpoint.complete_checkpoints(run_dir.checkpoints))
    if has_own and run_dir.status().get("state") == FINISHED:
        return True
    if not has_own:
        shutil.rmtree(path, ignore_errors=True)
        fork(start, path, order=order, evaluates=evaluates)
    return _run_program(study, config, path, environment, should_stop)


def _tokens_seen(run: RunRecord) -> int:
    return round(max(run.train.column("tokens_seen")[1], default=0.0))


def _has_diverged(run: RunRecord) -> bool:
    """Whether the loss or the gradient ceased to be finite, which ended the run."""
    return run.status.get("state") == "failed" and any(event.get("event") == "non_finite" for event in run.events)


def _run_program(
    study: Study, config: RunConfig, run_dir: Path, environment: Mapping[str, str], should_stop: Callable[[], bool]
) -> bool:
    """Train in `run_dir`, from its own checkpoint. False: stopped.

    Raises:
        BranchFailed: it failed, but for a loss that is not finite.
    """
    config_file = run_dir / "branch.toml"
    write_file(config_file, to_toml(config))
    command = [sys.executable, str(PROGRAM), "--config", str(config_file), "--run-dir", str(run_dir)]
    if study.origin.num_ranks > 1:
        command += ["--nproc", str(study.origin.num_ranks)]
    # Without a launcher's variables.
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    with open_plain(run_dir / OUTPUT_FILE, "ab") as output:
        # A session of its own: Ctrl-C reaches this process alone, which passes it on once.
        process = subprocess.Popen(
            command,
            env={**inherited, **environment, PARENT: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        code = _wait(process, should_stop)
    status: dict[str, Any] = RunDir(run_dir).status()
    if code == 0 and status.get("state") == FINISHED:
        return True
    if should_stop() or (code == 0 and status.get("state") == "stopped"):
        return False
    if status.get("state") == "failed" and _has_diverged(load_run(run_dir)):
        return True
    said = (run_dir / OUTPUT_FILE).read_text(encoding="utf-8", errors="replace").strip()
    reason = status.get("reason") or said[-SHOWN_OUTPUT:] or "no output"
    raise BranchFailed(f"{run_dir}: the branch failed with exit code {code}: {reason}; see {run_dir / OUTPUT_FILE}")


def _wait(process: subprocess.Popen[bytes], should_stop: Callable[[], bool]) -> int:
    """The exit code; a requested stop is passed on once."""
    is_told = False
    while True:
        try:
            return process.wait(POLL_SEC)
        except subprocess.TimeoutExpired:
            if should_stop() and not is_told:
                process.send_signal(signal.SIGTERM)
                is_told = True


def missing(study: Study) -> tuple[list[Branch], dict[str, BranchResult]]:
    """(branches that are not done, results of the others by name)."""
    results = {branch.name: read_result(study, branch) for branch in study.branches}
    done = {name: result for name, result in results.items() if result is not None}
    return [branch for branch in study.branches if branch.name not in done], done
