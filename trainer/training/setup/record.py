"""Where a run is recorded: its directory, the checkpoint that it continues, its sinks, and what is said at the start."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.config.load import flatten
from trainer.config.rules import why_no_noise_scale
from trainer.config.schema import RunConfig
from trainer.data.fingerprint import DataChange
from trainer.distributed.env import RankInfo, from_main_rank, raise_on_all_ranks
from trainer.distributed.shards import layout_of
from trainer.distributed.strategy import num_parameters
from trainer.errors import UserError
from trainer.files import is_url
from trainer.metrics.best_effort import Diagnostics
from trainer.metrics.logger import add_log_file, get_logger, remove_log_file
from trainer.metrics.run_status import dead
from trainer.metrics.services import CLOSE_SEC, WandbSink, resolve_mode
from trainer.metrics.sinks import BackgroundSink, EventWriter, JsonlSink, Output, Sink, StdoutSink, resolve_stdout_mode
from trainer.training.checkpointing import checkpoint
from trainer.training.checkpointing.restore import Change, changed_settings
from trainer.training.checkpointing.train_state import Position, TrainState
from trainer.training.run_dir import RunDir, choose_run_dir, environment
from trainer.training.setup.plan import Plan, width_of
from trainer.training.setup.sources import alignment
from trainer.training.step.schedule import Length, make_schedule
from trainer.wording import counted, printable

logger = get_logger(__name__)
RATE_MARGIN = 0.01
Found = tuple[Path, dict[str, Any]]
"""A checkpoint and its state.json."""


def place_run(plan: Plan, given: str | None, info: RankInfo, stack: ExitStack) -> tuple[RunDir, Found | None, Any]:
    """The run's directory, the checkpoint to resume from, and (on rank 0) the store of its checkpoints: rank 0 decides.

    A directory that exists is locked first: what another run is writing there looks like damage.
    """
    config = plan.config
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": plan.place(config.run.dir)})})
    answer: tuple[str, tuple[str, dict[str, Any]] | None] | None = None
    run_dir: RunDir | None = None
    claimed: Any = None
    with raise_on_all_ranks(world_size=info.world_size):
        if info.is_main:
            resume = effective_resume(plan.resume)
            try:
                run_dir = choose_run_dir(config, given, resume)
                if run_dir.path.exists() and not run_dir.is_new:
                    stack.enter_context(run_dir.lock())
                if config.checkpoint.remote is None and not is_url(resume):
                    found = checkpoint.find(run_dir.checkpoints, resume)
                else:
                    key = "checkpoint.resume" if config.checkpoint.remote is None else "checkpoint.remote"
                    find_checkpoint = plan.parts.need("checkpoints in a store", key)
                    ready = partial(_make_ready, run_dir, stack)
                    found, claimed = find_checkpoint(config, run_dir, resume, ready)
            except OSError as error:  # a name that is too long, a directory that may not be read
                place = printable(str(error.filename or given or config.run.dir))
                shown = f"{place[:80]}{'...' if len(place) > 80 else ''}"
                problem, fix = f"cannot be used: {error.strerror}", "choose another place with --run-dir"
                raise UserError(shown, problem, fix) from None
            if found is None and resume == "auto":
                reached = run_dir.status().get("last_step")
                if isinstance(reached, int) and reached > 0:
                    text = "--resume auto: %s was at step %d and has no checkpoint; starting again at step 0"
                    logger.warning(text, run_dir.path, reached)
                else:
                    logger.info("--resume auto: no checkpoint found; starting at step 0")
            answer = (str(run_dir.path), (str(found[0]), found[1]) if found else None)
    answer = from_main_rank(answer, world_size=info.world_size)
    assert answer is not None
    path, found_path = answer
    return run_dir or RunDir(Path(path)), (Path(found_path[0]), found_path[1]) if found_path else None, claimed


def _make_ready(run_dir: RunDir, stack: ExitStack) -> None:
    """Make and lock the run's directory."""
    if not run_dir.is_locked:
        run_dir.claim()
        stack.enter_context(run_dir.lock())


def effective_resume(configured: str, environ: Mapping[str, str] = os.environ) -> str:
    """`auto` when torchrun has restarted the ranks (--max-restarts): they resume, whatever the config says."""
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if configured != "off" or restarts == "0":
        return configured
    logger.warning("torchrun restarted the ranks (restart %s): resuming from the newest checkpoint", restarts)
    return "auto"


def begin_record(info: RankInfo, run_dir: RunDir, stack: ExitStack, step: int) -> RunDir:
    """Lock the run's directory, clear what is left of work beyond `step`, and open this rank's log in it.

    Returns:
        The directory: its name may have changed, see `claim`.
    """
    with raise_on_all_ranks(world_size=info.world_size):
        if info.is_main:
            _make_ready(run_dir, stack)
            run_dir.create()
            checkpoint.discard_staging(run_dir.checkpoints)
            for path in checkpoint.set_aside_after(run_dir.checkpoints, step):
                logger.warning("%s belongs to an abandoned branch of this run; moved to %s", path.name, path)
    run_dir = RunDir(Path(from_main_rank(str(run_dir.path), world_size=info.world_size)))
    handler = add_log_file(run_dir.log_file(info.rank))
    stack.callback(remove_log_file, handler)
    return run_dir


def open_record(
    plan: Plan,
    info: RankInfo,
    state: TrainState,
    position: Position,
    run_dir: RunDir,
    found: Found | None,
    data: DataChange,
    stack: ExitStack,
    config_path: Path | None,
    stdout: Output | None,
) -> tuple[EventWriter | None, str | None]:
    """Open events.jsonl, sinks and status.json on rank 0. Every rank must call it.

    Args:
        data: what differs from the checkpoint's.

    Returns:
        The writer of events and the id of the run in wandb; None on other ranks.
    """
    diagnostics, events, wandb_run_id = state.tracker.diagnostics, None, None
    with raise_on_all_ranks(world_size=info.world_size):
        if info.is_main:
            events = EventWriter(run_dir.events)
            stack.callback(diagnostics.best_effort("end of events.jsonl").run, events.close)
            diagnostics.on_event = events.write
            saved = found[1] if found is not None else {}
            # Without a checkpoint too: the record of an earlier attempt is continued, and its steps are repeated.
            is_restart = run_dir.metrics.exists() or found is not None
            sinks = make_sinks(plan, run_dir, stdout or sys.stdout, saved.get("wandb_run_id"), diagnostics)
            state.tracker.init_backends(sinks)
            if is_restart:
                previous = _previous(run_dir, position.step)
                state.tracker.log_restart(position.step)
                details = {"checkpoint": None} if found is None else _changed(plan, info, found, data)
                events.write({"event": "restart", "global_step": position.step, **details, "previous": previous})
            # After what says that the settings changed: the record is true, wherever this process is killed.
            if config_path is not None:
                sizes = {"parameters": num_parameters(state.model), "state_width": width_of(state.model)}
                run_dir.describe(plan.config, config_path, info, **sizes, tokens_per_step=plan.facts.tokens_per_step)
            within = [sink.sink for sink in sinks if isinstance(sink, BackgroundSink)]
            wandb_run_id = next((sink.run_id for sink in within if isinstance(sink, WandbSink)), None)
            run_dir.write_status("running", reason="", step=position.step, wandb_run_id=wandb_run_id)
    stack.callback(state.tracker.close)
    return events, wandb_run_id


def _previous(run_dir: RunDir, step: int) -> dict[str, Any]:
    """How the attempt that this one continues after `step` has ended; said if it died."""
    previous = run_dir.status()
    if previous.get("state") == "running":  # and this process has its lock
        previous = dead(previous, run_dir.path)
    if previous.get("state") == "died":
        logger.warning("%s: %s; continuing from step %d", run_dir.path, previous["reason"], step)
    return {key: previous.get(key) for key in ("state", "reason", "last_step")}


def _changed(plan: Plan, info: RankInfo, found: Found, data: DataChange) -> dict[str, Any]:
    """The checkpoint that the run continues, and which settings changed since, for the record."""
    path, saved = found
    changed = changed_settings(saved["config"], saved.get("environment", {}), plan.config, environment(info))
    if data:
        changed["data files"] = Change("as saved", str(data))
    return {"checkpoint": path.name, "changed": {key: change._asdict() for key, change in changed.items()}}


def make_sinks(
    plan: Plan, run_dir: RunDir, stdout: Output, wandb_run_id: str | None, diagnostics: Diagnostics
) -> list[Sink]:
    """The record first: if it cannot be written, nothing else should say that a step was.

    Every sink but the record has a queue and a thread, except those that write to a terminal.
    """

    def in_background(sink: Sink, name: str, close_sec: float = 5.0) -> Sink:
        return BackgroundSink(sink, name=name, guard=diagnostics.best_effort(name), close_sec=close_sec)

    config = plan.config
    mode = resolve_stdout_mode(config.metrics.stdout, stdout)
    sinks: list[Sink] = [JsonlSink(run_dir.metrics)]
    if mode != "off":
        to_stdout = StdoutSink(mode, stream=stdout)
        sinks.append(to_stdout if stdout.isatty() else in_background(to_stdout, "stdout"))
    if mode == "json" and sys.stderr.isatty():
        # Somebody watches, and the payload goes to a program: the line for people goes to stderr.
        sinks.append(StdoutSink("line", stream=sys.stderr))
    table = config.metrics.wandb
    if (wandb_mode := table.mode) == "auto":
        wandb_mode, why = resolve_mode()
        logger.info("wandb: %s, since %s", wandb_mode, why)
    if wandb_mode != "disabled":
        wandb = WandbSink(
            mode=wandb_mode,
            project=table.project,
            run_dir=run_dir.path,
            run_id=wandb_run_id,
            config=config.model_dump(mode="json"),
            on_event=diagnostics.on_event,
        )
        sinks.append(in_background(wandb, "wandb", CLOSE_SEC))
    if config.metrics.tensorboard:
        make = plan.parts.need("tensorboard", "metrics.tensorboard")
        sink = make(run_dir.path / "tensorboard", flatten(config.model_dump(mode="json")))
        sinks.append(in_background(sink, "tensorboard"))
    return sinks


def announce(plan: Plan, state: TrainState, device: torch.device, run_dir: RunDir) -> None:
    """Log what is trained, on what, where it is written, and how the ranks share it."""
    facts, model = plan.facts, state.model
    size, ranks = f"{num_parameters(model):,} parameters", counted(facts.world_size, "rank")
    tokens = f", up to {facts.tokens_per_step:,} tokens per step" if facts.tokens_per_step else ""
    precision, runs = plan.config.train.precision, getattr(model, "implementation", None)
    by = f"; {runs(device, precision)}" if runs is not None else ""
    text = "%s: %s, %s on %s in %s%s, run directory %s%s"
    logger.info(text, plan.config.run.name, size, ranks, device, precision, tokens, run_dir.path, by)
    if align := alignment(plan, model):
        logger.info("full rows, align = %s", align)
    if facts.world_size > 1:
        layout = layout_of(model.parameters())
        held = "each rank holds the whole model" if layout is None else str(layout)
        logger.info("%s: %s", plan.config.distributed.strategy, held)
    reason = why_no_noise_scale(plan.config, facts.world_size)
    if plan.config.gns.enabled and reason is not None:
        logger.info("the gradient noise scale is not measured: %s", reason)


def say_rate_change(saved: Mapping[str, Any], plan: Plan, position: Position) -> None:
    """Warn where a resume makes the learning rate jump: a schedule over another length, or another schedule.

    Args:
        saved: the config of the checkpoint.
    """
    try:
        before = RunConfig.model_validate(saved)
        length = Length.of(before, plan.facts.tokens_per_micro)
        former = make_schedule(before, length)
    except (ValueError, UserError):  # of an earlier version; what differs is said anyway
        return
    if length.is_in_tokens != plan.length.is_in_tokens or not position.step:
        return
    then, now = (
        schedule(min(position.reached, each.total))
        for schedule, each in ((former, length), (make_schedule(plan.config, plan.length), plan.length))
    )
    if abs(now - then) > RATE_MARGIN * max(abs(then), abs(now)):
        text = "the learning rate jumps: at step %d it was %.3g, by this config it is %.3g (the schedule spans the whole run)"
        logger.warning(text, position.step, then, now)
