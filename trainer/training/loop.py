"""The step loop: from the first step to the last.

A step's numbers are read after the next step is launched, so that the device has work while the host reads: a stop, an end of
the data and a streak of skipped steps take effect one step later, on all ranks alike. A step that logs, evaluates, samples,
saves or may let the batch grow is read at once; so is the step after that at which the time to save has come. A single rank
that is asked to stop does not read for another step: nobody else has to agree, and the data may never come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.distributed.agree import gather_from_ranks
from trainer.distributed.watchdog import DATA
from trainer.metrics.logger import get_logger
from trainer.training.finish import evaluate, finish, report_spikes, stopped_by
from trainer.training.run import Run, StepInFlight
from trainer.training.signals import StopNow
from trainer.training.step.batch_growth import BatchGrowth

logger = get_logger(__name__)


def run_loop(run: Run) -> str:
    """Train until the last step, until the data are exhausted or until somebody asks to stop. Returns the reason."""
    position = run.position
    reason: str | None = None
    in_flight: StepInFlight | None = None
    if any(gather_from_ranks(run.stop.requested, world_size=run.info.world_size)):
        # Stop requested during startup: the first step may take minutes (compilation), and there is nothing to lose yet.
        reason = stopped_by(run)
    elif position.evaluation_is_due and not evaluate(run):
        reason = stopped_by(run)
    while reason is None and (position.last_step is None or position.step < position.last_step):
        reason, in_flight = take_step(run, in_flight)
        if run.profile is not None:
            run.profile.step()
    report_spikes(run)
    if run.saver.last_saved != position.step and position.step > 0:
        run.at("checkpoint", position.step, may_wait=True)
        with run.paused():
            run.saver.save(position, in_background=False)
    return reason or "all steps are done"


def take_step(run: Run, previous: StepInFlight | None) -> tuple[str | None, StepInFlight | None]:
    """Launch the next step and finish the one before it. Returns the stop reason, or None, and the step that is in flight."""
    step = run.position.step + (1 if previous is None else 2)
    tokens_before = run.position.tokens_before if previous is None else run.position.tokens  # through step - 2
    num_micros, num_before, change = run.num_micros, run.num_micros * (step > 1), None
    if run.growth is not None:
        num_micros, num_before, change = micro_batches_of(run, run.growth, step, previous, tokens_before)
    reached = run.length.reached_by(step, tokens_before, num_before + num_micros)
    lr = run.schedule(reached) * (1.0 if run.growth is None else run.growth.lr_factor(num_micros))
    if reached >= run.length.total:
        run.position.last_step = step
    at_once = is_read_at_once(run, step)
    if (at_once or run.saver.must_save) and previous is not None:
        # Before the step starts, so that its times are its own.
        reason, previous = finish(run, previous), None
        if reason is not None:
            return reason, None
    run.tracker.start_step()
    run.at(DATA, step)
    try:
        with run.tracker.section("data"), run.reading():
            window = run.windows.read(step, num_micros)
    except StopNow:
        return (None if previous is None else finish(run, previous)) or stopped_by(run), None
    if window is None:
        return "data exhausted", None
    if change is not None:
        logger.info("step %d: %d micro-batches instead of %d: %s", step, num_micros, num_before, change["reason"])
        run.event(change)
    coincidence = None
    if run.coincidence_at is not None and run.splits(step):
        coincidence = run.coincidence_at(step, (step - 1) * num_micros)
    run.at("forward and backward", step)
    with run.tracker.section("forward_backward"):
        run.train_step.accumulate(
            step,
            window.micros,
            details=run.details if run.logs(step) else None,
            probe=run.probe if run.probes(step) else None,
            coincidence=coincidence,
        )
    run.at("optimizer", step)
    with run.tracker.section("optimizer"):
        launched = run.train_step.launch(
            lr=lr,
            stop=run.stop.requested,
            saved=run.saver.is_written,
            save_due=run.saver.time_is_up,
            spiked=bool(run.position.found_spikes),
            exhausted=window.is_exhausted,
        )
    current = StepInFlight(step, reached, window, launched, lr)
    reason = None if previous is None else finish(run, previous)
    if at_once or reason is not None:
        # The stop takes effect now; the step that is in flight has happened and counts.
        return finish(run, current) or reason, None
    return None, current


def micro_batches_of(
    run: Run, growth: BatchGrowth, step: int, previous: StepInFlight | None, tokens_before: int
) -> tuple[int, int, Mapping[str, Any] | None]:
    """The micro-batches of a step, those of the step before it (0 if there is none), and the event of a change between them.

    The same on all ranks.

    Args:
        tokens_before: tokens through step - 2.
    """
    position = run.position
    before = position.micro_batches if previous is None else len(previous.window.micros)
    num_micros, change = growth.of_step(
        step, before=before, changed_at=position.micro_batches_since, tokens_before=tokens_before
    )
    return num_micros, before or (num_micros if step > 1 else 0), change


def is_read_at_once(run: Run, step: int) -> bool:
    """Whether the step's numbers are needed right after it; the same on all ranks."""
    config = run.config
    intervals = (config.eval.every, config.checkpoint.every, config.sample.every)
    is_asked = run.growth is not None and run.growth.decides_after(step)
    return run.logs(step) or is_asked or any(every and step % every == 0 for every in intervals)
