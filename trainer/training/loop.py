"""The step loop: from the first step to the last, with everything that happens at a step's boundary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from trainer.config.schema import RunConfig
from trainer.data.loader import Loader
from trainer.distributed.agree import gather_from_ranks
from trainer.distributed.env import RankInfo
from trainer.distributed.watchdog import Watchdog
from trainer.errors import UserError
from trainer.ledger.ledger import Ledger
from trainer.metrics.aggregate import Value, WindowAggregator
from trainer.metrics.events import EventWriter
from trainer.metrics.gns_hooks import GradientNoiseScale
from trainer.metrics.logger import get_logger
from trainer.metrics.rank_reduction import MetricPlan, reduce_over_ranks
from trainer.metrics.spikes import SpikeDetector
from trainer.metrics.tracker import MetricsTracker
from trainer.training.evaluation import Evaluator
from trainer.training.microbatch import MicroBatch, masked_copy, split
from trainer.training.optimizer import lr_at
from trainer.training.progress import Progress
from trainer.training.sampler import Sampler
from trainer.training.saver import Saver
from trainer.training.signals import StopRequest
from trainer.training.step import StepOutcome, TrainStep

logger = get_logger(__name__)

# A rank's own time in the step; the reduction makes the slowest and the fastest rank's of it.
RANK_TIMES = ("time/slowest_rank_sec", "time/fastest_rank_sec")


class NonFiniteError(Exception):
    """The loss or gradient was not finite, and the config says to stop (or skipping did not help)."""


@dataclass
class Run:
    """The assembled parts of a run, and where it is."""

    config: RunConfig
    info: RankInfo
    train_step: TrainStep
    loader: Loader
    ledger: Ledger | None
    gns: GradientNoiseScale | None
    tracker: MetricsTracker
    evaluator: Evaluator | None
    saver: Saver
    stop: StopRequest
    plan: MetricPlan
    progress: Progress
    accepted: frozenset[str] | None
    device: Any
    events: EventWriter | None
    spikes: SpikeDetector | None
    """None: not looked for."""
    watchdog: Watchdog | None = None
    """None for a single rank."""
    keep_status: Callable[[int], None] | None = None
    """Notes the last finished step for people; rank 0."""
    sampler: Sampler | None = None
    """Rank 0 only."""
    step: int = 0
    """Last finished step."""
    first_step: int = 0
    """The step it went on after."""
    data_state: Any = None
    """The data set's state after the last batch that was trained on."""
    first_loss: float | None = None
    last_loss: float | None = None
    last_eval: dict[str, float] = field(default_factory=dict)
    pool_metrics: WindowAggregator = field(default_factory=WindowAggregator)
    skipped_in_a_row: int = 0
    skipped_since_log: int = 0
    previous_batch: dict[str, Any] | None = None

    def at(self, what: str, step: int) -> None:
        """Say what comes now, for the case that it never ends."""
        if self.watchdog is not None:
            self.watchdog.at(what, step)


def run_loop(run: Run) -> str:
    """Train to the last step, or until the data end or somebody asks to stop. Returns why it ended."""
    steps = run.config.train.steps
    reason = "all steps are done"
    count_on(run)
    if any(gather_from_ranks(run.stop.requested, world_size=run.info.world_size)):
        # Asked while it started up: the first step may take minutes (compilation), and there is nothing to lose yet.
        run.progress.close()
        return stopped_by(run)
    if run.evaluator is not None and run.evaluator.is_due and not evaluate(run, run.evaluator):
        return stopped_by(run)
    while run.step < steps:
        step = run.step + 1
        run.tracker.start_step()
        run.at("data", step)
        with run.tracker.section("data"):
            window, data_state = next_window(run)
        outcome = take_step(run, step, window)
        if outcome.is_empty:
            reason = "the data have ended"
            break
        run.step, run.data_state = step, data_state
        if not outcome.is_finite:
            reject(run, window, outcome)
        elif run.spikes is not None:
            watch_for_spikes(run, run.spikes, window, outcome)
        finish_step(run, outcome, is_last=step == steps or outcome.should_stop)
        if outcome.all_saved:
            run.saver.conclude()
        if run.evaluator is not None:
            run.evaluator.is_due = step % run.config.eval.every == 0 or step == steps
        if outcome.should_stop or not at_boundary(run, is_last=step == steps):
            reason = stopped_by(run)
            break
    run.progress.close()
    if run.saver.last_saved != run.step and run.step > 0:
        run.saver.save(run.step, run.data_state, unlogged(run), in_background=False)
    return reason


def unlogged(run: Run) -> dict[str, Any]:
    """What this rank has counted since the last logged step, for a checkpoint between two of them."""
    counts = {"pool": run.pool_metrics.state_dict(), "skipped": run.skipped_since_log, "in_a_row": run.skipped_in_a_row}
    return counts if run.ledger is None else {**counts, "ledger": run.ledger.undrained()}


def count_on(run: Run) -> None:
    """Go on from what `unlogged` has kept."""
    kept = run.saver.unlogged
    run.pool_metrics.load_state_dict(kept.get("pool", {}))
    run.skipped_since_log = int(kept.get("skipped", 0))
    run.skipped_in_a_row = int(kept.get("in_a_row", 0))
    if run.ledger is not None and "ledger" in kept:
        run.ledger.load_undrained(kept["ledger"])


def stopped_by(run: Run) -> str:
    """Why the run stops on request."""
    return f"stopped by {run.stop.signal_name or 'a signal on another rank'}"


def take_step(run: Run, step: int, window: Sequence[MicroBatch]) -> StepOutcome:
    """One optimizer step with its parts timed."""
    config = run.config
    lr = lr_at(step, steps=config.train.steps, peak=config.optimizer.lr, table=config.scheduler)
    will_log = run.tracker.will_log(step) or step == config.train.steps
    run.at("forward and backward", step)
    with run.tracker.section("forward_backward"):
        run.train_step.forward_backward(step, window, will_log=will_log)
    run.at("optimizer", step)
    with run.tracker.section("optimizer"):
        return run.train_step.conclude(lr=lr, stop=run.stop.requested, saved=run.saver.is_written)


def next_window(run: Run) -> tuple[list[MicroBatch], Any]:
    """This rank's micro-batches of one step, and the data set's state after them.

    When this rank's data have ended it goes on with masked rows: the others still need it in every collective, and the
    run ends at the first step in which no rank has a token.
    """
    window, state = [], run.data_state
    for _ in range(run.config.train.micro_batches):
        loaded = next(run.loader, None)
        if loaded is not None:
            batch, state = dict(loaded.batch), loaded.state
            run.pool_metrics.add(loaded.metrics)
            run.previous_batch = batch
        elif run.previous_batch is not None:
            batch = masked_copy(run.previous_batch)
        else:
            raise UserError("data", f"rank {run.info.rank} has nothing to read", "use fewer ranks, or more documents")
        window.append(split(batch, run.accepted))
    return window, state


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


def watch_for_spikes(run: Run, spikes: SpikeDetector, window: Sequence[MicroBatch], outcome: StepOutcome) -> None:
    """Write down which batches made the loss leap. The loss is the same on all ranks, and so is what is found."""
    spike = spikes.update(outcome.loss)
    if spike is None:
        return
    metas = gather_from_ranks([micro.meta for micro in window], world_size=run.info.world_size)
    text = "step %d: the loss leapt to %.4f, %.1f standard deviations above its average of %.4f"
    logger.warning(text, run.step, spike.loss, spike.num_sigma, spike.mean)
    if run.events is not None:
        found = {"loss": spike.loss, "mean": spike.mean, "sigma": spike.sigma, "grad_norm": outcome.grad_norm}
        run.events.write({"event": "loss_spike", "global_step": run.step, **found, "batches": metas})


def reject(run: Run, window: Sequence[MicroBatch], outcome: StepOutcome) -> None:
    """A step whose loss or gradient was not finite: say which batches it was, and stop or go on, on all ranks alike.

    Raises:
        NonFiniteError: the policy is to stop, or too many steps in a row were skipped.
    """
    run.skipped_in_a_row += 1
    run.skipped_since_log += 1
    metas = gather_from_ranks([micro.meta for micro in window], world_size=run.info.world_size)
    if run.events is not None:
        run.events.write({"event": "non_finite", "global_step": run.step, "loss": outcome.loss, "batches": metas})
    what = f"step {run.step}: loss {outcome.loss}, squared gradient norm {outcome.grad_norm}"
    is_overflow = run.config.train.precision == "fp16"
    if run.config.train.on_non_finite == "stop" and not is_overflow:
        finish_step(run, outcome, is_last=True)
        raise NonFiniteError(f'{what}; its batches are in events.jsonl; train.on_non_finite = "skip" would go on')
    if run.skipped_in_a_row > run.config.train.max_skips:
        raise NonFiniteError(f"{what}; {run.skipped_in_a_row} steps in a row were skipped (train.max_skips)")
