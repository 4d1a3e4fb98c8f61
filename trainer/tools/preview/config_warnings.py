"""Warnings about harmful settings: the config key, its effect on this run, and a better value.

docs/preview.md gives the reasons for the thresholds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trainer.config.base import ScheduleTable
from trainer.config.schema import RunConfig
from trainer.tools.preview.summary import LedgerView, Preview, SourceView
from trainer.training.setup.plan import Plan
from trainer.wording import counted

SPARE_LEDGER = 4  # a capacity above this many times the need is waste,
SPARE_MEGABYTES = 64.0  # if the ledger takes at least this much memory
CHURN = 0.5  # readers exhausted per micro-batch, R / n
HEALTHY_CHURN = 1 / 8
BATCH_RATIO = 8  # largest over smallest batch size of a pool
SOFT_BATCH_RATIO = 4
ABSENT = 0.05  # share of the picks of a pool without a reader of a modality
MAX_EPOCHS = 4.0
IDLE = 0.1  # share of the micro-batches in which a rank has no rows, over all ranks
UNEVEN_RANKS = 2.0  # most over fewest tokens of a rank
PADDING = 0.3  # share of the tokens of all cells
LANE_FILL = 0.5  # rows of the average batch over the batch size
PROBE_COST = 0.05  # share of the training time
HEALTHY_PROBE_COST = 0.01
LONG_WARMUP = 0.5  # share of the run
SKEW = 2.0  # of the drawn share over that of the corpus, or the other way
SEEN = 0.01  # share below which a modality may be skewed


@dataclass(frozen=True)
class ConfigWarning:
    """A harmful setting.

    Args:
        key: of the config.
        problem: its effect on this run, with numbers.
        value: a better value, as TOML if `settable`; otherwise in words.
        settable: whether `--set key=value` is the fix.
    """

    key: str
    problem: str
    value: str
    settable: bool = True

    @property
    def message(self) -> str:
        """All of it on one line."""
        return f"{self.key}: {self.problem}; {f'set it to {self.value}' if self.settable else self.value}"


def find_warnings(plan: Plan, preview: Preview) -> list[ConfigWarning]:
    """All warnings about a run: the doubts of its plan, then those of the forecast in the order of the config's tables."""
    found = [ConfigWarning(doubt.key, doubt.problem, doubt.fix, settable=False) for doubt in plan.doubts]
    found += _data_warnings(plan, preview)
    if preview.ledger is not None:
        found += _ledger_warnings(plan.config, preview, preview.ledger)
    return [*found, *mix_warnings(plan, preview), *growth_warnings(plan), *_run_warnings(plan.config)]


def mix_warnings(plan: Plan, preview: Preview) -> Iterator[ConfigWarning]:
    """About modalities that are drawn in another share of the tokens than they are of the corpus.

    Not of a blend with a schedule, whose shares are meant to change.
    """
    if any(isinstance(source.table.weight, ScheduleTable) for source in plan.sources):
        return
    views = [(source, view) for source in preview.sources for view in source.modalities]
    skewed = [
        f"{view.name} is {view.corpus_share:.1%} of the corpus and {view.drawn_share:.1%} of what is drawn"
        for _, view in views
        if max(view.corpus_share, view.drawn_share) >= SEEN
        and not 1 / SKEW <= view.drawn_share / max(view.corpus_share, 1e-12) <= SKEW
    ]
    if not skewed:
        return
    known = [source for source in preview.sources if source.modalities]
    if len(known) > 1:
        total = sum(source.pass_batches for source in known)
        weights = ", ".join(f"{source.name} = {source.pass_batches / total:.3g}" for source in known)
        fix = f"if that is not meant, the shares of the corpus come from the weights {weights}"
    else:
        fix = "give each modality a source of its own, with a weight (train init writes that), or train longer"
    yield ConfigWarning("data.source.weight", "; ".join(skewed), fix, settable=False)


def rank_warnings(plan: Plan, preview: Preview) -> Iterator[ConfigWarning]:
    """About ranks that get no rows of a source, or far fewer tokens than others."""
    for view in preview.sources:
        if view.rank_token_shares:
            yield from _rank_warnings(view, plan.config.data.max_group_cells)


def growth_warnings(plan: Plan) -> Iterator[ConfigWarning]:
    """About a planned number of micro-batches; they need no forecast."""
    batches = plan.config.micro_batches
    length = plan.config.train.steps if batches.unit == "steps" else plan.facts.tokens_in_run
    beyond = [x for x, _ in batches.points if x > length]
    if beyond:
        problem = f"has a point at {beyond[0]:,}, but the run has {length:,} {batches.unit} and never reaches it"
        fix = f"move the last point to at most {length}"
        yield ConfigWarning("train.micro_batches.points", problem, fix, settable=False)


def _data_warnings(plan: Plan, preview: Preview) -> Iterator[ConfigWarning]:
    for source, view in zip(plan.sources, preview.sources, strict=True):
        yield from _blend_warnings(source.table.weight, view, preview)
        if view.picks_per_slice is not None:
            yield from _slice_warnings(plan.config, view, preview.world_size, view.picks_per_slice[1])
            yield from _pool_warnings(view)
    if preview.ends_at_step is not None:
        problem = f"is false, and the data is exhausted at step {preview.ends_at_step} of {preview.steps}"
        yield ConfigWarning("data.mixing.repeat", problem, "true")


def _blend_warnings(weight: float | ScheduleTable, view: SourceView, preview: Preview) -> Iterator[ConfigWarning]:
    key = f"source {view.name}: weight"
    if isinstance(weight, ScheduleTable):
        length = preview.steps if weight.unit == "step" else preview.num_batches
        beyond = [x for x in weight.points if x > length]
        if beyond:
            unit = "steps" if weight.unit == "step" else "micro-batches per rank"
            problem = f"has a point at {beyond[0]:,}, but the run has {length:,} {unit} and never reaches it"
            yield ConfigWarning(f"{key}.points", problem, f"move the last point to at most {length}", settable=False)
    if 0 < view.batches < 1:
        problem = f"gives {view.batches:.2g} of {preview.num_batches:,} micro-batches: the source is hardly ever read"
        fix = f"raise it {1 / view.batches:.0f} times or more, or set it to 0"
        yield ConfigWarning(key, problem, fix, settable=False)
    if view.epochs is not None and view.epochs > MAX_EPOCHS:
        problem = (
            f"repeats the source for {view.epochs:.1f} epochs; beyond {MAX_EPOCHS:.0f}, repeated tokens add little"
        )
        fix = f"lower it about {view.epochs / MAX_EPOCHS:.1f} times, or shorten train.steps"
        yield ConfigWarning(key, problem, fix, settable=False)


def _slice_warnings(config: RunConfig, view: SourceView, world_size: int, median_picks: int) -> Iterator[ConfigWarning]:
    key = f"source {view.name}: mixing.batch_size"
    largest = max(modality.batch_size for modality in view.modalities)
    rate = world_size / median_picks
    if rate >= CHURN:
        size = int(largest * HEALTHY_CHURN / rate)
        problem = (
            f"{largest} makes slices of {median_picks} picks on {counted(world_size, 'rank')}: {rate:.2g} readers are "
            "exhausted per micro-batch, so opening streams takes most of the time"
        )
        fix = f"set it to {size}" if size >= 1 else "make streams longer (merge files), or use fewer ranks"
        yield ConfigWarning(key, problem, fix, settable=False)
    if view.lane_fill < LANE_FILL:
        rows = view.lane_fill * largest
        problem = f"{largest} exceeds the number of groups in the slices: the average batch has {rows:.1f} rows"
        fix = f"set it to {max(int(rows), 1)}, or lower data.max_group_cells"
        yield ConfigWarning(key, problem, fix, settable=False)
    yield from _rank_warnings(view, config.data.max_group_cells)
    if view.padding_share > PADDING and not config.data.pack:
        cut = "" if config.train.tbptt_cells == 1 else f" (rows of {config.row_tokens}, with train.tbptt_cells)"
        problem = f"{config.data.seq_len}{cut} pads {view.padding_share:.0%} of the tokens of source {view.name}"
        shorter = int(config.data.seq_len * (1 - view.padding_share) / 2)
        yield ConfigWarning("data.seq_len", problem, str(max(shorter, 1)))


def _rank_warnings(view: SourceView, max_group_cells: int) -> Iterator[ConfigWarning]:
    """Ranks without rows, and ranks with far fewer tokens than others."""
    key = f"source {view.name}: mixing.batching_mode"
    least, most = min(view.rank_token_shares), max(view.rank_token_shares)
    is_even = most <= UNEVEN_RANKS * least
    smaller = f"lower data.max_group_cells ({max_group_cells}), " if max_group_cells > 1 else ""
    fix = f"{smaller}merge files into longer streams, or use fewer ranks"
    num_idle = sum(not share for share in view.rank_token_shares)
    if view.idle_share > IDLE or num_idle:
        worst = f"{view.masked_share[view.batching_mode]:.0%} on the worst rank"
        never = f"; {num_idle:,} of {counted(len(view.rank_token_shares), 'rank')} never read it" if num_idle else ""
        problem = (
            f'"{view.batching_mode}" leaves ranks without rows in {view.idle_share:.0%} of their micro-batches '
            f"({worst}{never}), because streams have too few groups for {len(view.rank_token_shares)} slices"
        )
        if is_even and view.masked_share["device_per_stream"] < view.idle_share / 2:
            fix = f'set it to "device_per_stream" (then {view.masked_share["device_per_stream"]:.0%}), or {fix}'
        yield ConfigWarning(key, problem, fix, settable=False)
    elif view.batching_mode == "device_per_stream" and not is_even:
        problem = (
            f"gives the ranks between {least:.1%} and {most:.1%} of the tokens: documents of a rank with few tokens are "
            "repeated more often"
        )
        yield ConfigWarning(key, problem, fix, settable=False)


def _pool_warnings(view: SourceView) -> Iterator[ConfigWarning]:
    small = min(view.modalities, key=lambda modality: modality.batch_size)
    large = max(view.modalities, key=lambda modality: modality.batch_size)
    if large.batch_size >= BATCH_RATIO * small.batch_size:
        problem = (
            f"{large.name} has {large.batch_size} and {small.name} {small.batch_size} in one pool: {large.name} has few "
            f"picks and waits for them (up to {large.longest_wait_steps} steps, {small.name} up to "
            f"{small.longest_wait_steps}), and the number of tokens per step varies by this factor"
        )
        value = "{ " + f"{small.name} = {-(-large.batch_size // SOFT_BATCH_RATIO)}" + " }"
        yield ConfigWarning("data.mixing.batch_size_by_modality", problem, value, settable=False)
    total = sum(modality.streams for modality in view.modalities)
    for modality in view.modalities:
        if modality.absent_share > ABSENT:
            wanted = min(total, -(-2 * total // modality.streams))
            problem = (
                f"{view.num_mixed} readers leave {modality.name} ({modality.streams} of {total} streams) without an active "
                f"reader in {modality.absent_share:.0%} of the picks"
            )
            fix = f"set it to {wanted}, or make {modality.name} a source of its own"
            yield ConfigWarning(f"source {view.name}: mixing.num_streams_mixed", problem, fix, settable=False)


def _ledger_warnings(config: RunConfig, preview: Preview, ledger: LedgerView) -> Iterator[ConfigWarning]:
    needed = max(min(ledger.wait_bound_steps, preview.steps), ledger.counted_wait_steps)
    if ledger.stale_threshold is not None and ledger.stale_threshold < needed:
        if ledger.waits_beyond_threshold:
            problem = (
                f"{ledger.stale_threshold} steps: groups wait up to {ledger.counted_wait_steps} steps for their next cell, and "
                f"{ledger.waits_beyond_threshold} waits are longer; their states are evicted while they are needed"
            )
        else:
            problem = (
                f"{ledger.stale_threshold} steps is enough for this seed (longest wait {ledger.counted_wait_steps}), but not "
                f"for every order of picks: with another seed waits may approach 2 K n = {ledger.wait_bound_steps} steps"
            )
        yield ConfigWarning(
            "ledger.stale_threshold", problem, str(max(ledger.wait_bound_steps, ledger.counted_wait_steps))
        )
    if ledger.mode == "full" and config.ledger.wipe_every <= preview.steps:
        wipes = preview.steps // config.ledger.wipe_every
        problem = (
            f'"full" drops every state {wipes} times in this run, of up to {ledger.counted_in_flight} unfinished groups '
            "per rank, and does not count false evictions"
        )
        yield ConfigWarning("ledger.wipe_mode", problem, '"lru"')
    if ledger.capacity > SPARE_LEDGER * ledger.groups_in_flight and ledger.megabytes >= SPARE_MEGABYTES:
        problem = (
            f"{ledger.capacity:,} rows take {ledger.megabytes:,.0f} MB on each device; at most "
            f"{ledger.groups_in_flight:,} groups are in flight"
        )
        yield ConfigWarning("ledger.capacity", problem, str(ledger.groups_in_flight))
    if ledger.probes is not None and ledger.probes.cost > PROBE_COST:
        table, times = config.ledger, ledger.probes.cost / HEALTHY_PROBE_COST
        problem = f"{table.probe_every}: probes take up to {ledger.probes.cost:.0%} of the time"
        interval = int(np.lcm(table.probe_every, config.metrics.log_interval))
        yield ConfigWarning("ledger.probe_every", problem, str(interval * int(np.ceil(times))))


def _run_warnings(config: RunConfig) -> Iterator[ConfigWarning]:
    steps, warmup, interval = config.train.steps, config.scheduler.warmup_steps, config.metrics.log_interval
    if warmup > LONG_WARMUP * steps:
        problem = f"{warmup} of {steps} steps: most of the run is below the configured learning rate"
        yield ConfigWarning("scheduler.warmup_steps", problem, str(max(steps // 10, 1)))
    if config.eval.every > steps:
        problem = f"{config.eval.every} exceeds the {steps} steps of the run: it is never evaluated"
        yield ConfigWarning("eval.every", problem, str(steps))
    if steps > 1 and interval >= steps:
        problem = f"{interval} logs only the first and the last of {steps} steps: too few to diagnose"
        yield ConfigWarning("metrics.log_interval", problem, str(max(steps // 20, 1)))
