"""The record of a run: its directory, the checkpoint that it continues, and its sinks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from trainer.distributed.env import RankInfo, from_main_rank, raise_on_all_ranks
from trainer.distributed.strategy import num_parameters
from trainer.errors import UserError
from trainer.files import discard
from trainer.metrics.best_effort import Diagnostics
from trainer.metrics.logger import add_log_file, get_logger, remove_log_file
from trainer.metrics.run_status import dead, last_step
from trainer.metrics.sinks import BackgroundSink, EventWriter, JsonlSink, Output, Sink, StdoutSink
from trainer.model.families import with_sizes
from trainer.training import Found, Uploads, checkpoint, need
from trainer.training.plan import Plan, width_of
from trainer.training.restore import changed_settings, check_config
from trainer.training.run_dir import RunDir, choose_run_dir, environment
from trainer.training.train_state import Position, TrainState
from trainer.wording import printable

logger = get_logger(__name__)
MARK_SEC = 60.0  # network file systems may remember for so long what a directory had
Chosen = tuple[RunDir, Found | None, Uploads | None]


def place_run(plan: Plan, given: str | None, info: RankInfo, stack: ExitStack) -> Chosen:
    """The run's directory, the checkpoint to resume from, and rank 0's uploads."""
    placed: Chosen | None = None
    with raise_on_all_ranks(world_size=info.world_size):
        if info.is_main:
            try:  # on rank 0 alone: the ranks might see different directories
                placed = _place_on_main(plan, given, stack)
            except OSError as error:  # a name that is too long, a directory that may not be read
                place = printable(str(error.filename or given or plan.config.run.dir))
                problem = f"cannot be used: {error.strerror}"
                raise UserError(place, problem, "choose another place with --run-dir") from None
    answer: Any = None
    if placed is not None:  # without the uploads, which rank 0 alone holds
        answer = placed[0].path, placed[1]
    path, found = from_main_rank(answer, world_size=info.world_size)
    return placed or (RunDir(path), found, None)


def _place_on_main(plan: Plan, given: str | None, stack: ExitStack) -> Chosen:
    config, uploads = plan.config, None
    resume = effective_resume(config.checkpoint.resume)
    run_dir = choose_run_dir(config, given, resume)
    # Locked before its checkpoints are read: what another run is writing there looks like damage.
    if run_dir.path.exists() and not run_dir.is_new:
        stack.enter_context(run_dir.lock(config.distributed.timeout_sec))
    if config.checkpoint.remote is not None:
        store = need(plan.parts.store, "checkpoint.remote")
        found, uploads = store.find_checkpoint(config, run_dir, resume, partial(_make_ready, run_dir, plan, stack))
    else:
        found = checkpoint.find(run_dir.checkpoints, resume)
    if found is None and resume == "auto":
        reached = last_step(run_dir.path)
        if reached:
            text = "--resume auto: %s was at step %d and has no checkpoint; starting at step 0"
            logger.warning(text, run_dir.path, reached)
        else:
            logger.info("--resume auto: no checkpoint found; starting at step 0")
    elif found is not None:  # before the data are compared, which another tokenizer changes
        with checkpoint.loading(found[0], "config"):
            check_config(found[1]["config"], with_sizes(config, found[1]["config"]))
    return run_dir, found, uploads


def _make_ready(run_dir: RunDir, plan: Plan, stack: ExitStack) -> None:
    """Make and lock the run's directory."""
    if run_dir.owned is None:
        run_dir.claim()
        stack.enter_context(run_dir.lock(plan.config.distributed.timeout_sec))


def effective_resume(configured: str, environ: Mapping[str, str] = os.environ) -> str:
    """`auto` if torchrun has restarted the ranks (--max-restarts), which then always resume."""
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if configured != "off" or restarts == "0":
        return configured
    logger.warning("torchrun restarted the ranks (restart %s): resuming from the newest checkpoint", restarts)
    return "auto"


def begin_record(plan: Plan, info: RankInfo, run_dir: RunDir, stack: ExitStack, step: int) -> None:
    """Lock the directory (`claim` may rename it), set aside work beyond `step`, open the log."""
    mark = ""
    with raise_on_all_ranks(world_size=info.world_size):
        if info.is_main:
            _make_ready(run_dir, plan, stack)
            run_dir.create()
            checkpoint.discard_staging(run_dir.checkpoints)
            for path in checkpoint.set_aside_after(run_dir.checkpoints, step):
                logger.warning("%s belongs to an abandoned branch of this run; moved to %s", path.name, path)
            mark = run_dir.mark()
    run_dir.move_to(Path(from_main_rank(str(run_dir.path), world_size=info.world_size)))
    name = from_main_rank(mark, world_size=info.world_size)
    try:
        with raise_on_all_ranks(world_size=info.world_size):
            # Not longer than the others wait for this rank.
            run_dir.refuse_unshared(name, min(MARK_SEC, plan.config.distributed.timeout_sec / 2))
    finally:
        if info.is_main:
            discard(run_dir.checkpoints / name)
    # After rank 0 has made the directory.
    handler = add_log_file(run_dir.log_file(info.rank))
    stack.callback(remove_log_file, handler)


def open_record(
    plan: Plan,
    info: RankInfo,
    state: TrainState,
    position: Position,
    run_dir: RunDir,
    found: Found | None,
    stack: ExitStack,
    config_path: Path | None,
    stdout: Output | None,
) -> EventWriter | None:
    """Open events.jsonl, sinks and status.json on rank 0. Every rank must call it.

    Returns the writer of events, None on other ranks.
    """
    diagnostics, events = state.tracker.diagnostics, None
    with raise_on_all_ranks(world_size=info.world_size):
        if info.is_main:
            events = EventWriter(run_dir.events)
            stack.callback(diagnostics.best_effort("end of events.jsonl").run, events.close)
            diagnostics.write_with(events.write)
            # Without a checkpoint too: the record of an earlier attempt continues.
            is_restart = run_dir.metrics.exists() or found is not None
            sinks, run_dir.wandb_run_id = make_sinks(plan, run_dir, found, stdout or sys.stdout, diagnostics)
            state.tracker.init_backends(sinks)
            if is_restart:
                previous = _previous(run_dir, position.step)
                state.tracker.log_restart(position.step)
                details = {"checkpoint": None} if found is None else _changed(plan, info, found)
                events.write({"event": "restart", "global_step": position.step, **details, "previous": previous})
            # After the event of changed settings, in case this process is killed between.
            if config_path is not None:
                sizes = {"parameters": num_parameters(state.model), "state_width": width_of(state.model)}
                sizes["tokens_per_step"] = plan.facts.tokens_per_step
                run_dir.describe(plan.config, config_path, info, **sizes)
            run_dir.write_status("running", reason="", step=position.step)
    stack.callback(state.tracker.close)
    return events


def _previous(run_dir: RunDir, step: int) -> dict[str, Any]:
    """The end of the attempt that this one continues after `step`; warns if it died."""
    previous = run_dir.status()
    if previous.get("state") == "running":  # and this process has its lock
        previous = dead(previous, run_dir.path)
    if previous.get("state") == "died":
        logger.warning("%s: %s; continuing from step %d", run_dir.path, previous["reason"], step)
    return {key: previous.get(key) for key in ("state", "reason", "last_step")}


def _changed(plan: Plan, info: RankInfo, found: Found) -> dict[str, Any]:
    """The checkpoint that the run continues and the settings that changed since, for the record."""
    path, saved = found
    versions = saved.get("environment", {})
    changed = changed_settings(saved["config"], versions, plan.config, environment(info))
    named = {key: change._asdict() for key, change in changed.items()}
    return {"checkpoint": path.name, "changed": named}


def make_sinks(
    plan: Plan, run_dir: RunDir, found: Found | None, stdout: Output, diagnostics: Diagnostics
) -> tuple[list[Sink], str | None]:
    """The sinks of a run, and its id in wandb. All but the record and a terminal's have a thread."""

    config, mode = plan.config, plan.config.metrics.stdout
    if mode == "auto":
        mode = "line" if stdout.isatty() else "json"
    # The record first: if it cannot be written, no other sink should report the step.
    sinks: list[Sink] = [JsonlSink(run_dir.metrics)]
    if mode != "off":
        to_stdout: Sink = StdoutSink(mode, stream=stdout)
        if not stdout.isatty():
            to_stdout = BackgroundSink(to_stdout, name="stdout", guard=diagnostics.best_effort("stdout"))
        sinks.append(to_stdout)
    if mode == "json" and sys.stderr.isatty():
        # Payloads go to a program, and a terminal is open: human-readable lines go to stderr.
        sinks.append(StdoutSink("line", stream=sys.stderr))
    services, table = plan.parts.sinks, config.metrics
    if table.tensorboard or table.wandb.mode not in ("auto", "disabled"):
        services = need(services, "metrics.tensorboard" if table.tensorboard else "metrics.wandb.mode")
    if services is None:
        return sinks, None
    further, wandb_run_id = services.to_services(config, run_dir, found, diagnostics)
    return [*sinks, *further], wandb_run_id
