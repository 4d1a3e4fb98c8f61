"""The step loop: from the first step to the last.

A step's numbers are read after the next step is launched, so that the device has work while the host reads: a stop, an end of
the data and a streak of skipped steps take effect one step later, on all ranks alike. A step that logs, evaluates, samples,
saves or may let the batch grow is read at once; so is the step after that at which the time to save has come. A single rank
that is asked to stop does not read for another step: nobody else has to agree, and the data may never come.
"""

from __future__ import annotations

import time
from operator import attrgetter

from trainer.distributed.env import gather_from_ranks
from trainer.distributed.watchdog import DATA
from trainer.metrics.aggregate import Operations
from trainer.metrics.logger import get_logger
from trainer.training.around_step import (
    agreed_operations,
    evaluate,
    exchange,
    finish,
    interruptible,
    is_read_at_once,
    logs,
    next_step,
    say_start,
    stopped_by,
)
from trainer.training.run import Run, StepInFlight
from trainer.training.signals import StopNow

logger = get_logger(__name__)


def run_loop(run: Run) -> str:
    """Train until the last step, until the data are exhausted or until somebody asks to stop. Returns the reason."""
    position, operations = run.position, agreed_operations(run)
    reason: str | None = None
    in_flight: StepInFlight | None = None
    if any(gather_from_ranks(run.stop.requested, world_size=run.info.world_size)):
        # Asked for during startup: the first step may take minutes (compilation), and there is nothing to lose yet.
        reason = stopped_by(run)
    elif position.evaluation_is_due and not evaluate(run):
        reason = stopped_by(run)
    run.moments["other preparations"] = time.monotonic()
    while reason is None and (position.last_step is None or position.step < position.last_step):
        reason, in_flight = take_step(run, in_flight, operations)
        if run.moments:
            say_start(run.moments)
        run.extensions.call("step_launched", position.step + (in_flight is not None))
    exchange(run)
    if run.saver.last_saved != position.step and position.step > 0:
        run.watchdog.at("checkpoint", position.step, may_wait=True)
        run.saver.save(position, in_background=False)
    return reason or "all steps are done"


def take_step(
    run: Run, previous: StepInFlight | None, operations: Operations
) -> tuple[str | None, StepInFlight | None]:
    """Launch the next step and finish the one before it. Returns the stop reason, or None, and the step that is in flight."""
    step, saver = run.position.step + (1 if previous is None else 2), run.saver
    batch = next_step(run, step, previous)
    at_once = is_read_at_once(run, step)
    if (at_once or saver.must_save) and previous is not None:
        # Before the step starts, so that its times are its own.
        reason, previous = finish(run, previous, operations), None
        if reason is not None:
            return reason, None
    run.tracker.start_step()
    run.watchdog.at(DATA, step)
    try:
        with run.tracker.section("data"), interruptible(run):
            window = run.reading.window(batch.num_micros)
    except StopNow:
        return (None if previous is None else finish(run, previous, operations)) or stopped_by(run), None
    if window is None:
        return "data exhausted", None
    if (change := batch.change) is not None:
        text = "step %d: %d micro-batches instead of %d: %s"
        logger.info(text, step, batch.num_micros, change["from"], change["reason"])
        run.event(change)
    run.watchdog.at("forward and backward", step)
    with run.tracker.section("forward_backward"):
        run.train_step.accumulate(step, window, is_logged=logs(run, step))
    run.watchdog.at("optimizer", step)
    with run.tracker.section("optimizer"):
        launched = run.train_step.launch(
            lr=batch.lr,
            stop=run.stop.requested,
            saved=saver.pending is not None and saver.is_written(),
            save_due=time.monotonic() >= saver.due_time,
            exchange=run.extensions.asks,
            exhausted=all(map(attrgetter("is_filler"), window)),
        )
    current = StepInFlight(step, batch.reached, window, launched, batch.lr)
    reason = None if previous is None else finish(run, previous, operations)
    if at_once or reason is not None:
        # The stop takes effect now; the step that is in flight has happened and counts.
        return finish(run, current, operations) or reason, None
    return None, current
