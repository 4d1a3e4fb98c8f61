"""What comes at the end of a step, once its outcome is known: in order, step by step, on all ranks alike."""

from __future__ import annotations

from contextlib import nullcontext

from trainer.distributed.agree import gather_from_ranks
from trainer.metrics.aggregate import Value
from trainer.metrics.logger import get_logger
from trainer.metrics.rank_reduction import reduce_over_ranks
from trainer.metrics.spikes import SpikeDetector
from trainer.training.evaluation.evaluator import Evaluator
from trainer.training.run_state import Run, TakenStep, Window, unlogged
from trainer.training.step.optimizer import lr_at
from trainer.training.step.step import StepOutcome

logger = get_logger(__name__)

# A rank's own time in the step; the reduction makes the slowest and the fastest rank's of it.
RANK_TIMES = ("time/slowest_rank_sec", "time/fastest_rank_sec")


class NonFiniteError(Exception):
    """The loss or gradient was not finite, and the config says to stop (or skipping did not help)."""


def end_step(run: Run, taken: TakenStep, outcome: StepOutcome) -> str | None:
    """Everything that the step's numbers bring with them. Why the run ends with it, if it does.

    Raises:
        NonFiniteError: as `reject`.
    """
    step, steps = taken.step, run.config.train.steps
    if outcome.is_empty:
        return "the data have ended"
    run.step, run.data_state = step, taken.window.data_state
    for metrics in taken.window.metrics:
        run.pool_metrics.add(metrics)
    if not outcome.is_finite:
        reject(run, taken.window, outcome)
    elif run.spikes is not None:
        watch_for_spikes(run, run.spikes, taken.window, outcome)
    finish_step(run, outcome, is_last=step == steps or outcome.should_stop)
    if outcome.all_saved:
        run.saver.conclude()
    if run.evaluator is not None:
        run.evaluator.is_due = step % run.config.eval.every == 0 or step == steps
    if outcome.should_stop or not at_boundary(run, is_last=step == steps):
        return stopped_by(run)
    return None


def stopped_by(run: Run) -> str:
    """Why the run stops on request."""
    return f"stopped by {run.stop.signal_name or 'a signal on another rank'}"


def finish_step(run: Run, outcome: StepOutcome, *, is_last: bool) -> None:
    """Hand the step to the tracker; on logging steps everything is reduced over ranks, in one collective."""
    step, config = run.step, run.config
    is_logged = run.tracker.will_log(step) or is_last
    extra: dict[str, Value] = {}
    if is_logged:
        run.at("logging", step)
        local: dict[str, Value] = {**run.pool_metrics.drain(), **outcome.details.values()}
        if run.ledger is not None:
            local.update(run.ledger.drain_metrics())
        if run.info.world_size > 1 and run.tracker.step_start is not None:
            local.update(dict.fromkeys(RANK_TIMES, outcome.ready_at - run.tracker.step_start))
        extra.update(reduce_over_ranks(local, run.plan, device=run.device, world_size=run.info.world_size))
        extra.pop("loss", None)  # the outcome has it, from the step's own reduction
        extra["non_finite_steps"] = float(run.skipped_since_log)
        run.skipped_since_log = 0
        if run.gns is not None:
            extra.update(run.gns.drain_metrics())
        if run.saver.last_save_sec is not None:
            extra["checkpoint/save_sec"] = run.saver.last_save_sec
            run.saver.last_save_sec = None
    with run.progress.paused() if is_logged else nullcontext():
        run.tracker.end_step(
            step,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            lr=lr_at(step, steps=config.train.steps, peak=config.optimizer.lr, table=config.scheduler),
            tokens_in_step=outcome.tokens,
            extra=extra,
            force_log=is_last,
        )
    if outcome.is_finite:
        run.skipped_in_a_row = 0
        run.first_loss = outcome.loss if run.first_loss is None else run.first_loss
        run.last_loss = outcome.loss
    run.progress.update(step, outcome.loss)
    if is_logged and run.keep_status is not None:
        run.keep_status(step)


def at_boundary(run: Run, *, is_last: bool) -> bool:
    """Evaluation, sample and checkpoint, where they are due after the step. False: the run is to stop."""
    if run.evaluator is not None and run.evaluator.is_due and not evaluate(run, run.evaluator):
        return False
    if run.sampler is not None and (run.sampler.is_due(run.step) or is_last):
        with run.progress.paused():
            run.sampler.run(run.step)
    if run.saver.is_due(run.step) and not is_last:
        run.at("checkpoint", run.step)
        with run.progress.paused():
            run.saver.save(run.step, run.data_state, unlogged(run), in_background=run.config.checkpoint.background)
    return True


def evaluate(run: Run, evaluator: Evaluator) -> bool:
    """Evaluate and log. False, and nothing logged, if somebody asks to stop meanwhile; a resumed run makes it up."""
    run.at("evaluation", run.step)
    run.last_eval = evaluator.run(lambda: run.stop.requested)
    with run.progress.paused():
        run.tracker.log_eval(run.last_eval, run.step)
    return not evaluator.is_due


def watch_for_spikes(run: Run, spikes: SpikeDetector, window: Window, outcome: StepOutcome) -> None:
    """Write down which batches made the loss leap. The loss is the same on all ranks, and so is what is found."""
    spike = spikes.update(outcome.loss)
    if spike is None:
        return
    metas = gather_from_ranks([micro.meta for micro in window.micros], world_size=run.info.world_size)
    text = "step %d: the loss leapt to %.4f, %.1f standard deviations above its average of %.4f"
    logger.warning(text, run.step, spike.loss, spike.num_sigma, spike.mean)
    if run.events is not None:
        found = {"loss": spike.loss, "mean": spike.mean, "sigma": spike.sigma, "grad_norm": outcome.grad_norm}
        run.events.write({"event": "loss_spike", "global_step": run.step, **found, "batches": metas})


def reject(run: Run, window: Window, outcome: StepOutcome) -> None:
    """A step whose loss or gradient was not finite: say which batches it was, and stop or go on, on all ranks alike.

    Raises:
        NonFiniteError: the policy is to stop, or too many steps in a row were skipped.
    """
    run.skipped_in_a_row += 1
    run.skipped_since_log += 1
    metas = gather_from_ranks([micro.meta for micro in window.micros], world_size=run.info.world_size)
    if run.events is not None:
        run.events.write({"event": "non_finite", "global_step": run.step, "loss": outcome.loss, "batches": metas})
    what = f"step {run.step}: loss {outcome.loss}, squared gradient norm {outcome.grad_norm}"
    is_overflow = run.config.train.precision == "fp16"
    if run.config.train.on_non_finite == "stop" and not is_overflow:
        finish_step(run, outcome, is_last=True)
        raise NonFiniteError(f'{what}; its batches are in events.jsonl; train.on_non_finite = "skip" would go on')
    if run.skipped_in_a_row > run.config.train.max_skips:
        raise NonFiniteError(f"{what}; {run.skipped_in_a_row} steps in a row were skipped (train.max_skips)")
