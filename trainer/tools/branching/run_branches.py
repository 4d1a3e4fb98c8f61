"""Runs branches: each a process of the program, several at once, and none begins once a stop is requested.

RUN_DIR/cbs/STEP holds what they gave, and is never mixed with results of other settings:

    study.json                  what all branches here have in common
    batch_2-lr_0.001-seed_0/    one branch: a run directory, and its result.json once it is done
    cbs.json, cbs.svg           the answer of the latest call
"""

from __future__ import annotations

import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

from trainer.config.data_tables import MixingOverride, MixingTable
from trainer.config.load import to_toml
from trainer.config.schema import RunConfig, SchedulerTable
from trainer.errors import UserError
from trainer.files import open_plain, read_json, remove_tree, write_file, write_json
from trainer.import_path import PROGRAM
from trainer.tools.branching.study import Branch, Study
from trainer.tools.runs.load import RunRecord, load_run
from trainer.training.checkpointing import checkpoint
from trainer.training.checkpointing.tensor_files import Rows, TensorFiles, pack, unpack, write_tensors
from trainer.training.run_dir import FINISHED, RunDir
from trainer.training.signals import PARENT

STUDY_FILE, RESULT_FILE, ANSWER_FILE, OUTPUT_FILE = "study.json", "result.json", "cbs.json", "output.txt"
LAST_PART = 4  # the last quarter of the steps counts, without held-out documents
LOGGED_ROWS = 20  # of a branch at least, if its training loss is not what counts
NEVER = 10**9  # steps between evaluations: there is one after the last step
EPOCHS, BATCHES = 2**20, 2**32  # farther than any run gets: every order has epochs and batches of its own
POLL_SEC = 0.1
SHOWN_OUTPUT = 300
Table = TypeVar("Table", MixingTable, MixingOverride)


class BranchFailed(Exception):
    """A branch ended by something else than its end, a stop or a loss that is not finite; the message says where to look."""


@dataclass(frozen=True)
class BranchResult:
    """One branch that is done.

    Args:
        loss: at its end; None: the loss or the gradient ceased to be finite.
        tokens: target tokens that it trained on.
        seconds: wall time, without what was lost by interruptions.
    """

    loss: float | None
    tokens: int
    seconds: float


def read_kept(path: Path) -> dict[str, Any] | None:
    """A JSON file that an earlier call left; None if there is none.

    Raises:
        UserError: it is damaged.
    """
    try:
        return read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(str(path), f"cannot be read: {error}", "remove it") from None


def results_of(study: Study) -> dict[Branch, BranchResult]:
    """The results of the branches that are done.

    Raises:
        UserError: one is damaged.
    """
    found = {branch: read_kept(study.directory / branch.name / RESULT_FILE) for branch in study.branches}
    return {branch: BranchResult(**result) for branch, result in found.items() if result is not None}


def slots(num_ranks: int, devices: str | None, parallel: int) -> list[dict[str, str]]:
    """The environment variables of each branch that runs at the same time.

    Raises:
        UserError: the devices cannot be shared out.
    """
    if devices is None:
        threads = max(1, (os.cpu_count() or 1) // (parallel * num_ranks))
        given = os.environ.get("OMP_NUM_THREADS", str(threads))
        return [{"OMP_NUM_THREADS": given} if parallel > 1 else {}] * parallel
    names = [name.strip() for name in devices.split(",")]
    if not all(names) or len(set(names)) < len(names) or len(names) % num_ranks:
        problem = f"{devices!r} does not name different devices in groups of {num_ranks}, the ranks of a branch"
        raise UserError("--devices", problem, "write for example 0,1, or set --nproc")
    groups = [names[at : at + num_ranks] for at in range(0, len(names), num_ranks)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups]


def run_branches(
    study: Study,
    branches: Sequence[Branch],
    *,
    environments: Sequence[Mapping[str, str]],
    should_stop: Callable[[], bool],
    on_result: Callable[[Branch, BranchResult], None],
) -> None:
    """Run branches that are not done yet, as many at once as there are environments, until a stop is requested.

    Args:
        should_stop: asked often, from several threads.
        on_result: called for each branch that is done, from this thread.

    Raises:
        BranchFailed, OSError: one failed; the others were stopped, and can be resumed.
        UserError: the data were exhausted before the end of a branch.
    """
    study.directory.mkdir(parents=True, exist_ok=True)
    write_json(study.directory / STUDY_FILE, study.common)
    free: queue.SimpleQueue[Mapping[str, str]] = queue.SimpleQueue()
    for environment in environments:
        free.put(environment)
    has_failed = threading.Event()

    def stops() -> bool:
        return has_failed.is_set() or should_stop()

    def run_one(branch: Branch) -> BranchResult | None:
        environment = free.get()
        try:
            return None if stops() else _run_branch(study, branch, environment, stops)
        except BaseException:
            has_failed.set()
            raise
        finally:
            free.put(environment)

    with ThreadPoolExecutor(len(environments), thread_name_prefix="branch") as pool:
        futures = {pool.submit(run_one, branch): branch for branch in branches}
        for future in as_completed(futures):
            if (result := future.result()) is not None:
                on_result(futures[future], result)


def _run_branch(
    study: Study, branch: Branch, environment: Mapping[str, str], should_stop: Callable[[], bool]
) -> BranchResult | None:
    """Train a branch, from its own checkpoint if it has one, and evaluate it. None: stopped.

    Raises:
        BranchFailed, OSError, UserError: see `run_branches`.
    """
    started, end = time.monotonic(), study.origin.step + branch.steps
    path = evaluated = study.directory / branch.name

    def train(place: Path, config: RunConfig, start: Path, order: int = 0) -> bool:
        """Run a config to its end in `place`, from its own checkpoint or else from a fork of `start`."""
        if not _checkpoints(place):
            shutil.rmtree(place, ignore_errors=True)
            fork(start, place, order=order, evaluates=place != path)
        elif RunDir(place).status().get("state") == FINISHED:
            return True
        return _run_program(study.origin.num_ranks, config, place, environment, should_stop)

    if not train(path, training_config(study, branch), study.origin.path, branch.seed):
        return None
    run = load_run(path)
    tokens = round(max(run.train.column("tokens_seen")[1], default=0.0)) - study.origin.tokens_seen
    if run.status.get("state") == FINISHED and run.status.get("last_step") != end:
        problem = f"the data were exhausted after {tokens:,} of {study.tokens:,.0f} tokens"
        raise UserError(str(path), problem, "give fewer --tokens, or set data.mixing.repeat in the run")
    loss = None
    if not _has_diverged(run):
        if study.is_held_out and branch.batch.row_share != 1:
            evaluated = path / "evaluation"
            if not train(evaluated, evaluation_config(study, branch), _checkpoints(path)[0]):
                return None
            remove_tree(RunDir(evaluated).checkpoints)
        if study.is_held_out:
            loss = dict(zip(*load_run(evaluated).evals.column("eval_loss"), strict=True)).get(end)
        else:
            loss = last_training_loss(run, last=end, num_steps=branch.steps)
        if loss is None:
            raise BranchFailed(f"{path}: no loss was logged at step {end}; see {evaluated / OUTPUT_FILE}")
    result = BranchResult(loss, tokens, time.monotonic() - started)
    # Before the result: after a kill between the two the branch starts again.
    remove_tree(RunDir(path).checkpoints)
    write_json(path / RESULT_FILE, asdict(result))
    return result


def _checkpoints(run_dir: Path) -> list[Path]:
    return checkpoint.complete_checkpoints(RunDir(run_dir).checkpoints)


def _has_diverged(run: RunRecord) -> bool:
    """Whether the loss or the gradient ceased to be finite, which ended the run."""
    return run.status.get("state") == "failed" and any(event.get("event") == "non_finite" for event in run.events)


def last_training_loss(run: RunRecord, *, last: int, num_steps: int) -> float | None:
    """Mean training loss per token over the last quarter of `num_steps` steps; None if a step is missing."""
    losses, tokens = (dict(zip(*run.train.column(key), strict=True)) for key in ("loss", "tokens_in_step"))
    steps = range(last - num_steps // LAST_PART + 1, last + 1)
    if any(step not in losses for step in steps):
        return None
    return sum(losses[step] * tokens[step] for step in steps) / sum(tokens[step] for step in steps)


def _run_program(
    num_ranks: int, config: RunConfig, run_dir: Path, environment: Mapping[str, str], should_stop: Callable[[], bool]
) -> bool:
    """Train in `run_dir`, from its own checkpoint. False: stopped, which is passed on to the program once.

    Raises:
        BranchFailed: it failed, but for a loss that is not finite.
    """
    config_file, output_file = run_dir / "branch.toml", run_dir / OUTPUT_FILE
    write_file(config_file, to_toml(config))
    command = [sys.executable, str(PROGRAM), "--config", str(config_file), "--run-dir", str(run_dir)]
    command += ["--nproc", str(num_ranks)] if num_ranks > 1 else []
    with open_plain(output_file, "ab") as output:
        # A session of its own: Ctrl-C reaches this process alone.
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment, PARENT: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        is_told = False
        while (code := process.poll()) is None:
            if should_stop() and not is_told:
                process.send_signal(signal.SIGTERM)
                is_told = True
            time.sleep(POLL_SEC)
    status = RunDir(run_dir).status()
    if code == 0 and status.get("state") == FINISHED:
        return True
    if should_stop() or (code == 0 and status.get("state") == "stopped"):
        return False
    if status.get("state") == "failed" and _has_diverged(load_run(run_dir)):
        return True
    said = output_file.read_text(encoding="utf-8", errors="replace").strip()
    reason = status.get("reason") or said[-SHOWN_OUTPUT:] or "no output"
    raise BranchFailed(f"{run_dir}: the branch failed with exit code {code}: {reason}; see {output_file}")


def training_config(study: Study, branch: Branch) -> RunConfig:
    """The config that a branch trains with: the run's at the checkpoint, with another batch and a constant learning rate, and
    without samples, probes, other sinks, stores, and checkpoints but at its end.

    Rows that differ from the run's would change the held-out batches: then it does not evaluate, see `evaluation_config`.
    """
    config, share = study.origin.config, branch.batch.row_share
    evaluates = study.is_held_out and share == 1
    sources = [each.model_copy(update={"mixing": _fewer_rows(each.mixing, share)}) for each in config.data.source]
    batch = {"steps": study.origin.step + branch.steps, "tokens": 0, "micro_batches": branch.batch.micro_batches}
    saving = {"every": 0, "every_minutes": 0.0, "keep_last": 1, "keep_every": 0, "background": False}
    logging = {"log_interval": max(branch.steps // LOGGED_ROWS, 1) if study.is_held_out else 1, "profile": 0}
    wandb = config.metrics.wandb.model_copy(update={"mode": "disabled"})
    changed: dict[str, dict[str, Any]] = {
        "train": {**batch, "on_non_finite": "stop"},
        "optimizer": {"lr": branch.lr},
        "ledger": _ledger(config, branch.batch.factor, branch.seed),
        "eval": {"every": NEVER if evaluates else 0},
        "metrics": {**logging, "stdout": "off", "wandb": wandb, "tensorboard": False},
        "data": {"mixing": _fewer_rows(config.data.mixing, share), "source": sources},
        "gns": {"enabled": False},
        "sample": {"every": 0},
        "checkpoint": {**saving, "remote": None, "resume": "auto"},
    }
    return _changed(config, changed).model_copy(update={"scheduler": SchedulerTable(name="constant")})


def evaluation_config(study: Study, branch: Branch) -> RunConfig:
    """The config that the end of a branch with fewer rows is evaluated with: the run's own held-out batches."""
    data = {"mixing": study.origin.config.data.mixing, "source": study.origin.config.data.source}
    return _changed(training_config(study, branch), {"data": data, "eval": {"every": NEVER}})


def _changed(config: RunConfig, changed: dict[str, dict[str, Any]]) -> RunConfig:
    tables = {table: getattr(config, table).model_copy(update=update) for table, update in changed.items()}
    return config.model_copy(update=tables)


def _ledger(config: RunConfig, factor: Fraction, seed: int) -> dict[str, Any]:
    """What counts steps counts as many tokens as before."""
    table = config.ledger
    changed: dict[str, Any] = {"probe_every": 0}
    if table.stale_threshold:
        changed["stale_threshold"] = max(math.ceil(table.stale_threshold / factor), 1)
    if table.wipe_every:
        changed["wipe_every"] = max(round(table.wipe_every / factor), 1)
    if table.wipe_mode == "none" and seed:
        # The groups that the run had in flight are never read on: they must make room, which "none" would not let them.
        changed["wipe_mode"] = "lru"
    return changed


def _fewer_rows(mixing: Table, share: Fraction) -> Table:
    """The table with that share of the rows, a whole number, which `fit_batch` found."""
    update: dict[str, Any] = {}
    if mixing.batch_size is not None:
        update["batch_size"] = int(mixing.batch_size * share)
    if mixing.batch_size_by_modality is not None:
        update["batch_size_by_modality"] = {name: int(n * share) for name, n in mixing.batch_size_by_modality.items()}
    return mixing.model_copy(update=update)


def fork(source: Path, run_dir: Path, *, order: int = 0, evaluates: bool = False) -> None:
    """Put a checkpoint into the run directory of another run, which continues from it with `--resume auto`.

    Files that stay the same are linked (copied, where the file system has no links).

    Args:
        order: 0: the data continue where they were; see `reordered`.
        evaluates: the other run begins with an evaluation.

    Raises:
        OSError: the disk is full or read-only.
    """
    state = checkpoint.read_state(source)
    checkpoints = RunDir(run_dir).checkpoints
    staging = checkpoint.staging_dir(checkpoints, state["step"])
    staging.mkdir(parents=True)
    ranks = {checkpoint.rank_file(rank) for rank in range(state["world_size"])}
    for path in source.iterdir():
        target = staging / path.name
        if path.name in ranks and order:
            files = TensorFiles([path])
            part = unpack(files.values, files.read)
            values, tensors = pack({**part, "data": reordered(part["data"], order)})
            write_tensors(target, {name: Rows.all_of(tensor) for name, tensor in tensors.items()}, values)
        elif path.name not in (checkpoint.MARKER, checkpoint.STATE_FILE):
            try:
                os.link(path, target)
            except OSError:
                shutil.copyfile(path, target)
    checkpoint.finish(checkpoints, state["step"], {**state, "evaluation_is_due": evaluates})


def reordered(state: Mapping[str, Any], order: int) -> dict[str, Any]:
    """The state of a rank's blend at the beginning of another epoch, with other choices.

    Every choice of blend and mixing is a function of run.seed, the epoch and the batch's index, so epochs and indices that the
    run itself never reaches are an order of their own. run.seed stays: the held-out documents and their order follow from it.
    All ranks must begin the same epoch.
    """
    beginning = {"epoch": order * EPOCHS, "queue_index": 0, "turn": 0, "is_barren": False, "pool": [], "chapters": []}
    sources = []
    for source in state["sources"]:
        batch_index = source["batch_index"] + order * BATCHES
        observed = {**source["observed"], "waits": []}
        sources.append({**source, **beginning, "batch_index": batch_index, "observed": observed})
    batch_index = state["batch_index"] + order * BATCHES
    return {**state, "batch_index": batch_index, "ended": [False] * len(state["ended"]), "sources": sources}
