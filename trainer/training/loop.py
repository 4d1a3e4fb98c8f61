"""The step loop: from the first step to the last.

A step's numbers are read after the next step is launched, so that the device has work while the host reads: a stop, an end of
the data and a streak of skipped steps take effect one step later, on all ranks alike. A step that logs, evaluates, samples,
saves or may let the batch grow is read at once; so is the step after that at which the time to save has come. A single rank
that is asked to stop does not read for another step: nobody else has to agree, and the data may never come.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch

from trainer.data.batch import MicroBatch
from trainer.distributed.agree import gather_from_ranks, raise_on_all_ranks
from trainer.distributed.watchdog import DATA
from trainer.errors import UserError
from trainer.metrics.aggregate import reduce_over_ranks
from trainer.metrics.logger import get_logger
from trainer.training.checkpointing.train_state import SHOWN_LOSSES
from trainer.training.run import Run, StepInFlight
from trainer.training.signals import StopNow
from trainer.training.step.step import StepOutcome

logger = get_logger(__name__)
SLOW_START_SEC = 10.0


class NonFiniteError(Exception):
    """The loss or gradient was not finite, and the config says to stop (or skipping did not help)."""


class CorruptedError(Exception):
    """The run's `failure`."""


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
    run.moments["other preparations"] = time.monotonic()
    while reason is None and (position.last_step is None or position.step < position.last_step):
        reason, in_flight = take_step(run, in_flight)
        if run.moments:
            say_start(run.moments)
        run.extensions.call("step_launched", position.step + (in_flight is not None))
    exchange(run)
    if run.saver.last_saved != position.step and position.step > 0:
        run.watchdog.at("checkpoint", position.step, may_wait=True)
        run.saver.save(position, in_background=False)
    return reason or "all steps are done"


def say_start(moments: dict[str, float]) -> None:
    """Say what took the time until the first step was done, if it is much."""
    names, times = [*moments, "the step itself"][1:], [*moments.values(), time.monotonic()]
    parts = zip(names, itertools.pairwise(times), strict=True)
    if (total := times[-1] - times[0]) > SLOW_START_SEC:
        listed = ", ".join(f"{name} {after - before:.1f}" for name, (before, after) in parts)
        logger.info("the first step was done after %.1f s: %s", total, listed)
    moments.clear()


def take_step(run: Run, previous: StepInFlight | None) -> tuple[str | None, StepInFlight | None]:
    """Launch the next step and finish the one before it. Returns the stop reason, or None, and the step that is in flight."""
    step, length, saver = run.position.step + (1 if previous is None else 2), run.length, run.saver
    tokens_before = run.position.tokens_before if previous is None else run.position.tokens  # through step - 2
    num_micros = run.num_micros
    num_before, change = num_micros * (step > 1), None
    if run.growth is not None:
        num_micros, num_before, change = micro_batches_of(run, run.growth, step, previous, tokens_before)
    reached = step
    if length.micro_tokens:
        reached = min(tokens_before + (num_before + num_micros) * length.micro_tokens, length.total)
    lr = run.schedule(reached) * (1.0 if run.growth is None else run.growth.lr_factor(num_micros))
    if reached >= length.total:
        run.position.last_step = step
    is_logged, at_once = logs(run, step), is_read_at_once(run, step)
    if (at_once or saver.must_save) and previous is not None:
        # Before the step starts, so that its times are its own.
        reason, previous = finish(run, previous), None
        if reason is not None:
            return reason, None
    run.tracker.start_step()
    run.watchdog.at(DATA, step)
    try:
        with run.tracker.section("data"), interruptible(run):
            window = read_window(run, num_micros)
    except StopNow:
        return (None if previous is None else finish(run, previous)) or stopped_by(run), None
    if window is None:
        return "data exhausted", None
    if change is not None:
        logger.info("step %d: %d micro-batches instead of %d: %s", step, num_micros, num_before, change["reason"])
        run.event(change)
    run.watchdog.at("forward and backward", step)
    with run.tracker.section("forward_backward"):
        run.train_step.accumulate(step, window, is_logged=is_logged)
    run.watchdog.at("optimizer", step)
    with run.tracker.section("optimizer"):
        launched = run.train_step.launch(
            lr=lr,
            stop=run.stop.requested,
            saved=saver.pending is not None and saver.is_written(),
            save_due=time.monotonic() >= saver.due_time,
            exchange=run.extensions.asks,
            exhausted=all(map(attrgetter("is_filler"), window)),
        )
    current = StepInFlight(step, reached, window, launched, lr)
    reason = None if previous is None else finish(run, previous)
    if at_once or reason is not None:
        # The stop takes effect now; the step that is in flight has happened and counts.
        return finish(run, current) or reason, None
    return None, current


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


def read_window(run: Run, num_micros: int) -> list[MicroBatch] | None:
    """The micro-batches of a step that this rank reads: `num_micros` of each of its data shards, in turn. None, instead of the
    first ones, if a resumed run has nothing left to read on any rank.

    A shard whose data are exhausted continues with masked rows: the others still need it in every collective, and the run
    ends at the first step in which none has a batch of its own. Batches without a target do not end it: the next ones may
    have some. The first call communicates.

    Raises:
        UserError: no rank of a new run has anything to read; or see `trainer.data.batch.take_apart`.
    """
    if not run.last_read and not begin_reading(run):
        return None
    window = []
    for _ in range(num_micros):
        for shard, loader in enumerate(run.loaders):
            micro = next(loader, None)
            run.last_read[shard] = run.last_read[shard].masked() if micro is None else replace(micro, shard=shard)
            window.append(run.last_read[shard])
    return window


def begin_reading(run: Run) -> bool:
    """Read the first batches. A data shard that has nothing to read from the start (resumed after it had read everything, or
    with fewer documents than shards) gets a row to mask from one that has some. False: none has anything."""
    world_size = run.info.world_size
    with raise_on_all_ranks(world_size=world_size):
        firsts = [next(loader, None) for loader in run.loaders]
    run.loaders = [
        loader if first is None else itertools.chain([first], loader)
        for first, loader in zip(firsts, run.loaders, strict=True)
    ]
    has_data = gather_from_ranks([first is not None for first in firsts], world_size=world_size)
    flat = [has for own in has_data for has in own]
    given = next((first for first in firsts if first is not None), None)
    if not any(flat):
        if not run.is_resumed:
            raise UserError("data", "there is nothing to read", "check the paths of the sources")
        return False
    if not all(flat):
        what = "data shard" if len(firsts) > 1 else "rank"
        empty = ", ".join(str(number) for number, has in enumerate(flat) if not has)
        logger.warning("%s %s of %d has nothing to read, and runs fully masked batches", what, empty, len(flat))
        giver = list(map(any, has_data)).index(True)
        own = None
        if given is not None and run.info.rank == giver:
            own = replace(given.masked().to(torch.device("cpu")), state=None)
        (given,) = gather_from_ranks((own,), world_size=world_size)[giver]
    assert given is not None
    filler = given.to(run.device)
    run.last_read = [
        replace(filler, shard=shard, state=state) if first is None else first
        for shard, (first, state) in enumerate(zip(firsts, run.position.data_states, strict=True))
    ]
    return True


def micro_batches_of(
    run: Run, growth: Any, step: int, previous: StepInFlight | None, tokens_before: int
) -> tuple[int, int, Mapping[str, Any] | None]:
    """The micro-batches of a step, those of the step before it (0 if there is none), and the event of a change between them.

    The same on all ranks.

    Args:
        tokens_before: tokens through step - 2.
    """
    position = run.position
    before = position.micro_batches if previous is None else len(previous.window) // len(run.loaders)
    num_micros, change = growth.of_step(
        step, before=before, changed_at=position.micro_batches_since, tokens_before=tokens_before
    )
    return num_micros, before or (num_micros if step > 1 else 0), change


def is_read_at_once(run: Run, step: int) -> bool:
    """Whether the step's numbers are needed right after it; the same on all ranks."""
    return logs(run, step) or 0 in map(step.__mod__, run.periods)


def logs(run: Run, step: int) -> bool:
    """Whether `step` is logged; the same on all ranks."""
    return run.tracker.will_log(step) or step == run.position.last_step


def finish(run: Run, taken: StepInFlight) -> str | None:
    """Read the step's numbers and do what they call for. Returns the stop reason, or None.

    Raises:
        NonFiniteError: see `reject`.
    """
    outcome = run.train_step.finish(taken.launched)
    if outcome.is_exhausted:
        return "data exhausted"
    position, step = run.position, taken.step
    data_states = list(map(attrgetter("state"), taken.window[-len(run.loaders) :]))
    if ended := newly_ended(position.data_states[0], data_states[0]):
        logger.info("step %d: read to the end: source %s", step, ", ".join(ended))
        run.event({"event": "source_ended", "global_step": step, "sources": ended})
    position.step, position.reached, position.data_states = step, taken.reached, data_states
    position.tokens_before, position.tokens = position.tokens, position.tokens + outcome.tokens_trained
    num_micros = len(taken.window) // len(run.loaders)
    if num_micros != position.micro_batches:
        position.micro_batches, position.micro_batches_since = num_micros, step
    for micro in taken.window:
        position.unlogged[micro.shard].add(micro.metrics)
    run.extensions.call("step_finished", taken, outcome)
    if not outcome.is_finite:
        reject(run, taken, outcome)
    elif outcome.tokens:
        position.skipped_in_a_row = 0
        position.last_losses.append((step, outcome.loss))
        if len(position.first_losses) < SHOWN_LOSSES:
            position.first_losses.append((step, outcome.loss))
    if outcome.wants_exchange:
        exchange(run)
    end_step(run, taken, outcome, is_logged=logs(run, step))
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
    if run.failure:
        raise CorruptedError(run.failure)


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


def end_step(run: Run, taken: StepInFlight, outcome: StepOutcome, *, is_logged: bool, drains: bool = True) -> None:
    """Hand the step to the tracker; on a logged one with the metrics of all ranks, reduced in one collective.

    Args:
        drains: False: what the host has recorded is all that there is.
    """
    step, extra = taken.step, {}
    if is_logged:
        run.watchdog.at("logging", step)
        extra = reduced_metrics(run, taken, drains=drains)
    run.tracker.end_step(
        step,
        loss=outcome.loss if outcome.tokens else None,
        grad_norm=outcome.grad_norm if outcome.tokens else None,
        lr=taken.lr,
        tokens_in_step=outcome.tokens,
        tokens_trained=outcome.tokens_trained,
        extra=extra,
        force_log=is_logged,
    )
    if is_logged and run.info.is_main:
        guard = run.diagnostics.best_effort("status.json")
        guard.run(run.run_dir.keep_status, step, wandb_run_id=run.wandb_run_id)


def reduced_metrics(run: Run, taken: StepInFlight, *, drains: bool) -> dict[str, float]:
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
        for name, shard, reporter in run.reporters:
            drained = guard(name).run(reporter.drain_metrics)
            run.position.unlogged[shard].add(dict.fromkeys(reporter.metric_keys) if drained is None else drained)
        run.recorder.add(run.extensions.drained())
    recorded = []
    for recorder in run.position.unlogged:
        drained = guard("metrics").run(recorder.drain_metrics)
        recorded.append(dict.fromkeys(run.operations) if drained is None else drained)  # None: nothing of it is known
    world_size = run.info.world_size
    reduced = reduce_over_ranks(
        recorded, run.operations, device=run.device, world_size=world_size, guard=guard("reduction")
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


def reject(run: Run, taken: StepInFlight, outcome: StepOutcome) -> None:
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
        end_step(run, taken, outcome, is_logged=True, drains=logs(run, taken.step))
        raise NonFiniteError(f'{what}; see its rows: {command}; train.on_non_finite = "skip" would continue')
    if position.skipped_in_a_row > table.max_skips:
        many = f"{position.skipped_in_a_row} steps in a row were skipped (train.max_skips)"
        raise NonFiniteError(f"{what}; {many}; see its rows: {command}")
