"""A whole run on this rank: plan, process group, resume, loop, end. `train()` is what the console program calls."""

from __future__ import annotations

import errno
import os
import shutil
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from trainer.config.schema import RunConfig
from trainer.distributed.agree import from_main_rank, raise_on_all_ranks
from trainer.distributed.env import RankInfo, pick_backend, pick_device, process_group, rank_info
from trainer.distributed.watchdog import start_watchdog
from trainer.errors import UserError
from trainer.metrics.logger import add_log_file, get_logger
from trainer.metrics.sinks.events import EventWriter
from trainer.training.checkpointing import checkpoint
from trainer.training.checkpointing.resume_checks import check_drift
from trainer.training.checkpointing.saver import SaveError
from trainer.training.loop import run_loop
from trainer.training.messages import announce, conclude
from trainer.training.run_dir import FINISHED, RunDir, StatusKeeper, choose_run_dir
from trainer.training.run_state import Run
from trainer.training.setup.build import Parts, build_parts, build_run
from trainer.training.setup.plan import Plan, begin_from_weights, make_plan
from trainer.training.setup.probe import what_breaks_it
from trainer.training.setup.sinks import make_sinks, wandb_id
from trainer.training.signals import StopRequest, say_stopping
from trainer.training.step_end import NonFiniteError

logger = get_logger(__name__)
every_rank_logger = get_logger(f"{__name__}.failure", rank_zero_only=False)
EXIT_FAILED = 1
VerdictMaker = Callable[[Path], Callable[[], str]]


class RunFailed(Exception):
    """Something unexpected ended this rank's run; it is logged. Other ranks may be in a collective: nobody waits for them."""


def train(
    config: RunConfig,
    config_path: Path,
    given_run_dir: str | None,
    *,
    stop: StopRequest | None = None,
    verdict_of: VerdictMaker | None = None,
) -> int:
    """Train on this rank, alone or as one of torchrun's.

    Args:
        config_path: where the config was read from.
        given_run_dir: what --run-dir says.
        stop: tells when somebody asks the run to stop, its signals being handled already; None: they are from now on.
        verdict_of: a run's directory -> what gives the words on its health that stand beside the progress bar.

    Returns:
        0 when the run is done or was stopped with a checkpoint, 1 when it failed.

    Raises:
        UserError: on every rank alike, for what a user can mend.
    """
    if stop is None:
        stop = StopRequest(say_stopping)
        stop.install()
    info = rank_info()
    device = pick_device(config.train.device, info)
    plan = make_plan(config, config_path, info.world_size)
    backend = pick_backend(config.distributed.backend, device)
    timeout = config.distributed.timeout_sec
    try:
        with process_group(info, backend=backend, timeout_sec=timeout, device=device):
            return _train_in_group(plan, config_path, given_run_dir, info, device, stop, verdict_of)
    except RunFailed:
        return EXIT_FAILED


def _train_in_group(
    plan: Plan,
    config_path: Path,
    given: str | None,
    info: RankInfo,
    device: torch.device,
    stop: StopRequest,
    verdict_of: VerdictMaker | None,
) -> int:
    config = plan.config
    run_dir, found = _place(config, given, info)
    with ExitStack() as stack:
        with raise_on_all_ranks(world_size=info.world_size):
            parts = build_parts(plan, info, device, run_dir)
            stack.callback(parts.close)
            position = _restore(parts, found, config)
        if position.step >= config.train.steps and not position.state.get("evaluation_is_due"):
            said = "%s: the run is at step %d, train.steps = %d: nothing is left to do; set it higher to go on"
            logger.info(said, run_dir.path, position.step, config.train.steps)
            return 0
        with raise_on_all_ranks(world_size=info.world_size):
            if info.is_main:
                run_dir.create()
                stack.enter_context(run_dir.lock())
                run_dir.describe(config, config_path, info)
                checkpoint.discard_staging(run_dir.checkpoints)
                for path in checkpoint.set_aside_after(run_dir.checkpoints, position.step):
                    logger.warning("%s is of another branch of this run now; moved to %s", path.name, path)
        handler = add_log_file(run_dir.log_file(info.rank))
        stack.callback(handler.close)
        verdict = verdict_of(run_dir.path) if verdict_of is not None else None
        run = _open_run(parts, position, run_dir, stop, verdict, stack)
        run.watchdog = start_watchdog(
            info,
            timeout_sec=config.distributed.timeout_sec,
            log=run_dir.log_file(info.rank),
            on_end=lambda reason: _leave_status(run, run_dir, "failed", reason),
        )
        if run.watchdog is not None:
            stack.callback(run.watchdog.close)
        return _run_to_end(run, run_dir, plan)


def _place(config: RunConfig, given: str | None, info: RankInfo) -> tuple[RunDir, tuple[Path, dict[str, Any]] | None]:
    """The run's directory and the checkpoint to go on from: rank 0 decides."""
    answer: tuple[str, tuple[str, dict[str, Any]] | None] | None = None
    with raise_on_all_ranks(world_size=info.world_size):
        if info.is_main:
            resume = effective_resume(config.checkpoint.resume)
            run_dir = choose_run_dir(config, given, resume)
            found = checkpoint.find(run_dir.checkpoints, resume)
            answer = (str(run_dir.path), (str(found[0]), found[1]) if found else None)
    answer = from_main_rank(answer, world_size=info.world_size)
    assert answer is not None
    path, found_path = answer
    return RunDir(Path(path)), (Path(found_path[0]), found_path[1]) if found_path else None


def effective_resume(configured: str, environ: Mapping[str, str] = os.environ) -> str:
    """`auto` when torchrun has restarted the ranks (--max-restarts): they go on where they were, whatever the config says."""
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if configured != "off" or restarts == "0":
        return configured
    logger.warning("torchrun restarted the ranks (restart %s): resuming from the newest checkpoint", restarts)
    return "auto"


class Position:
    """Where a run goes on: a new one at step 0."""

    def __init__(self, state: dict[str, Any] | None = None, data_state: Any = None, source: Path | None = None) -> None:
        self.state = state or {}
        self.step = int(self.state.get("step", 0))
        self.data_state = data_state
        self.source = source


def _restore(parts: Parts, found: tuple[Path, dict[str, Any]] | None, config: RunConfig) -> Position:
    """Load the checkpoint into the parts; a new run's position without one."""
    if found is None:
        if effective_resume(config.checkpoint.resume) == "auto":
            logger.info("--resume auto: no checkpoint to go on from; starting at step 0")
        begin_from_weights(parts.plan, parts.model)
        return Position(data_state=parts.dataset.state_dict())
    path, state = found
    check_drift(state["config"], config)
    data = parts.saver.restore(path, int(state["world_size"]))
    parts.dataset.load_state_dict(data)
    parts.tracker.load_state_dict(state["tracker"])
    if parts.gns is not None and state["gns"] is not None:
        parts.gns.load_state_dict(state["gns"])
    # Absent in checkpoints that were made before spikes were looked for.
    if parts.spikes is not None and state.get("spikes") is not None:
        parts.spikes.load_state_dict(state["spikes"])
    if parts.evaluator is not None:
        parts.evaluator.is_due = bool(state.get("evaluation_is_due"))
    parts.saver.last_saved = int(state["step"])
    logger.info("going on after step %d from %s", state["step"], path)
    if state["world_size"] != parts.info.world_size:
        text = "it was saved on %d rank(s), now there are %d: a step has another number of tokens"
        logger.warning(text, state["world_size"], parts.info.world_size)
    return Position(state, parts.dataset.state_dict(), path)


def _open_run(
    parts: Parts,
    position: Position,
    run_dir: RunDir,
    stop: StopRequest,
    verdict: Callable[[], str] | None,
    stack: ExitStack,
) -> Run:
    """Open the sinks (rank 0) and start reading."""
    events: EventWriter | None = None
    if parts.info.is_main:
        events = EventWriter(run_dir.events)
        stack.callback(events.close)
        parts.events.writer = events
        config = parts.plan.config
        has_rows = run_dir.metrics.exists()
        sinks = make_sinks(config, run_dir, wandb_run_id=position.state.get("wandb_run_id"), on_event=events.write)
        parts.wandb_run_id = wandb_id(sinks)
        parts.tracker.init_backends(sinks)
        if has_rows or position.source is not None:
            # Also without a checkpoint: the record of an earlier attempt goes on, and its steps come again.
            source = position.source.name if position.source is not None else None
            parts.tracker.log_restart(position.step, checkpoint=source)
            events.write({"event": "restart", "global_step": position.step, "checkpoint": source})
        run_dir.write_status("running", reason="", step=position.step, wandb_run_id=parts.wandb_run_id)
        announce(parts, run_dir)
    stack.callback(parts.tracker.close)
    run = build_run(
        parts, step=position.step, data_state=position.data_state, events=events, stop=stop, verdict=verdict
    )
    if parts.info.is_main:
        run.keep_status = StatusKeeper(run_dir, parts.wandb_run_id)
    stack.callback(run.loader.close)
    stack.callback(run.progress.close)
    return run


def _run_to_end(run: Run, run_dir: RunDir, plan: Plan) -> int:
    """Run the loop, and leave status.json with what became of it."""
    state, reason, code = "failed", "", EXIT_FAILED
    try:
        reason = run_loop(run)
        state = "stopped" if reason.startswith("stopped") else FINISHED
        run.saver.close()
        code = 0
    except (NonFiniteError, SaveError) as error:
        reason = str(error)
        logger.error("%s", reason)
    except OSError as error:
        reason = _told(error, run_dir)
        if run.watchdog is not None:
            run.watchdog.tell(reason)
        every_rank_logger.error("%s", reason)
        raise RunFailed from error
    except UserError as error:
        reason = error.message
        if run.watchdog is not None:
            run.watchdog.tell(reason)
        raise
    except Exception as error:
        own = f"{type(error).__name__}: {error}"
        reason = run.watchdog.explain(error) if run.watchdog is not None else own
        # Once, into this rank's log too, and without the frames of the command line above it. Where another rank is why,
        # where this one stood is in its log alone.
        frames = "".join(traceback.format_exception(error)).rstrip()
        every_rank_logger.error("%s", frames if reason == own else reason)
        if run.watchdog is not None and reason != own:
            run.watchdog.write(frames)
        if run.step == 0 and reason == own and (broken := what_breaks_it(plan)):
            every_rank_logger.error("%s", broken)
        raise RunFailed from error
    finally:
        run.progress.close()
        if run.info.is_main:
            # The sinks first: who sees the state `done` may read the record.
            run.tracker.close()
            _leave_status(run, run_dir, state, reason)
            conclude(run, run_dir, state, reason)
    return code


def _told(error: OSError, run_dir: RunDir) -> str:
    """What a file that cannot be written or read means for a person."""
    if error.filename is None:
        return f"{type(error).__name__}: {error}"
    text = f"{error.filename}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        text += f" ({shutil.disk_usage(run_dir.path).free / 1e6:.1f} MB are free)"
    return text


def _leave_status(run: Run, run_dir: RunDir, state: str, reason: str) -> None:
    """Write the state that the run ends in (rank 0)."""
    if not run.info.is_main:
        return
    try:
        run_dir.write_status(state, reason=reason, step=run.step, wandb_run_id=run_dir.status().get("wandb_run_id"))
    except OSError as error:
        # The reason itself is said on stderr: what ended the run must not be hidden behind a second failure.
        logger.error("%s cannot be written: %s", run_dir.status_file, error.strerror)
