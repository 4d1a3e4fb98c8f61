"""The step loop, from the first step to the last.

A step's numbers are read after the next step is launched, so that the device has work while the
host reads. A stop, an end of the data and a streak of skipped steps therefore take effect one step
later, on all ranks alike. A step that logs, evaluates, samples, saves or may let the batch grow is
read at once, and so is the one after a timed save became due. A single rank that is asked to stop
does not read another batch: no other rank has to agree, and data may never come.
"""

from __future__ import annotations

import time
from operator import attrgetter

from trainer.distributed.env import gather_from_ranks
from trainer.distributed.watchdog import DATA
from trainer.metrics.aggregate import Operations
from trainer.training.around_step import (
    agreed_operations,
    evaluate,
    finish,
    interruptible,
    is_read_at_once,
    log_change,
    logs,
    next_step,
    stopped_by,
)
from trainer.training.run import Run, StepInFlight
from trainer.training.signals import StopNow


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
    run.extensions.exchange()  # weights that differ between ranks are not saved
    if run.saver.last_saved != position.step and position.step > 0:
        run.watchdog.at("checkpoint", position.step, may_wait=True)
        run.saver.save(position, in_background=False)
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
    try:
        with run.tracker.section("data"), interruptible(run):
            window = run.reading.window(batch.num_micros)
    except StopNow:
        return finish(run, previous, operations) or stopped_by(run), None
    if window is None:
        return "data exhausted", None
    if batch.change is not None:
        log_change(run, step, batch.change)
    run.watchdog.at("forward and backward", step)
    with run.tracker.section("forward_backward"):
        run.train_step.accumulate(step, window, is_logged=logs(run, step))
    run.watchdog.at("optimizer", step)
    with run.tracker.section("optimizer"):
        launched = run.train_step.launch(
            lr=batch.lr,
            stop=run.stop.requested,
            saved=run.saver.pending is not None and run.saver.is_written(),
            save_due=time.monotonic() >= run.saver.due_time,
            exchange=run.extensions.asks,
            exhausted=all(map(attrgetter("is_filler"), window)),
        )
    current = StepInFlight(step, batch.reached, window, launched, batch.lr)
    if previous is not None:
        reason = finish(run, previous, operations)
    if at_once or reason is not None:
        # The stop takes effect now; the step that is in flight has happened and counts.
        return finish(run, current, operations) or reason, None
    return None, current
