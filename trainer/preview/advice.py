"""Settings that will hurt: each with the key, what it does to this run, and a value that does not.

docs/preview.md says why each threshold stands where it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.config.base import ScheduleTable
from trainer.config.schema import RunConfig
from trainer.preview.summary import LedgerView, ModalityView, Preview, SourceView
from trainer.training.setup.plan import Plan

SPARE_LEDGER = 4  # capacities above this many times what is needed are waste,
SPARE_MEGABYTES = 64.0  # where the ledger takes at least this much memory
CHURN = 0.5  # readers exhausted per micro-batch, R / n
HEALTHY_CHURN = 1 / 8
BATCH_RATIO = 8  # largest over smallest batch size of a pool
SOFT_BATCH_RATIO = 4
ABSENT = 0.05  # share of a pool's picks that saw no reader of a modality
MAX_EPOCHS = 4.0
IDLE = 0.1  # share of a shared pass in which ranks have nothing
PADDING = 0.3  # share of the tokens of all cells
LANE_FILL = 0.5  # rows of the average batch over the batch size
LONG_WARMUP = 0.5  # of the run


@dataclass(frozen=True)
class Advice:
    """A setting that will hurt.

    Args:
        key: of the config.
        problem: what it does to this run, with the numbers.
        value: what to set it to, as TOML where the key can be set with `--set`; otherwise in words.
        settable: `--set key=value` is the remedy.
    """

    key: str
    problem: str
    value: str
    settable: bool = True

    @property
    def message(self) -> str:
        """The whole, on one line."""
        return f"{self.key}: {self.problem}; {f'set it to {self.value}' if self.settable else self.value}"


def advise(plan: Plan, preview: Preview) -> list[Advice]:
    """All that will hurt in this run, in the order of the config's tables."""
    found = [*_data_advice(plan, preview)]
    if preview.ledger is not None:
        found += _ledger_advice(plan.config, preview, preview.ledger)
    return [*found, *_run_advice(plan.config)]


def _data_advice(plan: Plan, preview: Preview) -> Iterator[Advice]:
    for source, view in zip(plan.sources, preview.sources, strict=True):
        yield from _blend_advice(source.table.weight, view, preview)
        if view.picks_per_slice is not None:
            yield from _slice_advice(plan.config, view, preview.world_size)
            yield from _pool_advice(view)
    if preview.ends_at_step is not None:
        problem = f"is false, and the data runs out at step {preview.ends_at_step} of {preview.steps}"
        yield Advice("data.mixing.repeat", problem, "true")


def _blend_advice(weight: float | ScheduleTable, view: SourceView, preview: Preview) -> Iterator[Advice]:
    key = f"source {view.name}: weight"
    if isinstance(weight, ScheduleTable):
        length = preview.steps if weight.unit == "step" else preview.num_batches
        beyond = [x for x in weight.points if x > length]
        if beyond:
            what = "steps" if weight.unit == "step" else "micro-batches a rank"
            problem = f"has a point at {beyond[0]:,}, but the run has {length:,} {what}: it stops on the way there"
            yield Advice(f"{key}.points", problem, f"move the last point to at most {length}", settable=False)
    if 0 < view.batches < 1:
        problem = f"gives {view.batches:.2g} micro-batches of {preview.num_batches:,}: the source is hardly ever read"
        yield Advice(key, problem, f"raise it {1 / view.batches:.0f} times or more, or set it to 0", settable=False)
    if view.epochs is not None and view.epochs > MAX_EPOCHS:
        problem = f"gives {view.epochs:.1f} epochs of the same tokens; what repeats beyond {MAX_EPOCHS:.0f} adds little"
        remedy = f"lower it about {view.epochs / MAX_EPOCHS:.1f} times, or shorten train.steps"
        yield Advice(key, problem, remedy, settable=False)


def _slice_advice(config: RunConfig, view: SourceView, world_size: int) -> Iterator[Advice]:
    assert view.picks_per_slice is not None
    key = f"source {view.name}: mixing.batch_size"
    largest = max(modality.batch_size for modality in view.modalities)
    rate = world_size / view.picks_per_slice[1]
    if rate >= CHURN:
        size = int(largest * HEALTHY_CHURN / rate)
        problem = (
            f"{largest} makes slices of {view.picks_per_slice[1]} picks on {world_size} rank(s): "
            f"{rate:.2g} readers are exhausted a micro-batch, and the pool is refilled more than it is read"
        )
        remedy = f"set it to {size}" if size >= 1 else "give it longer streams (put files together), or use fewer ranks"
        yield Advice(key, problem, remedy, settable=False)
    if view.lane_fill < LANE_FILL:
        rows = view.lane_fill * largest
        problem = f"{largest} is more than the slices have groups for: the average batch has {rows:.1f} rows"
        yield Advice(key, problem, f"set it to {max(int(rows), 1)}, or lower data.max_group_cells", settable=False)
    if view.idle_share > IDLE:
        problem = (
            f'"per_stream" leaves ranks without rows in {view.idle_share:.0%} of their micro-batches, '
            "because the slices of a stream differ in length"
        )
        remedy = 'set it to "device_per_stream", or give the source longer streams'
        yield Advice(f"source {view.name}: mixing.batching_mode", problem, remedy, settable=False)
    if view.padding_share > PADDING and not config.data.pack:
        problem = f"{config.data.seq_len} pads {view.padding_share:.0%} of the tokens of source {view.name}"
        yield Advice("data.seq_len", problem, str(max(int(config.data.seq_len * (1 - view.padding_share) / 2), 1)))


def _pool_advice(view: SourceView) -> Iterator[Advice]:
    sizes = {modality.name: modality.batch_size for modality in view.modalities}
    small, large = min(sizes, key=lambda m: sizes[m]), max(sizes, key=lambda m: sizes[m])
    if sizes[large] >= BATCH_RATIO * sizes[small]:
        waits = {modality.name: modality.longest_wait_steps for modality in view.modalities}
        problem = (
            f"{large} has {sizes[large]} and {small} {sizes[small]} in one pool: {large} has few picks and waits for them "
            f"(up to {waits[large]} steps, {small} up to {waits[small]}), and steps differ as much in their tokens"
        )
        value = "{ " + f"{small} = {-(-sizes[large] // SOFT_BATCH_RATIO)}" + " }"
        yield Advice("data.mixing.batch_size_by_modality", problem, value, settable=False)
    yield from (_absence(view, modality) for modality in view.modalities if modality.absent_share > ABSENT)


def _absence(view: SourceView, modality: ModalityView) -> Advice:
    total = sum(each.streams for each in view.modalities)
    wanted = min(total, -(-2 * total // modality.streams))
    problem = (
        f"{view.num_mixed} readers leave {modality.name} ({modality.streams} of {total} streams) without an active "
        f"reader in {modality.absent_share:.0%} of the picks"
    )
    remedy = f"set it to {wanted}, or make {modality.name} a source of its own"
    return Advice(f"source {view.name}: mixing.num_streams_mixed", problem, remedy, settable=False)


def _ledger_advice(config: RunConfig, preview: Preview, ledger: LedgerView) -> Iterator[Advice]:
    needed = max(min(ledger.wait_bound_steps, preview.steps), ledger.counted_wait_steps)
    if ledger.stale_threshold is not None and ledger.stale_threshold < needed:
        if ledger.waits_beyond_threshold:
            problem = (
                f"{ledger.stale_threshold} steps: groups wait up to {ledger.counted_wait_steps} for their next cell, and "
                f"{ledger.waits_beyond_threshold} waits are longer; their states are evicted while they are needed"
            )
        else:
            problem = (
                f"{ledger.stale_threshold} steps holds for this seed (longest wait {ledger.counted_wait_steps}), but not "
                f"for every order of picks: with another seed waits can come near 2 K n = {ledger.wait_bound_steps} steps"
            )
        yield Advice("ledger.stale_threshold", problem, str(needed))
    if ledger.mode == "full" and config.ledger.wipe_every <= preview.steps:
        wipes = preview.steps // config.ledger.wipe_every
        problem = (
            f'"full" drops every state {wipes} times in this run, up to {ledger.counted_in_flight} groups a rank '
            "in the middle, and counts no false eviction"
        )
        yield Advice("ledger.wipe_mode", problem, '"lru"')
    if ledger.capacity > SPARE_LEDGER * ledger.groups_in_flight and ledger.megabytes >= SPARE_MEGABYTES:
        problem = (
            f"{ledger.capacity:,} rows take {ledger.megabytes:,.0f} MB on each device; at most "
            f"{ledger.groups_in_flight:,} groups are in flight"
        )
        yield Advice("ledger.capacity", problem, str(ledger.groups_in_flight))


def _run_advice(config: RunConfig) -> Iterator[Advice]:
    steps, warmup = config.train.steps, config.scheduler.warmup_steps
    if warmup > LONG_WARMUP * steps:
        problem = f"{warmup} of {steps} steps: most of the run is spent below the configured learning rate"
        yield Advice("scheduler.warmup_steps", problem, str(max(steps // 10, 1)))
    if config.eval.every > steps:
        yield Advice(
            "eval.every", f"{config.eval.every} is beyond the run's {steps} steps: it is never evaluated", str(steps)
        )
    if steps > 1 and config.metrics.log_interval >= steps:
        problem = (
            f"{config.metrics.log_interval} logs the first and the last of {steps} steps alone: nothing to diagnose"
        )
        yield Advice("metrics.log_interval", problem, str(max(steps // 20, 1)))
