"""A run: its parts and where it is; around a step: its size, record, evaluation, checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from trainer.config.schema import RunConfig
from trainer.data.loader import MicroBatch, Reading
from trainer.distributed.env import RankInfo, gather_from_ranks
from trainer.distributed.strategy import Strategy
from trainer.distributed.watchdog import Watchdog
from trainer.metrics.aggregate import Operations, Recorder, Reported, rank_operations, reduce_over_ranks
from trainer.metrics.best_effort import Diagnostics
from trainer.metrics.catalog import plain_names
from trainer.metrics.catalog_rows import RankReduction
from trainer.metrics.logger import get_logger
from trainer.metrics.sinks import EventWriter
from trainer.metrics.tracker import MetricsTracker
from trainer.options import MicroBatches
from trainer.training.checkpointing.train_state import Position, Saver, TrainState
from trainer.training.evaluator import Evaluator
from trainer.training.extension import CorruptedError, Extensions
from trainer.training.optimizer import Length, Schedule
from trainer.training.plan import Plan
from trainer.training.run_dir import RunDir
from trainer.training.signals import StopRequest
from trainer.training.step import Launched, StepOutcome, TrainStep
from trainer.wording import few


@dataclass(frozen=True)
class StepInFlight:
    """A step that was launched and is not finished."""

    step: int
    reached: int  # see `Length`
    window: Sequence[MicroBatch]
    launched: Launched
    lr: float


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Run:
    """The parts of a run, made by `open_run`. Only `position` and their own state change."""

    plan: Plan
    config: RunConfig
    length: Length
    info: RankInfo
    device: torch.device
    strategy: Strategy
    run_dir: RunDir
    state: TrainState
    tracker: MetricsTracker
    position: Position
    stop: StopRequest
    events: EventWriter | None  # rank 0 only
    reading: Reading
    train_step: TrainStep
    schedule: Schedule
    evaluator: Evaluator | None
    micro_batches: MicroBatches  # of each data shard in a step
    periods: Set[int]  # multiples of these are read before the next step: evaluations, saves
    extensions: Extensions
    saver: Saver
    watchdog: Watchdog

    @property
    def diagnostics(self) -> Diagnostics:
        """Guards of what only measures or shows: its failure costs one warning, never the run."""
        return self.state.tracker.diagnostics

    @property
    def recorder(self) -> Recorder:
        """Holds the metrics recorded since the last logged step."""
        return self.position.unlogged[0]

    @property
    def model(self) -> nn.Module:
        """The model itself, without DDP."""
        return self.state.model

    def record(self, name: str, value: Reported) -> None:
        """Count a metric on this rank until the next logged step, which reports it.

        The catalog says how the values between two logged steps and those of all ranks combine
        (`trainer.metrics.register` adds metrics). `value`: a number, a tensor of one element, a
        pair (sum, weight), or None if unknown; what is no number is left out.
        """
        self.recorder.add({name: value})

    def event(self, event: Mapping[str, Any]) -> None:
        """Write to events.jsonl (rank 0; other ranks do nothing)."""
        if self.events is not None:
            self.diagnostics.best_effort("events.jsonl").run(self.events.write, event)


logger = get_logger(__name__)
MAX_SKIPS = 10  # consecutive steps that `train.on_non_finite = "skip"` skips before the run ends


class NonFiniteError(Exception):
    """Loss or gradient was not finite: the config stops the run, or skipping did not help."""


def agreed_operations(run: Run) -> Operations:
    """How metrics combine over ranks, the same on each; warns if ranks disagree. Collective.

    A rank without a metric adds nothing to it; of two rows of the catalog the lower rank's counts.
    """
    # The names of all metrics that may come, so that every vector has the same length.
    keys = [*plain_names(), *run.state.shards[0].dataset.metric_keys, *run.extensions.metric_keys]
    by_rank = gather_from_ranks(rank_operations(keys), world_size=run.info.world_size)
    agreed: dict[str, RankReduction] = {}
    for own in by_rank:
        agreed = {**own, **agreed}
    for rank, own in enumerate(by_rank):
        other = sorted(key for key in agreed if own.get(key) != agreed[key])
        if other:
            text = "the ranks do not report the same metrics: "
            text += "rank %d has no %s, or another row of the catalog for it"
            logger.warning(text, rank, few(other))
    return dict(sorted(agreed.items()))


class NextStep(NamedTuple):
    """The size and the learning rate of a step; the same on all ranks."""

    num_micros: int  # micro-batches of each data shard
    reached: int  # see `Length`
    lr: float


def next_step(run: Run, step: int, previous: StepInFlight | None) -> NextStep:
    """Size and learning rate of a step. Notes the last one in `run.position`."""
    position, length, num_micros = run.position, run.length, run.micro_batches.at(step)
    reached = step
    if length.micro_tokens:
        # The tokens of `previous` are not known: those through step - 2.
        tokens_before = position.tokens_before if previous is None else position.tokens
        num_full = num_micros
        if step > 1:
            num_full += run.micro_batches.at(step - 1)
        reached = min(tokens_before + num_full * length.micro_tokens, length.total)
    if reached >= length.total:
        position.last_step = step
    return NextStep(num_micros, reached, run.schedule(reached))


def log_change(run: Run, step: int) -> None:
    """Record that a step has another number of micro-batches than the one before, if it has."""
    before, now = run.micro_batches.at(step - 1), run.micro_batches.at(step)
    if step > 1 and now != before:
        logger.info("step %d: %d micro-batches instead of %d", step, now, before)
        run.event({"event": "micro_batches", "global_step": step, "from": before, "to": now})


def finish(run: Run, taken: StepInFlight | None, operations: Operations) -> str | None:
    """Read the numbers of a step, if any, and act on them. Returns the stop reason, or None."""
    if taken is None:
        return None
    outcome = run.train_step.finish(taken.launched)
    if outcome.is_exhausted:
        end_of_data(run, taken, operations)
        return "data exhausted"
    position, step, num_shards = run.position, taken.step, len(run.reading.loaders)
    data_states = list(map(attrgetter("state"), taken.window[-num_shards:]))
    record_ended(run, step, position.data_states[0], data_states[0])
    position.step, position.reached, position.data_states = step, taken.reached, data_states
    position.tokens_before = position.tokens
    position.tokens += outcome.tokens_trained
    # By shard, since a checkpoint keeps the counts of each.
    for micro in taken.window:
        position.unlogged[micro.shard].add(micro.metrics)
    run.extensions.call("step_finished", taken, outcome)
    if not outcome.is_finite:
        reject(run, taken, outcome, operations)
    elif outcome.tokens:  # a step without tokens trained on nothing
        position.skipped_in_a_row = 0
    end_step(run, taken, outcome, operations, is_logged=logs(run, step))
    if run.extensions.failure:  # before anything is saved
        raise CorruptedError(run.extensions.failure)
    every, is_last = run.config.eval.every, step == position.last_step
    position.evaluation_is_due = run.evaluator is not None and (is_last or step % every == 0)
    if outcome.should_stop or not at_boundary(run, is_last=is_last):
        return stopped_by(run)
    if outcome.save_is_due:
        # Later: the next step may be in flight, and the weights no longer those of this step.
        run.saver.must_save = run.saver.last_saved != step
    return None


def end_of_data(run: Run, taken: StepInFlight, operations: Operations) -> None:
    """Log, evaluate and sample after the last step, as at the end; `taken` found no data."""
    position, step = run.position, run.position.step
    if not step or position.last_step == step:  # another step without data may be in flight
        return
    was_logged, was_boundary = logs(run, step), is_read_at_once(run, step)
    position.last_step = step
    if not was_logged:
        run.tracker.log_last(step, reduced_metrics(run, replace(taken, step=step), operations, drains=True))
    if run.evaluator is not None and step % run.config.eval.every:
        evaluate(run)
    if not was_boundary:
        run.extensions.call("at_boundary", step, is_last=True)


def record_ended(run: Run, step: int, before: Any, after: Any) -> None:
    """Record the sources that gave this rank their last batch between two states of the blend."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping) or before.get("names") != after["names"]:
        return
    if before["ended"] == after["ended"]:
        return
    sources = zip(after["names"], before["ended"], after["ended"], strict=True)
    ended = [name for name, was_ended, is_ended in sources if is_ended and not was_ended]
    if ended:
        logger.info("step %d: no further document in source %s", step, ", ".join(ended))
        run.event({"event": "source_ended", "global_step": step, "sources": ended})


def stopped_by(run: Run) -> str:
    """The reason of a run that stops on request."""
    return f"stopped by {run.stop.signal_name or 'a signal on another rank'}"


def is_read_at_once(run: Run, step: int) -> bool:
    """Whether the step's numbers are needed right after it; the same on all ranks."""
    return logs(run, step) or 0 in map(step.__mod__, run.periods | run.extensions.periods)


def logs(run: Run, step: int) -> bool:
    """Whether `step` is logged; the same on all ranks."""
    return run.tracker.will_log(step) or step == run.position.last_step


def end_step(
    run: Run, taken: StepInFlight, outcome: StepOutcome, operations: Operations, *, is_logged: bool, drains: bool = True
) -> None:
    """Pass the step to the tracker, if it is logged with the metrics of all ranks."""
    step, extra = taken.step, {}
    if is_logged:
        run.watchdog.at("logging", step)
        extra = reduced_metrics(run, taken, operations, drains=drains)
    loss: float | None = outcome.loss
    grad_norm: float | None = outcome.grad_norm
    if not outcome.tokens:  # unknown, not NaN
        loss = grad_norm = None
    run.tracker.end_step(
        step,
        loss=loss,
        grad_norm=grad_norm,
        lr=taken.lr,
        tokens_in_step=outcome.tokens,
        tokens_trained=outcome.tokens_trained,
        extra=extra,
        force_log=is_logged,
    )
    if is_logged and run.info.is_main:
        run.diagnostics.best_effort("status.json").run(run.run_dir.keep_status, step)


def reduced_metrics(run: Run, taken: StepInFlight, operations: Operations, *, drains: bool) -> dict[str, float]:
    """The metrics recorded since the last logged step, over all ranks."""
    guard, world_size = run.diagnostics.best_effort, run.info.world_size
    run.record("non_finite_steps", 0.0)  # reported as 0, not left out
    if not run.micro_batches.is_constant:
        run.record("train/micro_batches", float(run.micro_batches.at(taken.step)))
    grad_scale = run.train_step.grad_scale
    if grad_scale is not None:
        run.record("grad_scale", grad_scale)
    run.recorder.add(run.tracker.times())
    if world_size > 1:
        # The same value twice: the keys are reduced to the maximum and the minimum over ranks.
        ready_after = taken.launched.ready_at - run.tracker.step_start
        run.recorder.add({"time/slowest_rank_sec": ready_after, "time/fastest_rank_sec": ready_after})
    if drains:
        for name, shard, reporter in run.state.reporters:
            found = guard(name).run(reporter.drain_metrics)
            if found is None:  # it failed: unknown on this rank, so that no total looks complete
                found = dict.fromkeys(reporter.metric_keys)
            run.position.unlogged[shard].add(found)
        run.recorder.add(run.extensions.drained())
    recorded = []
    for recorder in run.position.unlogged:
        drained = guard("metrics").run(recorder.drain_metrics)
        if drained is None:
            drained = dict.fromkeys(operations)
        recorded.append(drained)
    how: dict[str, Any] = {"device": run.device, "world_size": world_size, "guard": guard("reduction")}
    reduced = reduce_over_ranks(recorded, operations, **how)
    reduced.pop("loss", None)  # the outcome has it, from the step's own reduction
    return reduced


def at_boundary(run: Run, *, is_last: bool) -> bool:
    """Evaluate, sample and save where it is due after the step. False: the run is to stop."""
    position, table = run.position, run.config.checkpoint
    if position.evaluation_is_due and not evaluate(run):
        return False
    if is_read_at_once(run, position.step):
        run.watchdog.at("extensions", position.step)
        run.extensions.call("at_boundary", position.step, is_last=is_last)
    is_due = run.saver.must_save or (table.every and position.step % table.every == 0)
    if is_due and not is_last:  # after the last step the loop saves
        run.watchdog.at("checkpoint", position.step, may_wait=True)
        run.saver.save(position)
    return True


def evaluate(run: Run) -> bool:
    """Evaluate and log. False if a stop is requested meanwhile: a resumed run evaluates instead."""
    assert run.evaluator is not None
    position = run.position

    def should_stop() -> bool:  # asked between micro-batches
        run.watchdog.at("evaluation", position.step, may_wait=run.config.eval.target is not None)
        return run.stop.requested

    should_stop()  # tells the watchdog, also if a set has no batch
    found = run.evaluator.run(position.step, should_stop)
    position.evaluation_is_due = found is None
    if found is None:
        return False
    position.last_eval = position.step, found
    run.tracker.log_eval(found, position.step)
    return True


def reject(run: Run, taken: StepInFlight, outcome: StepOutcome, operations: Operations) -> None:
    """Record the batches of a step that is not finite, and continue or raise (all ranks)."""
    position, table = run.position, run.config.train
    position.skipped_in_a_row += 1
    run.record("non_finite_steps", 1.0)
    metas = gather_from_ranks([micro.meta for micro in taken.window], world_size=run.info.world_size)
    command = run.run_dir.rows_command(taken.step)
    event = {"event": "non_finite", "global_step": taken.step, "loss": outcome.loss, "batches": metas}
    run.event({**event, "see": command})
    what = f"step {taken.step}: loss {outcome.loss}, squared gradient norm {outcome.grad_norm}"
    # fp16 overflows regularly, until the loss scale fits.
    if table.on_non_finite == "stop" and table.precision != "fp16":
        # The last row of the record. Unless the step is a logged one, the next is in flight and its
        # groups are counted in the ledger already, so that the row holds only the host's metrics.
        end_step(run, taken, outcome, operations, is_logged=True, drains=logs(run, taken.step))
        raise NonFiniteError(f'{what}; see what it read: {command}; train.on_non_finite = "skip" would continue')
    if position.skipped_in_a_row > MAX_SKIPS:
        many = f"{position.skipped_in_a_row} steps in a row were skipped"
        raise NonFiniteError(f"{what}; {many}; see what it read: {command}")
