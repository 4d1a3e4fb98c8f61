"""The end of a step, once its numbers have arrived: the same on all ranks, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from trainer.distributed.agree import gather_from_ranks
from trainer.metrics.aggregate import Reported
from trainer.metrics.logger import get_logger
from trainer.metrics.rank_reduction import Reporter, reduce_over_ranks
from trainer.metrics.spikes import SpikeDetector
from trainer.training.checkpointing.train_state import FoundSpike
from trainer.training.run import Run, StepInFlight
from trainer.training.signals import StopNow
from trainer.training.step.step import StepOutcome

logger = get_logger(__name__)
# A step's numbers are read once the next one is launched, the vote on them goes with the one after that, and is read later.
KEPT_STEPS = 4


class NonFiniteError(Exception):
    """The loss or gradient was not finite, and the config says to stop (or skipping did not help)."""


def finish(run: Run, taken: StepInFlight) -> str | None:
    """Read the step's numbers and do what they call for. Returns the stop reason, or None.

    Raises:
        NonFiniteError: see `reject`.
    """
    outcome = run.train_step.finish(taken.launched)
    if outcome.is_exhausted:
        return "data exhausted"
    position, step = run.position, taken.step
    if ended := newly_ended(position.data_state, taken.window.data_state):
        logger.info("step %d: read to the end: source %s", step, ", ".join(ended))
        run.event({"event": "source_ended", "global_step": step, "sources": ended})
    position.step, position.reached, position.data_state = step, taken.reached, taken.window.data_state
    position.tokens_before, position.tokens = position.tokens, position.tokens + outcome.tokens_trained
    if len(taken.window.micros) != position.micro_batches:
        position.micro_batches, position.micro_batches_since = len(taken.window.micros), step
    for metrics in taken.window.metrics:
        run.diagnostics.best_effort("data metrics").run(position.unlogged.add, metrics)
    if not outcome.is_finite:
        reject(run, taken, outcome)
    elif outcome.tokens:
        position.skipped_in_a_row = 0
        position.last_loss = step, outcome.loss
        position.first_loss = position.first_loss or position.last_loss
        if run.spikes is not None:
            look_for_spike(run, run.spikes, taken, outcome)
    if outcome.has_spike:
        report_spikes(run)
    end_step(run, taken, outcome, run.reporters if run.logs(step) else {})
    if outcome.all_saved:
        run.at("checkpoint", step, may_wait=True)
        run.saver.publish_pending(position)
    every, is_last = run.config.eval.every, step == position.last_step
    position.evaluation_is_due = run.evaluator is not None and (step % every == 0 or is_last)
    if outcome.should_stop or not at_boundary(run, is_last=is_last):
        return stopped_by(run)
    if outcome.save_is_due:  # the next step may be in flight, and the weights are no longer this one's
        run.saver.due_at = step
    return None


def newly_ended(before: Any, after: Any) -> list[str]:
    """The sources that gave this rank their last batch between two states of the blend."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping) or before.get("names") != after["names"]:
        return []
    return [
        name for name, was, now in zip(after["names"], before["ended"], after["ended"], strict=True) if now and not was
    ]


def stopped_by(run: Run) -> str:
    """The reason of a run that stops on request."""
    return f"stopped by {run.stop.signal_name or 'a signal on another rank'}"


def end_step(run: Run, taken: StepInFlight, outcome: StepOutcome, reporters: Mapping[str, Reporter]) -> None:
    """Hand the step to the tracker, which logs it if there are reporters: reduced over ranks, in one collective."""
    step, extra = taken.step, {}
    if reporters:
        run.at("logging", step)
        run.count({"non_finite_steps": 0.0})  # reported as 0, not left out
        if run.spikes is not None:
            run.count({"loss_spike": 0.0})
        if run.growth is not None:
            run.count({"train/micro_batches": float(len(taken.window.micros))})
        if (grad_scale := run.train_step.grad_scale) is not None:
            run.count({"grad_scale": grad_scale})
        if run.info.world_size > 1:
            ready_after = taken.launched.ready_at - run.tracker.step_start
            run.count({"time/slowest_rank_sec": ready_after, "time/fastest_rank_sec": ready_after})
        local: dict[str, Reported] = {}
        guard = run.diagnostics.best_effort
        for name, reporter in reporters.items():
            drained = guard(name).run(reporter.drain_metrics)
            local.update(dict.fromkeys(run.metric_keys[name]) if drained is None else drained)
        extra = reduce_over_ranks(
            local,
            run.operations,
            device=run.device,
            world_size=run.info.world_size,
            guard=guard("reduction"),
        )
        extra.pop("loss", None)  # the outcome has it, from the step's own reduction
    with run.paused() if reporters else nullcontext():
        run.tracker.end_step(
            step,
            loss=outcome.loss if outcome.tokens else None,
            grad_norm=outcome.grad_norm if outcome.tokens else None,
            lr=taken.lr,
            tokens_in_step=outcome.tokens,
            tokens_trained=outcome.tokens_trained,
            extra=extra,
            force_log=bool(reporters),
        )
    run.diagnostics.best_effort("progress").run(run.progress.update, taken.reached, outcome.loss)
    if reporters and run.status is not None:
        run.diagnostics.best_effort("status.json").run(run.status, step)


def at_boundary(run: Run, *, is_last: bool) -> bool:
    """Evaluation, sample and checkpoint, where they are due after the step. False: the run is to stop."""
    position, config = run.position, run.config
    if position.evaluation_is_due and not evaluate(run):
        return False
    if run.sampler is not None and (position.step % config.sample.every == 0 or is_last):
        run.at("sample", position.step)
        with run.paused():
            run.diagnostics.best_effort("sample").run(run.sampler.run, position.step)
    every = config.checkpoint.every
    is_due = run.saver.must_save or (every and position.step % every == 0)
    if is_due and not is_last:  # after the last step the loop saves
        run.at("checkpoint", position.step, may_wait=True)
        report_spikes(run)
        with run.paused():
            run.saver.save(position, in_background=config.checkpoint.background)
    return True


def evaluate(run: Run) -> bool:
    """Evaluate and log. False, and nothing is logged, if a stop is requested meanwhile; a resumed run makes up for it."""
    assert run.evaluator is not None
    position = run.position

    def should_stop() -> bool:  # asked between micro-batches
        run.at("evaluation", position.step, may_wait=run.config.eval.target is not None)
        return run.stop.requested

    should_stop()
    found: dict[str, float] | None = None
    with suppress(StopNow), run.reading():
        found = run.evaluator.run(position.step, should_stop)
    position.evaluation_is_due = found is None
    if found is None:
        return False
    position.last_eval = position.step, found
    with run.paused():
        run.tracker.log_eval(found, position.step)
    return True


def look_for_spike(run: Run, spikes: SpikeDetector, taken: StepInFlight, outcome: StepOutcome) -> None:
    """Remember the step's batches, and the spike if its loss is one.

    The loss is the same on all ranks and so is what they find, but finding it is a diagnostic, which may fail on one of them:
    whether the ranks exchange the batches is decided by a vote in the next step's reduction.
    """
    position = run.position
    recent = {step: batches for step, batches in position.recent_batches.items() if step > taken.step - KEPT_STEPS}
    position.recent_batches = {**recent, taken.step: [micro.meta for micro in taken.window.micros]}
    spike = run.diagnostics.best_effort("spikes").run(spikes.update, outcome.loss)
    if spike is not None:
        run.count({"loss_spike": 1.0})
        position.found_spikes.append(FoundSpike(taken.step, spike, outcome.grad_norm))


def report_spikes(run: Run) -> None:
    """Record which batches made the loss spike. Every rank must call it at the same step."""
    if run.spikes is None:
        return
    position = run.position
    by_rank = gather_from_ranks((position.found_spikes, position.recent_batches), world_size=run.info.world_size)
    position.found_spikes = []
    write_spikes(run, by_rank)


def write_spikes(run: Run, by_rank: Sequence[tuple[Sequence[FoundSpike], Mapping[int, Sequence[str]]]]) -> None:
    """Write the spikes that any rank has found, with the batches of all."""
    for found in sorted({found for spikes, _ in by_rank for found in spikes}):
        step, spike = found.step, found.spike
        text = "step %d: loss spike: %.4f, %.1f standard deviations above its average of %.4f"
        logger.warning(text, step, spike.loss, spike.num_sigma, spike.mean)
        values = {"loss": spike.loss, "mean": spike.mean, "sigma": spike.sigma, "grad_norm": found.grad_norm}
        batches = [recent.get(step) for _, recent in by_rank]
        run.event({"event": "loss_spike", "global_step": step, **values, "batches": batches})


def reject(run: Run, taken: StepInFlight, outcome: StepOutcome) -> None:
    """Record which batches made the loss or the gradient non-finite, and stop or continue, on all ranks alike.

    Raises:
        NonFiniteError: the policy is to stop, or too many steps in a row were skipped.
    """
    position, table = run.position, run.config.train
    position.skipped_in_a_row += 1
    run.count({"non_finite_steps": 1.0})
    metas = gather_from_ranks([micro.meta for micro in taken.window.micros], world_size=run.info.world_size)
    run.event({"event": "non_finite", "global_step": taken.step, "loss": outcome.loss, "batches": metas})
    what = f"step {taken.step}: loss {outcome.loss}, squared gradient norm {outcome.grad_norm}"
    if (
        table.on_non_finite == "stop" and table.precision != "fp16"
    ):  # fp16 overflows in the normal course of loss scaling
        report_spikes(run)
        # The record ends with this step. If it is not a logged one, the next step is in flight and the ledger already counts
        # in it, so that the row holds the host's values alone.
        end_step(run, taken, outcome, run.reporters if run.logs(taken.step) else {"counters": position.unlogged})
        raise NonFiniteError(f'{what}; its batches are in events.jsonl; train.on_non_finite = "skip" would continue')
    if position.skipped_in_a_row > table.max_skips:
        raise NonFiniteError(f"{what}; {position.skipped_in_a_row} steps in a row were skipped (train.max_skips)")
