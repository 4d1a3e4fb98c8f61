"""A run on this rank, from plan to end: process group, state, resume, loop.

A step's numbers are read after the next step is launched, so that the device has work while the
host reads. A stop, an end of the data and a streak of skipped steps therefore take effect one step
later, on all ranks alike. A step that logs, evaluates, samples, saves or may let the batch grow is
read at once, and so is the one after a timed save became due.
"""

from __future__ import annotations

import time
import traceback
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from textwrap import shorten

import torch

from trainer.config.rules import needs_of_cuda
from trainer.config.schema import RunConfig
from trainer.data.tokenizer import HuggingFaceTokenizer
from trainer.distributed.env import (
    GroupError,
    RankInfo,
    gather_from_ranks,
    pick_device,
    process_group,
    rank_info,
)
from trainer.distributed.watchdog import DATA, is_of_a_collective
from trainer.errors import UserError, raise_found
from trainer.metrics.aggregate import Operations
from trainer.metrics.logger import get_logger
from trainer.metrics.sinks import kept_for_payloads
from trainer.training.checkpointing.train_state import SaveError
from trainer.training.extension import CorruptedError
from trainer.training.open_run import Launch, open_run
from trainer.training.plan import Plan, make_plan
from trainer.training.run import (
    NonFiniteError,
    Run,
    StepInFlight,
    agreed_operations,
    evaluate,
    finish,
    is_read_at_once,
    log_change,
    logs,
    next_step,
    stopped_by,
)
from trainer.training.run_dir import FINISHED
from trainer.training.signals import exits_as_errors
from trainer.wording import error_text

logger = get_logger(__name__)
every_rank_logger = get_logger(f"{__name__}.failure", rank_zero_only=False)
EXIT_FAILED = 1


class RunFailed(Exception):
    """An unexpected error, which is logged. Other ranks may hang in a collective: do not wait."""


def train(config: RunConfig, launch: Launch) -> int:
    """Train on this rank, alone or as one of torchrun's.

    Returns 0: the run is done, or stopped with a checkpoint; 1: it failed, or stopped before a
    step. A UserError comes on every rank alike.
    """
    stop = launch.stop
    # `last` waits for uploads, when no rank waits for this one any more.
    with ExitStack() as stack, kept_for_payloads() as stdout, exits_as_errors(), ExitStack() as last:
        if stop.install():  # a process that lives on after the run gets its signals back
            stack.callback(stop.uninstall)
        launch = replace(launch, stdout=stdout)
        info = rank_info()
        device = pick_device(config.train.device, info, key="train.device")
        plan = make_plan(config, launch.config_path or Path(), info.world_size, parts=launch.parts)
        tokenized = _with_tokens(plan, info, launch)
        if tokenized is None:
            logger.warning("stopped while text was tokenized; the same command continues")
            return EXIT_FAILED
        plan = tokenized
        if device.type != "cuda":
            raise_found(needs_of_cuda(config.train))
        timeout = config.distributed.timeout_sec
        group = process_group(info, timeout_sec=timeout, device=device, is_stopped=lambda: stop.requested)
        try:
            with group:
                try:
                    with ExitStack() as of_run, exits_as_errors():
                        run = open_run(plan, launch, info, device, of_run, last)
                        if run is None:
                            return 0
                        return _run_to_end(run)
                except UserError:  # also from closing the run
                    stop.mute()
                    raise
        except RunFailed:
            return EXIT_FAILED
        except (GroupError, RuntimeError) as error:
            if not (isinstance(error, GroupError) or is_of_a_collective(error)):
                raise
            text = "rank %d: another rank has ended or does not answer, see its messages (here: %s)"
            every_rank_logger.error(text, info.rank, shorten(str(error), 150))
            return EXIT_FAILED


def _with_tokens(plan: Plan, info: RankInfo, launch: Launch) -> Plan | None:
    """The plan, with tokenized copies of text if encoding is slow; None: stopped meanwhile."""
    if not isinstance(plan.tokenizer, HuggingFaceTokenizer):
        return plan
    tokenized = plan.part("tokenized text")
    if tokenized is None:
        logger.info("text is tokenized again whenever it is read: %s", plan.parts.problem)
        return plan
    try:
        made: Plan = tokenized.tokenize_once(plan, info, lambda: launch.stop.requested)
    except tokenized.Stopped:
        return None
    return made


def _run_to_end(run: Run) -> int:
    """Run the loop, and record the outcome in status.json."""
    state, reason, code, run_dir = "failed", "", EXIT_FAILED, run.run_dir
    try:
        with exits_as_errors(lambda: f" after step {run.position.step}"):
            reason = run_loop(run)
        run.watchdog.at("end", run.position.step, may_wait=True)
        state = "stopped" if reason.startswith("stopped") else FINISHED
        # Without a checkpoint, a script must not take a stopped run for done.
        if state == FINISHED or run.saver.last_saved >= 0:
            code = 0
    except (CorruptedError, NonFiniteError, SaveError) as error:
        reason = str(error)
        logger.error("%s", reason)
    except OSError as error:
        reason = error_text(error)
        if error.filename is not None:
            reason = f"{error.filename}: {error.strerror}"
        run.watchdog.tell(reason)
        every_rank_logger.error("%s", reason)
        raise RunFailed from error
    except UserError as error:
        reason = error.message
        # Before this rank leaves: the others would report a lost connection instead.
        run.watchdog.tell(reason)
        raise
    except Exception as error:
        reason = _report_failure(run, error)
        raise RunFailed from error
    finally:
        run.watchdog.at("end", run.position.step, may_wait=True)
        if run.info.is_main:
            # Before the sinks are closed, which may take time. The record is written at every step.
            run_dir.leave_status(run.info, state, reason=reason, step=run.position.step)
            run.tracker.close()  # flushes the sinks
            summarize = partial(run.plan.call, "summary")
            run.diagnostics.best_effort("summary").run(summarize, run, run_dir, state, reason)
        for line in run.diagnostics.summary():
            every_rank_logger.warning("%s", line)
    return code


def _report_failure(run: Run, error: Exception) -> str:
    """Log an unexpected error. Returns why the run failed, which may be another rank's error."""
    own, reason = error_text(error), run.watchdog.explain(error)
    frames = "".join(traceback.format_exception(error)).rstrip()
    if reason == own:
        every_rank_logger.error("%s", frames)
    else:
        # Another rank is the cause: where this one stood goes to its own log only.
        every_rank_logger.error("%s", reason)
        run.watchdog.write(frames)
    if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in own:
        run.diagnostics.best_effort("out of memory").run(run.plan.call, "out of memory", run)
    return reason


def run_loop(run: Run) -> str:
    """Train until the last step, the end of the data or a request to stop. Returns the reason."""
    position, operations = run.position, agreed_operations(run)
    reason: str | None = None
    in_flight: StepInFlight | None = None
    # A stop during startup: the first step may take minutes (compilation), and nothing is lost yet.
    is_stopped = any(gather_from_ranks(run.stop.requested, world_size=run.info.world_size))
    if is_stopped or (position.evaluation_is_due and not evaluate(run)):
        reason = stopped_by(run)
    while reason is None and (position.last_step is None or position.step < position.last_step):
        reason, in_flight = take_step(run, in_flight, operations)
        run.extensions.call("step_launched", position.step + (in_flight is not None))
    if run.saver.last_saved != position.step and position.step > 0:
        run.watchdog.at("checkpoint", position.step, may_wait=True)
        run.saver.save(position)
    return reason or "all steps are done"


def take_step(
    run: Run, previous: StepInFlight | None, operations: Operations
) -> tuple[str | None, StepInFlight | None]:
    """Launch a step and finish the one before. Returns a stop reason, and the step in flight."""
    step, reason = 1 + (run.position.step if previous is None else previous.step), None
    batch = next_step(run, step, previous)
    at_once = is_read_at_once(run, step)
    if at_once or run.saver.must_save:
        # Finished before this step starts, so that the times of this step are its own.
        reason, previous = finish(run, previous, operations), None
        if reason is not None:
            return reason, None
    run.tracker.start_step()  # waiting for data is part of a step's time
    run.watchdog.at(DATA, step)
    with run.tracker.section("data"):
        window = run.reading.window(batch.num_micros)
    if window is None:
        return "data exhausted", None
    if len(run.micro_batches.points) > 1:
        log_change(run, step)
    run.watchdog.at("forward and backward", step)
    with run.tracker.section("forward_backward"):
        run.train_step.accumulate(step, window, is_logged=logs(run, step))
    run.watchdog.at("optimizer", step)
    with run.tracker.section("optimizer"):
        launched = run.train_step.launch(
            lr=batch.lr,
            stop=run.stop.requested,
            save_due=time.monotonic() >= run.saver.due_time,
            exhausted=all(map(attrgetter("is_filler"), window)),
        )
    current = StepInFlight(step, batch.reached, window, launched, batch.lr)
    if previous is not None:
        reason = finish(run, previous, operations)
    if at_once or reason is not None:
        # The stop takes effect now; the step that is in flight has happened and counts.
        return finish(run, current, operations) or reason, None
    return None, current
