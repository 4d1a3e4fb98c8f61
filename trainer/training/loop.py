"""The step loop: from the first step to the last.

A step is queued, and settled when its numbers are there. Where something has to be known at once (it logs, evaluates, saves) it
is settled before the next one begins; otherwise after the next one's forward and backward are queued, so that the device has
work while the host reads. Whatever comes of a step late comes as if it had been settled at once: the later window is taken
back, and run again if the run goes on.
"""

from __future__ import annotations

from trainer.distributed.agree import gather_from_ranks
from trainer.errors import UserError
from trainer.training.run_state import Run, TakenStep, Window, count_on, unlogged
from trainer.training.step.microbatch import masked_copy, split
from trainer.training.step.optimizer import lr_at
from trainer.training.step_end import end_step, evaluate, stopped_by


def run_loop(run: Run) -> str:
    """Train to the last step, or until the data end or somebody asks to stop. Returns why it ended."""
    reason: str | None = None
    count_on(run)
    if any(gather_from_ranks(run.stop.requested, world_size=run.info.world_size)):
        # Asked while it started up: the first step may take minutes (compilation), and there is nothing to lose yet.
        run.progress.close()
        return stopped_by(run)
    if run.evaluator is not None and run.evaluator.is_due and not evaluate(run, run.evaluator):
        return stopped_by(run)
    while reason is None and run.step < run.config.train.steps:
        reason = take_step(run)
    run.progress.close()
    if run.saver.last_saved != run.step and run.step > 0:
        run.saver.save(run.step, run.data_state, unlogged(run), in_background=False)
    return reason or "all steps are done"


def take_step(run: Run) -> str | None:
    """Queue the next step, with its parts timed, and settle what has to be settled. Why the run ends, if it does."""
    step = run.step + (1 if run.unsettled is None else 2)
    is_at_once = is_settled_at_once(run, step)
    if is_at_once and run.unsettled is not None:
        # So that the step's times are its own.
        reason, _ = settle_late(run, run.unsettled)
        if reason is not None:
            return reason
    run.tracker.start_step()
    run.at("data", step)
    with run.tracker.section("data"):
        taken = TakenStep(step, next_window(run))
    forward_backward(run, taken)
    if run.unsettled is not None:
        reason, is_undone = settle_late(run, run.unsettled)
        if reason is not None:
            return reason
        if is_undone:
            forward_backward(run, taken)
    config = run.config
    lr = lr_at(step, steps=config.train.steps, peak=config.optimizer.lr, table=config.scheduler)
    run.at("optimizer", step)
    if is_at_once:
        with run.tracker.section("optimizer"):
            outcome = run.train_step.conclude(lr=lr, stop=run.stop.requested, saved=run.saver.is_written)
        return end_step(run, taken, outcome)
    with run.tracker.section("optimizer"):
        run.train_step.queue(lr=lr, stop=run.stop.requested, saved=run.saver.is_written)
    run.tracker.hold_step()
    run.unsettled = taken
    return None


def is_settled_at_once(run: Run, step: int) -> bool:
    """Whether something has to be known right after the step; the same on all ranks."""
    config = run.config
    intervals = (config.eval.every, config.checkpoint.every, config.sample.every)
    return (
        not run.train_step.settles_late
        or run.tracker.will_log(step)
        or step == config.train.steps
        or any(every and step % every == 0 for every in intervals)
    )


def forward_backward(run: Run, taken: TakenStep) -> None:
    """Queue the step's forward and backward."""
    step = taken.step
    will_log = run.tracker.will_log(step) or step == run.config.train.steps
    run.at("forward and backward", step)
    with run.tracker.section("forward_backward"):
        run.train_step.forward_backward(step, taken.window.micros, will_log=will_log)


def settle_late(run: Run, taken: TakenStep) -> tuple[str | None, bool]:
    """Settle the step before. Why the run ends with it, if it does; and whether the window after it was taken back."""
    run.unsettled = None
    run.at("optimizer", taken.step)
    with run.tracker.section("optimizer"):
        outcome = run.train_step.settle()
    return end_step(run, taken, outcome), outcome.is_later_undone


def next_window(run: Run) -> Window:
    """This rank's micro-batches of one step.

    When this rank's data have ended it goes on with masked rows: the others still need it in every collective, and the
    run ends at the first step in which no rank has a token.
    """
    micros, metrics = [], []
    state = run.data_state if run.unsettled is None else run.unsettled.window.data_state
    for _ in range(run.config.train.micro_batches):
        loaded = next(run.loader, None)
        if loaded is not None:
            batch, state = dict(loaded.batch), loaded.state
            metrics.append(loaded.metrics)
            run.previous_batch = batch
        elif run.previous_batch is not None:
            batch = masked_copy(run.previous_batch)
        else:
            raise UserError("data", f"rank {run.info.rank} has nothing to read", "use fewer ranks, or more documents")
        micros.append(split(batch, run.accepted))
    return Window(micros, state, metrics)
