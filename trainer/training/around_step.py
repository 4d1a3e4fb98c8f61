"""Around a step: before it, its size and its learning rate; after it, once its numbers can be read, its record, and the
evaluation and the checkpoint that are due."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from trainer.distributed.env import gather_from_ranks
from trainer.metrics.aggregate import Operations, rank_operations, reduce_over_ranks
from trainer.metrics.catalog.spec import RankReduction
from trainer.metrics.logger import get_logger
from trainer.training.checkpointing.train_state import HOST_KEYS, SHOWN_LOSSES
from trainer.training.run import Run, StepInFlight
from trainer.training.signals import StopNow
from trainer.training.step.step import StepOutcome
from trainer.wording import few

logger = get_logger(__name__)
SLOW_START_SEC = 10.0
MAX_SKIPS = 10  # consecutive steps that `train.on_non_finite = "skip"` skips before the run ends


class NonFiniteError(Exception):
    """The loss or gradient was not finite, and the config says to stop (or skipping did not help)."""


class CorruptedError(Exception):
    """An extension ends the run, see `Extensions.failure`."""


def agreed_operations(run: Run) -> Operations:
    """How the metrics of all ranks combine, the same on each; one warning where ranks disagree. Every rank must call it.

    A rank that does not know a metric adds nothing to it; of two rows of the catalog the lower rank's counts.
    """
    keys = [*HOST_KEYS, *run.state.dataset.metric_keys, *run.extensions.metric_keys]
    keys += [key for *_, reporter in run.state.reporters for key in reporter.metric_keys]
    by_rank = gather_from_ranks(rank_operations(keys), world_size=run.info.world_size)
    agreed: dict[str, RankReduction] = {}
    for own in by_rank:
        agreed = {**own, **agreed}
    for rank, own in enumerate(by_rank):
        if other := sorted(key for key in agreed if own.get(key) != agreed[key]):
            text = "the ranks do not report the same metrics: rank %d has no %s, or another row of the catalog for it"
            logger.warning(text, rank, few(other))
    return dict(sorted(agreed.items()))


def say_start(moments: dict[str, float]) -> None:
    """Say what took the time until the first step was done, if it is much."""
    names, times = [*moments, "the step itself"][1:], [*moments.values(), time.monotonic()]
    parts = zip(names, pairwise(times), strict=True)
    if (total := times[-1] - times[0]) > SLOW_START_SEC:
        listed = ", ".join(f"{name} {after - before:.1f}" for name, (before, after) in parts)
        logger.info("the first step was done after %.1f s: %s", total, listed)
    moments.clear()


class NextStep(NamedTuple):
    """The size and the learning rate of a step; the same on all ranks."""

    num_micros: int
    """Micro-batches of each data shard."""
    reached: int
    """See `Length`."""
    lr: float
    change: Mapping[str, Any] | None
    """The event of a change of `num_micros`."""


def next_step(run: Run, step: int, previous: StepInFlight | None) -> NextStep:
    """What is known of a step before it is read; notes if it is the last. `previous`: the one before it, if it is in flight."""
    position, length, growth = run.position, run.length, run.growth
    if previous is None:
        before, tokens_before = position.micro_batches, position.tokens_before
    else:  # tokens through step - 2
        before, tokens_before = len(previous.window) // len(run.reading.loaders), position.tokens
    num_micros, lr_factor, change = run.num_micros, 1.0, None
    if growth is None:
        before = num_micros
    else:
        since = position.micro_batches_since
        num_micros, change = growth.of_step(step, before=before, changed_at=since, tokens_before=tokens_before)
        lr_factor, before = growth.lr_factor(num_micros), before or num_micros
    reached = step
    if length.micro_tokens:
        num_full = num_micros if step == 1 else before + num_micros
        reached = min(tokens_before + num_full * length.micro_tokens, length.total)
    if reached >= length.total:
        position.last_step = step
    return NextStep(num_micros, reached, run.schedule(reached) * lr_factor, change)


def finish(run: Run, taken: StepInFlight, operations: Operations) -> str | None:
    """Read the step's numbers and do what they call for. Returns the stop reason, or None.

    Args:
        operations: how metrics combine over ranks.

    Raises:
        NonFiniteError: see `reject`.
    """
    outcome = run.train_step.finish(taken.launched)
    if outcome.is_exhausted:
        return "data exhausted"
    position, step = run.position, taken.step
    data_states = list(map(attrgetter("state"), taken.window[-len(run.reading.loaders) :]))
    if ended := newly_ended(position.data_states[0], data_states[0]):
        logger.info("step %d: read to the end: source %s", step, ", ".join(ended))
        run.event({"event": "source_ended", "global_step": step, "sources": ended})
    position.step, position.reached, position.data_states = step, taken.reached, data_states
    position.tokens_before, position.tokens = position.tokens, position.tokens + outcome.tokens_trained
    num_micros = len(taken.window) // len(run.reading.loaders)
    if num_micros != position.micro_batches:
        position.micro_batches, position.micro_batches_since = num_micros, step
    for micro in taken.window:
        position.unlogged[micro.shard].add(micro.metrics)
    run.extensions.call("step_finished", taken, outcome)
    if not outcome.is_finite:
        reject(run, taken, outcome, operations)
    elif outcome.tokens:
        position.skipped_in_a_row = 0
        position.last_losses.append((step, outcome.loss))
        if len(position.first_losses) < SHOWN_LOSSES:
            position.first_losses.append((step, outcome.loss))
    if outcome.wants_exchange:
        exchange(run)
    end_step(run, taken, outcome, operations if logs(run, step) else None)
    if outcome.all_saved:
        run.watchdog.at("checkpoint", step, may_wait=True)
        run.saver.publish_pending()
    every, is_last = run.config.eval.every, step == position.last_step
    position.evaluation_is_due = run.evaluator is not None and (step % every == 0 or is_last)
    if outcome.should_stop or not at_boundary(run, is_last=is_last):
        return stopped_by(run)
    if outcome.save_is_due:  # the next step may be in flight, and the weights are no longer this one's
        run.saver.must_save = run.saver.began_at != step
    return None


def exchange(run: Run) -> None:
    """Let extensions exchange what they have for other ranks.

    Raises:
        CorruptedError: with that, one of them ends the run.
    """
    run.extensions.exchange()
    if run.extensions.failure:
        raise CorruptedError(run.extensions.failure)


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


def is_read_at_once(run: Run, step: int) -> bool:
    """Whether the step's numbers are needed right after it; the same on all ranks."""
    return logs(run, step) or 0 in map(step.__mod__, run.periods | run.extensions.periods)


def logs(run: Run, step: int) -> bool:
    """Whether `step` is logged; the same on all ranks."""
    return run.tracker.will_log(step) or step == run.position.last_step


@contextmanager
def interruptible(run: Run) -> Iterator[None]:
    """Around what only reads, and may wait for ever: raises `StopNow` at a request to stop, on a single rank."""
    run.stop.interrupts = run.info.world_size == 1
    try:
        if run.stop.interrupts and run.stop.requested:
            raise StopNow
        yield
    finally:
        run.stop.interrupts = False


def end_step(
    run: Run, taken: StepInFlight, outcome: StepOutcome, operations: Operations | None, *, drains: bool = True
) -> None:
    """Hand the step to the tracker; on a logged one with the metrics of all ranks, reduced in one collective.

    Args:
        operations: None: the step is not logged.
        drains: False: what the host has recorded is all that there is.
    """
    step, extra = taken.step, {}
    if operations is not None:
        run.watchdog.at("logging", step)
        extra = reduced_metrics(run, taken, operations, drains=drains)
    run.tracker.end_step(
        step,
        loss=outcome.loss if outcome.tokens else None,
        grad_norm=outcome.grad_norm if outcome.tokens else None,
        lr=taken.lr,
        tokens_in_step=outcome.tokens,
        tokens_trained=outcome.tokens_trained,
        extra=extra,
        force_log=operations is not None,
    )
    if operations is not None and run.info.is_main:
        guard = run.diagnostics.best_effort("status.json")
        guard.run(run.run_dir.keep_status, step, wandb_run_id=run.wandb_run_id)


def reduced_metrics(run: Run, taken: StepInFlight, operations: Operations, *, drains: bool) -> dict[str, float]:
    """What was recorded since the last logged step, over all ranks."""
    guard = run.diagnostics.best_effort
    run.record("non_finite_steps", 0.0)  # reported as 0, not left out
    if run.growth is not None:
        run.record("train/micro_batches", float(run.position.micro_batches))
    if (grad_scale := run.train_step.grad_scale) is not None:
        run.record("grad_scale", grad_scale)
    run.recorder.add(run.tracker.times())
    if run.info.world_size > 1:
        ready_after = taken.launched.ready_at - run.tracker.step_start
        run.recorder.add({"time/slowest_rank_sec": ready_after, "time/fastest_rank_sec": ready_after})
    if drains:
        for name, shard, reporter in run.state.reporters:
            drained = guard(name).run(reporter.drain_metrics)
            run.position.unlogged[shard].add(dict.fromkeys(reporter.metric_keys) if drained is None else drained)
        run.recorder.add(run.extensions.drained())
    recorded = []
    for recorder in run.position.unlogged:
        drained = guard("metrics").run(recorder.drain_metrics)
        recorded.append(dict.fromkeys(operations) if drained is None else drained)  # None: nothing of it is known
    world_size = run.info.world_size
    reduced = reduce_over_ranks(
        recorded, operations, device=run.device, world_size=world_size, guard=guard("reduction")
    )
    reduced.pop("loss", None)  # the outcome has it, from the step's own reduction
    return reduced


def at_boundary(run: Run, *, is_last: bool) -> bool:
    """Evaluation, sample and checkpoint, where they are due after the step. False: the run is to stop."""
    position, config = run.position, run.config
    if position.evaluation_is_due and not evaluate(run):
        return False
    if run.extensions.has("at_boundary") and is_read_at_once(run, position.step):
        run.watchdog.at("extensions", position.step)
        run.extensions.call("at_boundary", position.step, is_last=is_last)
    every = config.checkpoint.every
    is_due = run.saver.must_save or (every and position.step % every == 0)
    if is_due and not is_last:  # after the last step the loop saves
        run.watchdog.at("checkpoint", position.step, may_wait=True)
        run.extensions.exchange()
        run.saver.save(position, in_background=config.checkpoint.background)
    return True


def evaluate(run: Run) -> bool:
    """Evaluate and log. False, and nothing is logged, if a stop is requested meanwhile; a resumed run makes up for it."""
    assert run.evaluator is not None
    position = run.position

    def should_stop() -> bool:  # asked between micro-batches
        run.watchdog.at("evaluation", position.step, may_wait=run.config.eval.target is not None)
        return run.stop.requested

    should_stop()
    found: dict[str, float] | None = None
    with suppress(StopNow), interruptible(run):
        found = run.evaluator.run(position.step, should_stop)
    position.evaluation_is_due = found is None
    if found is None:
        return False
    position.last_eval = position.step, found
    run.tracker.log_eval(found, position.step)
    return True


def reject(run: Run, taken: StepInFlight, outcome: StepOutcome, operations: Operations) -> None:
    """Record which batches made the loss or the gradient non-finite, and stop or continue, on all ranks alike.

    Raises:
        NonFiniteError: the policy is to stop, or too many steps in a row were skipped.
    """
    position, table = run.position, run.config.train
    position.skipped_in_a_row += 1
    run.record("non_finite_steps", 1.0)
    metas = gather_from_ranks([micro.meta for micro in taken.window], world_size=run.info.world_size)
    command = run.run_dir.replay_command(taken.step)
    event = {"event": "non_finite", "global_step": taken.step, "loss": outcome.loss, "batches": metas}
    run.event({**event, "replay": command})
    what = f"step {taken.step}: loss {outcome.loss}, squared gradient norm {outcome.grad_norm}"
    # fp16 overflows in the normal course of loss scaling.
    if table.on_non_finite == "stop" and table.precision != "fp16":
        run.extensions.exchange()
        # The record ends with this step. If it is not a logged one, the next step is in flight and the ledger already counts
        # in it, so that the row holds the host's values alone.
        end_step(run, taken, outcome, operations, drains=logs(run, taken.step))
        raise NonFiniteError(f'{what}; see its rows: {command}; train.on_non_finite = "skip" would continue')
    if position.skipped_in_a_row > MAX_SKIPS:
        many = f"{position.skipped_in_a_row} steps in a row were skipped"
        raise NonFiniteError(f"{what}; {many}; see its rows: {command}")
