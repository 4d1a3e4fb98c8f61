"""The end of a step, once its numbers have arrived: the same on all ranks, step by step."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

from trainer.distributed.agree import gather_from_ranks
from trainer.metrics.aggregate import Value
from trainer.metrics.logger import get_logger
from trainer.metrics.rank_reduction import Reporter, reduce_over_ranks
from trainer.metrics.spikes import Spike
from trainer.training.run import Run, StepInFlight
from trainer.training.step.optimizer import lr_at
from trainer.training.step.step import StepOutcome
from trainer.training.step.window import Window

logger = get_logger(__name__)


class NonFiniteError(Exception):
    """The loss or gradient was not finite, and the config says to stop (or skipping did not help)."""


def finish(run: Run, taken: StepInFlight) -> str | None:
    """Read the step's numbers and do what they call for. Returns the stop reason, or None.

    Raises:
        NonFiniteError: see `reject`.
    """
    outcome = run.train_step.finish(taken.launched)
    if outcome.is_empty:
        return "data exhausted"
    position, step, steps = run.position, taken.step, run.config.train.steps
    position.step, position.data_state = step, taken.window.data_state
    for metrics in taken.window.metrics:
        position.unlogged.add(metrics)
    if outcome.is_finite:
        position.skipped_in_a_row = 0
        position.first_loss = outcome.loss if position.first_loss is None else position.first_loss
        position.last_loss = outcome.loss
        if run.spikes is not None and (spike := run.spikes.update(outcome.loss)) is not None:
            position.unlogged.add({"loss_spike": 1.0})
            report_spike(run, spike, taken.window, outcome)
    else:
        reject(run, taken, outcome)
    end_step(run, taken, outcome, run.reporters if run.logs(step) else ())
    if outcome.all_saved:
        run.saver.publish_pending(position)
    every = run.config.eval.every
    position.evaluation_is_due = run.evaluator is not None and (step % every == 0 or step == steps)
    if outcome.should_stop or not at_boundary(run, is_last=step == steps):
        return stopped_by(run)
    return None


def stopped_by(run: Run) -> str:
    """The reason of a run that stops on request."""
    return f"stopped by {run.stop.signal_name or 'a signal on another rank'}"


def end_step(run: Run, taken: StepInFlight, outcome: StepOutcome, reporters: Iterable[Reporter]) -> None:
    """Hand the step to the tracker, which logs it if there are reporters: reduced over ranks, in one collective."""
    config, step, extra = run.config, taken.step, {}
    if reporters:
        run.at("logging", step)
        unlogged = run.position.unlogged
        unlogged.add({"non_finite_steps": 0.0})  # reported as 0, not left out
        if run.spikes is not None:
            unlogged.add({"loss_spike": 0.0})
        if (grad_scale := run.train_step.grad_scale) is not None:
            unlogged.add({"grad_scale": grad_scale})
        if run.info.world_size > 1:
            ready_after = taken.launched.ready_at - run.tracker.step_start
            unlogged.add({"time/slowest_rank_sec": ready_after, "time/fastest_rank_sec": ready_after})
        local: dict[str, Value] = {}
        for reporter in reporters:
            local.update(reporter.drain_metrics())
        extra = reduce_over_ranks(local, run.metric_keys, device=run.device, world_size=run.info.world_size)
        extra.pop("loss", None)  # the outcome has it, from the step's own reduction
    with run.progress.paused() if reporters else nullcontext():
        run.tracker.end_step(
            step,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            lr=lr_at(step, steps=config.train.steps, peak=config.optimizer.lr, table=config.scheduler),
            tokens_in_step=outcome.tokens,
            extra=extra,
            force_log=bool(reporters),
        )
    run.progress.update(step, outcome.loss)
    if reporters and run.status is not None:
        run.status(step)


def at_boundary(run: Run, *, is_last: bool) -> bool:
    """Evaluation, sample and checkpoint, where they are due after the step. False: the run is to stop."""
    position, config = run.position, run.config
    if position.evaluation_is_due and not evaluate(run):
        return False
    if run.sampler is not None and (position.step % config.sample.every == 0 or is_last):
        with run.progress.paused():
            run.sampler.run(position.step)
    every = config.checkpoint.every
    if every and position.step % every == 0 and not is_last:  # after the last step the loop saves
        run.at("checkpoint", position.step)
        with run.progress.paused():
            run.saver.save(position, in_background=config.checkpoint.background)
    return True


def evaluate(run: Run) -> bool:
    """Evaluate and log. False, and nothing is logged, if a stop is requested meanwhile; a resumed run makes up for it."""
    assert run.evaluator is not None
    position = run.position
    run.at("evaluation", position.step)
    found = run.evaluator.run(lambda: run.stop.requested)
    position.evaluation_is_due = found is None
    if found is None:
        return False
    position.last_eval = found
    with run.progress.paused():
        run.tracker.log_eval(found, position.step)
    return True


def report_spike(run: Run, spike: Spike, window: Window, outcome: StepOutcome) -> None:
    """Record which batches made the loss spike. The loss is the same on all ranks, and so is what is found."""
    metas = gather_from_ranks([micro.meta for micro in window.micros], world_size=run.info.world_size)
    text = "step %d: loss spike: %.4f, %.1f standard deviations above its average of %.4f"
    logger.warning(text, run.position.step, spike.loss, spike.num_sigma, spike.mean)
    if run.events is not None:
        found = {"loss": spike.loss, "mean": spike.mean, "sigma": spike.sigma, "grad_norm": outcome.grad_norm}
        run.events.write({"event": "loss_spike", "global_step": run.position.step, **found, "batches": metas})


def reject(run: Run, taken: StepInFlight, outcome: StepOutcome) -> None:
    """Record which batches made the loss or the gradient non-finite, and stop or continue, on all ranks alike.

    Raises:
        NonFiniteError: the policy is to stop, or too many steps in a row were skipped.
    """
    position, table = run.position, run.config.train
    position.skipped_in_a_row += 1
    position.unlogged.add({"non_finite_steps": 1.0})
    metas = gather_from_ranks([micro.meta for micro in taken.window.micros], world_size=run.info.world_size)
    if run.events is not None:
        run.events.write({"event": "non_finite", "global_step": taken.step, "loss": outcome.loss, "batches": metas})
    what = f"step {taken.step}: loss {outcome.loss}, squared gradient norm {outcome.grad_norm}"
    if (
        table.on_non_finite == "stop" and table.precision != "fp16"
    ):  # fp16 overflows in the normal course of loss scaling
        # The record ends with this step. If it is not a logged one, the next step is in flight and the ledger already counts
        # in it, so that the row holds the host's values alone.
        end_step(run, taken, outcome, run.reporters if run.logs(taken.step) else (position.unlogged,))
        raise NonFiniteError(f'{what}; its batches are in events.jsonl; train.on_non_finite = "skip" would continue')
    if position.skipped_in_a_row > table.max_skips:
        raise NonFiniteError(f"{what}; {position.skipped_in_a_row} steps in a row were skipped (train.max_skips)")
