"""The loop of a run, and what follows from a step's numbers.

They are read after the next step is launched, so that the device has work while the host reads. A
stop, an end of the data and a streak of skipped steps therefore take effect one step later, on all
ranks alike. A step that logs, evaluates, samples or saves is read at once, and so is the one after
a timed save became due.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor

from trainer.data.loader import MicroBatch
from trainer.distributed.env import gather_from_ranks
from trainer.distributed.watchdog import DATA
from trainer.metrics.aggregate import Recorder, reduce_over_ranks
from trainer.metrics.logger import get_logger
from trainer.training.extension import Flag, Step, StepOutcome
from trainer.training.open_run import Run
from trainer.training.step import Launched

logger = get_logger(__name__)
MAX_SKIPS = 10  # consecutive steps that `train.on_non_finite = "skip"` skips before the run ends
NO_DATA = "data exhausted"


class CorruptedError(Exception):
    """An extension ends the run, see `RunView.failure`."""


class NonFiniteError(Exception):
    """Loss or gradient was not finite: the config stops the run, or skipping did not help."""


@dataclass(frozen=True)
class Order:
    """What a step will be; the same on all ranks."""

    number: int
    num_micros: int  # micro-batches of each data shard
    reached: int  # see `Length`
    lr: float
    is_last: bool  # the data may end before
    is_logged: bool
    is_read_at_once: bool  # its numbers are needed right after it


@dataclass(frozen=True)
class InFlight:
    """A step that was launched, and whose numbers are not read."""

    order: Order
    window: Sequence[MicroBatch]
    launched: Launched


def run_loop(run: Run) -> str:
    """Train until the last step, the end of the data or a request to stop. Returns the reason."""
    position, tracker, watchdog = run.position, run.tracker, run.watchdog
    before: InFlight | None = None
    reason = _begin(run)
    while reason is None and (position.last_step is None or position.step < position.last_step):
        order = next_order(run, before)
        if order.is_last:
            position.last_step = order.number
        if before is not None and (order.is_read_at_once or position.must_save):
            # Settled before this step starts, so that the times of this step are its own.
            reason, before = settle(run, before), None
            if reason is not None:
                break

        tracker.start_step()  # waiting for data is part of a step's time
        watchdog.at(DATA, order.number)
        with tracker.section("data"):
            window = run.reading.window(order.num_micros)
        if window is None:
            reason = end_of_data(run, None)
            break
        watchdog.at("forward and backward", order.number)
        with tracker.section("forward_backward"):
            run.train_step.accumulate(order.number, window, is_logged=order.is_logged)
        watchdog.at("optimizer", order.number)
        with tracker.section("optimizer"):
            launched = run.train_step.launch(lr=order.lr, flags=own_flags(run, window))
        step = InFlight(order, window, launched)

        if before is not None:
            reason = settle(run, before)
        before = step
        if order.is_read_at_once or reason is not None:
            # A stop takes effect now; the step that is in flight has happened and counts.
            reason, before = settle(run, step) or reason, None
    if run.saver.last_saved != position.step and position.step > 0:
        watchdog.at("checkpoint", position.step, may_wait=True)
        run.saver.save()
    if run.view.failure:
        raise CorruptedError(run.view.failure)
    return reason or "all steps are done"


def _begin(run: Run) -> str | None:
    """Do what the resumed run still had to. Returns why the run stops before a step, or None.

    The first step may take minutes (compilation), and nothing is lost yet.
    """
    is_stopped = any(gather_from_ranks(run.stop.requested, world_size=run.view.info.world_size))
    return stopped_by(run) if is_stopped or not at_boundary(run) else None


def next_order(run: Run, before: InFlight | None) -> Order:
    """The next step."""
    position, length, micro_batches = run.position, run.length, run.micro_batches
    number = 1 + (position.step if before is None else before.order.number)
    num_micros, reached = micro_batches.at(number), number
    if length.micro_tokens:
        # The tokens of `before` are not known: those through the step before it.
        tokens_before = position.tokens_before if before is None else position.tokens
        num_before = micro_batches.at(number - 1) * (number > 1)
        reached = min(tokens_before + (num_micros + num_before) * length.micro_tokens, length.total)
    is_last = reached >= length.total
    is_logged = is_last or run.tracker.will_log(number)
    # An evaluation, a save, or what an extension does then, may follow it.
    is_read_at_once = is_logged or 0 in map(number.__mod__, run.periods)
    return Order(number, num_micros, reached, run.schedule(reached), is_last, is_logged, is_read_at_once)


def own_flags(run: Run, window: Sequence[MicroBatch]) -> Flag:
    """What this rank says with a step."""
    flags = Flag.NONE
    if run.stop.requested:
        flags |= Flag.STOP
    if time.monotonic() >= run.saver.due_time:
        flags |= Flag.SAVE
    if all(map(attrgetter("is_filler"), window)):
        flags |= Flag.EXHAUSTED
    return flags


def settle(run: Run, taken: InFlight) -> str | None:
    """Read the numbers of a step, and act on them. Returns why the run ends, or None."""
    order, position, view = taken.order, run.position, run.view
    outcome, number = run.train_step.finish(taken.launched), order.number
    if Flag.EXHAUSTED in outcome.flags:
        return end_of_data(run, taken)
    step = Step(number, taken.window, order.is_logged, outcome)
    data_states = list(map(attrgetter("state"), taken.window[-len(run.reading.loaders) :]))
    position.step, position.reached, position.data_states = number, order.reached, data_states
    position.tokens_before = position.tokens
    position.tokens += outcome.tokens_trained
    # By shard, since a checkpoint keeps the counts of each.
    for micro in taken.window:
        position.unlogged[micro.shard].add(micro.metrics)
    run.extensions.settle(step, taken.launched.measured)
    if not outcome.is_finite:
        reject(run, taken, step)
    elif outcome.tokens:
        position.skipped_in_a_row = 0
    else:  # its rows hold prompts (`loss_mask`) or gaps alone
        position.untrained_steps += 1
        if position.untrained_steps == MAX_SKIPS and not position.tokens:
            logger.warning("no token is trained in %d steps: are all targets masked, or NaN?", MAX_SKIPS)
    end_step(run, taken, outcome, is_logged=order.is_logged)
    if view.failure:  # before anything is saved
        raise CorruptedError(view.failure)
    every, is_last = view.config.eval.every, number == position.last_step
    position.evaluation_is_due = run.evaluator is not None and (is_last or number % every == 0)
    position.boundary_is_due = order.is_read_at_once
    if Flag.STOP in outcome.flags or not at_boundary(run):
        return stopped_by(run)
    every = view.config.checkpoint.every
    if (position.must_save or (every and number % every == 0)) and not is_last:  # then it saves
        run.watchdog.at("checkpoint", number, may_wait=True)
        run.saver.save()
    if Flag.SAVE in outcome.flags:
        # Later: the next step may be in flight, and the weights no longer those of this step.
        position.must_save = run.saver.last_saved != number
    return None


def end_step(run: Run, taken: InFlight, outcome: StepOutcome, *, is_logged: bool, drains: bool = True) -> None:
    """Pass the step to the tracker, if it is logged with the metrics of all ranks."""
    number, extra = taken.order.number, {}
    if is_logged:
        run.watchdog.at("logging", number)
        extra = reduced_metrics(run, number, taken.launched.ready_at, drains=drains)
    run.tracker.end_step(
        number,
        loss=outcome.loss if outcome.tokens else None,  # unknown, not NaN
        grad_norm=outcome.grad_norm if outcome.tokens else None,
        lr=taken.order.lr,
        tokens_in_step=outcome.tokens,
        tokens_trained=outcome.tokens_trained,
        extra=extra,
        force_log=is_logged,
    )


def reduced_metrics(run: Run, step: int, ready_at: float, *, drains: bool = True) -> dict[str, float]:
    """The metrics recorded since the last logged step, over all ranks. Collective.

    Args:
        ready_at: see `Launched`.
        drains: also those of the parts that collect theirs themselves.
    """
    view, position = run.view, run.position
    guard, world_size = view.diagnostics.best_effort, view.info.world_size
    view.record("non_finite_steps", 0.0)  # reported as 0, not left out
    if len(run.micro_batches.points) > 1:
        view.record("train/micro_batches", float(run.micro_batches.at(step)))
    view.recorder.add(run.tracker.measured())
    if world_size > 1:
        # The same value twice: the keys are reduced to the maximum and the minimum over ranks.
        ready_after = ready_at - run.tracker.step_start
        view.recorder.add({"time/slowest_rank_sec": ready_after, "time/fastest_rank_sec": ready_after})
    if drains:
        for name, shard, reporter in view.state.reporters:
            found = guard(name).run(reporter.drain_metrics)
            if found is None:  # it failed: unknown on this rank, so that no total looks complete
                found = dict.fromkeys(reporter.metric_keys)
            position.unlogged[shard].add(found)
        view.recorder.add(run.extensions.drained())
    recorded = list(map(Recorder.drain_metrics, position.unlogged))
    how: dict[str, Any] = {"device": view.device, "world_size": world_size, "guard": guard("reduction")}
    return reduce_over_ranks(recorded, run.operations, **how)


def reject(run: Run, taken: InFlight, step: Step) -> None:
    """Record the batches of a step that is not finite, and continue or raise (all ranks)."""
    position, view, outcome = run.position, run.view, step.outcome
    position.skipped_in_a_row += 1
    view.record("non_finite_steps", 1.0)
    metas = gather_from_ranks([str(micro.located) for micro in step.window], world_size=view.info.world_size)
    command = view.run_dir.rows_command(step.number)
    event = {"event": "non_finite", "global_step": step.number, "loss": outcome.loss, "batches": metas}
    view.event({**event, "see": command})
    what = f"step {step.number}: loss {outcome.loss}, gradient norm {outcome.grad_norm}"
    odd = set[str]()
    for micro in step.window:
        given = {**micro.inputs, "targets": micro.targets.nan_to_num(0, math.inf, -math.inf)}
        odd |= {key for key, x in given.items() if isinstance(x, Tensor) and not x.isfinite().all()}
    names = ", ".join(sorted(set().union(*gather_from_ranks(odd, world_size=view.info.world_size))))
    what += f"; numbers of the batch are not finite: {names}" * bool(names)
    advice = '; train.on_non_finite = "skip" would continue'
    if view.config.train.on_non_finite == "skip":
        if position.skipped_in_a_row <= MAX_SKIPS:
            return
        what, advice = f"{what}; {position.skipped_in_a_row} steps in a row were skipped", ""
    # The last row of the record. Unless the step is a logged one, the next is in flight and its
    # groups are counted in the ledger already, so that the row holds only the host's metrics.
    end_step(run, taken, outcome, is_logged=True, drains=step.is_logged)
    raise NonFiniteError(f"{what}; see what it read: {command}{advice}")


def at_boundary(run: Run) -> bool:
    """Evaluate and sample where it is due after the step. False: the run is to stop."""
    position, is_last = run.position, run.position.step == run.position.last_step
    if position.evaluation_is_due and not evaluate(run):
        return False
    if position.boundary_is_due:
        position.boundary_is_due, run.saver.last_saved = False, -1  # its checkpoint does not know of it
        run.watchdog.at("extensions", position.step)
        run.extensions.call("at_boundary", position.step, is_last=is_last)
        if run.view.failure and not is_last:  # before anything more is saved
            raise CorruptedError(run.view.failure)
    return True


def evaluate(run: Run) -> bool:
    """Evaluate and log. False if a stop is requested meanwhile: a resumed run evaluates instead."""
    assert run.evaluator is not None
    position = run.position

    def should_stop() -> bool:  # asked between micro-batches
        run.watchdog.at("evaluation", position.step, may_wait=run.view.config.eval.target is not None)
        return run.stop.requested

    should_stop()  # tells the watchdog, also if a set has no batch
    found = run.evaluator.run(position.step, should_stop)
    position.evaluation_is_due = found is None
    if found is None:
        return False
    position.last_eval, more = (position.step, found), run.view.plan.parts.evaluations
    if more is not None:  # before the row, so that whoever sees that finds the documents
        more.record_losses(run, position.step)
    run.tracker.log_eval(found, position.step)
    return True


def end_of_data(run: Run, taken: InFlight | None) -> str:
    """Log, evaluate and sample after the last step, as at the end, unless that was done before.

    `taken`: the step that found no data; None: a resumed run has none from the start.
    """
    position, step, found = run.position, run.position.step, run.view.found
    was_over = taken is None and found is not None and found[1].get("is_over", False)
    # Another step without data may be in flight.
    if not step or position.last_step == step or was_over:
        return NO_DATA
    position.last_step = step
    run.saver.last_saved = -1  # its checkpoint does not know that the run is over
    if taken is not None and not run.tracker.will_log(step):
        run.tracker.log_last(step, reduced_metrics(run, step, taken.launched.ready_at))
    evaluated, _ = position.last_eval or (0, {})  # perhaps already for the run that is resumed
    is_due = run.evaluator is not None and step % run.view.config.eval.every and evaluated != step
    if is_due and not evaluate(run):
        return stopped_by(run)
    run.extensions.call("at_boundary", step, is_last=True)
    return NO_DATA


def stopped_by(run: Run) -> str:
    """The reason of a run that stops on request."""
    return f"stopped by {run.stop.signal_name or 'a signal on another rank'}"
