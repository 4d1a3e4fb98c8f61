"""Warnings about harmful settings: the config key, its effect on this run, and a better value.

docs/preview.md gives the reasons for the thresholds. Those that `train diagnose` applies after the run are in
`trainer.tools.limits`; settings that need no forecast are doubts of the plan (`trainer.training.setup.plausible`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import starmap

from trainer.config.base import ScheduleTable
from trainer.config.data_tables import DataTable
from trainer.config.schema import RunConfig
from trainer.tools import limits
from trainer.tools.preview.summary import LedgerView, Preview, SourceView
from trainer.training.setup.plan import Plan
from trainer.training.setup.plausible import never_reached
from trainer.wording import counted

BATCH_RATIO = 8  # largest over smallest batch size of a pool
ABSENT = 0.05  # share of the picks of a pool without a reader of a modality
MAX_EPOCHS = 4.0
UNEVEN_RANKS = 2.0  # most over fewest tokens of a rank
PADDING = 0.3  # share of the tokens of all cells
LANE_FILL = 0.5  # rows of the average batch over the batch size
SKEW = 2.0  # of the drawn share over that of the corpus, or the other way
SEEN = 0.01  # share below which a modality may be skewed


@dataclass(frozen=True)
class ConfigWarning:
    """A harmful setting: its effect on this run, and a better value, as TOML if `--set key=value` is the fix (`settable`),
    otherwise in words."""

    key: str
    problem: str
    value: str
    settable: bool = False

    @property
    def message(self) -> str:
        """All of it on one line."""
        return f"{self.key}: {self.problem}; {f'set it to {self.value}' if self.settable else self.value}"


def find_warnings(plan: Plan, preview: Preview) -> list[ConfigWarning]:
    """All warnings about a run: the doubts of its plan, then those of the forecast in the order of the config's tables."""
    found = [ConfigWarning(doubt.key, doubt.problem, doubt.fix) for doubt in plan.doubts]
    for source, view in zip(plan.sources, preview.sources, strict=True):
        found += _blend_warnings(source.table.weight, view, preview)
        if view.picks_per_slice is not None:
            found += _slice_warnings(plan.config, view, preview.data_shards, view.picks_per_slice[1])
            found += _pool_warnings(view)
    if preview.ends_at_step is not None:
        problem = f"is false, and the data is exhausted at step {preview.ends_at_step} of {preview.steps}"
        found.append(ConfigWarning("data.mixing.repeat", problem, "true", settable=True))
    if preview.ledger is not None:
        found += _ledger_warnings(plan.config, preview, preview.ledger)
    return [*found, *mix_warnings(plan, preview), *_run_warnings(plan.config)]


def mix_warnings(plan: Plan, preview: Preview) -> Iterator[ConfigWarning]:
    """About modalities that are drawn in another share of the tokens than they are of the corpus.

    Not of a blend with a schedule, whose shares are meant to change.
    """
    if any(isinstance(source.table.weight, ScheduleTable) for source in plan.sources):
        return
    known = [source for source in preview.sources if source.modalities]
    skewed = [
        f"{view.name} is {view.corpus_share:.1%} of the corpus and {view.drawn_share:.1%} of what is drawn"
        for source in known
        for view in source.modalities
        if max(view.corpus_share, view.drawn_share) >= SEEN
        and not 1 / SKEW <= view.drawn_share / max(view.corpus_share, 1e-12) <= SKEW
    ]
    fix = "give each modality a source of its own, with a weight (train init writes that), or train longer"
    if len(known) > 1:
        total = sum(source.pass_batches for source in known)
        weights = ", ".join(f"{source.name} = {source.pass_batches / total:.3g}" for source in known)
        fix = f"if that is not meant, the shares of the corpus come from the weights {weights}"
    if skewed:
        yield ConfigWarning("data.source.weight", "; ".join(skewed), fix)


def rank_warnings(plan: Plan, preview: Preview) -> Iterator[ConfigWarning]:
    """About batches and ranks that get no rows of a source, and ranks with far fewer tokens than others."""
    for view in preview.sources:
        if view.rank_token_shares:
            yield from _rank_warnings(view, plan.config.data)


def _blend_warnings(weight: float | ScheduleTable, view: SourceView, preview: Preview) -> Iterator[ConfigWarning]:
    key = f"source {view.name}: weight"
    if isinstance(weight, ScheduleTable):
        steps = weight.unit == "step"
        length, unit = (preview.steps, "steps") if steps else (preview.num_batches, "micro-batches per rank")
        yield from starmap(ConfigWarning, never_reached(key, weight.points, length, unit))
    if 0 < view.batches < 1:
        problem = f"gives {view.batches:.2g} of {preview.num_batches:,} micro-batches: the source is hardly ever read"
        yield ConfigWarning(key, problem, f"raise it {1 / view.batches:.0f} times or more, or set it to 0")
    if view.epochs is not None and view.epochs > MAX_EPOCHS:
        problem = f"reads the source for {view.epochs:.1f} epochs; beyond {MAX_EPOCHS:.0f}, repeated tokens add little"
        yield ConfigWarning(key, problem, f"lower it about {view.epochs / MAX_EPOCHS:.1f} times, or lower train.steps")


def _slice_warnings(config: RunConfig, view: SourceView, world_size: int, median_picks: int) -> Iterator[ConfigWarning]:
    key = f"source {view.name}: mixing.batch_size"
    largest = max(modality.batch_size for modality in view.modalities)
    churn = limits.exhaust_churn(median_picks, world_size, largest)
    if churn.is_beyond:
        fix = "make streams longer (merge files), or use fewer ranks"
        fix = fix if churn.better is None else f"set it to {churn.better}"
        yield ConfigWarning(key, f"{largest}: {churn.words}, which takes most of the time", fix)
    yield from _rank_warnings(view, config.data)
    if view.padding_share > PADDING:
        cut = "" if config.train.tbptt_cells == 1 else f" (rows of {config.row_tokens}, with train.tbptt_cells)"
        problem = f"{config.data.seq_len}{cut} pads {view.padding_share:.0%} of the tokens of source {view.name}"
        shorter = max(int(config.data.seq_len * (1 - view.padding_share) / 2), 1)
        yield ConfigWarning("data.seq_len", problem, str(shorter), settable=True)


def _shorter_groups(data: DataTable) -> str:
    """How to cut documents into shorter groups, which lose the state of what is before them."""
    return (
        f"lower data.max_group_cells ({data.max_group_cells})" if data.max_group_cells else "set data.max_group_cells"
    )


def _rank_warnings(view: SourceView, data: DataTable) -> Iterator[ConfigWarning]:
    """Batches and ranks without rows, and ranks with far fewer tokens than others."""
    if view.lane_fill < LANE_FILL:
        largest = max(modality.batch_size for modality in view.modalities)
        rows = view.lane_fill * largest
        problem = (
            f"{largest} is more than the documents that a rank has of a stream: the average batch has {rows:.1f} rows"
        )
        fix = f"set it to {max(int(rows), 1)}, or {_shorter_groups(data)}"
        yield ConfigWarning(f"source {view.name}: mixing.batch_size", problem, fix)
    key, tokens = f"source {view.name}: mixing.batching_mode", view.rank_token_shares
    is_even = max(tokens) <= UNEVEN_RANKS * min(tokens)
    smaller = f"{_shorter_groups(data)}, " if data.max_group_cells != 1 else ""
    fix = f"{smaller}merge files into longer streams, or use fewer ranks"
    num_idle = sum(not share for share in tokens)
    if view.idle_share > limits.IDLE or num_idle:
        never = f"; {num_idle:,} of {counted(len(tokens), 'rank')} never read it" if num_idle else ""
        problem = (
            f'"{view.batching_mode}" leaves ranks without rows in {view.idle_share:.0%} of their micro-batches '
            f"({view.masked_share[view.batching_mode]:.0%} on the worst rank{never}), because streams have too few documents "
            f"for {len(tokens)} ranks"
        )
        if is_even and (other := view.masked_share["device_per_stream"]) < view.idle_share / 2:
            fix = f'set it to "device_per_stream" (then {other:.0%}), or {fix}'
        yield ConfigWarning(key, problem, fix)
    elif view.batching_mode == "device_per_stream" and not is_even:
        problem = (
            f"gives the ranks between {min(tokens):.1%} and {max(tokens):.1%} of the tokens: documents of a rank with few "
            "tokens are repeated more often"
        )
        yield ConfigWarning(key, problem, fix)


def _pool_warnings(view: SourceView) -> Iterator[ConfigWarning]:
    small = min(view.modalities, key=lambda modality: modality.batch_size)
    large = max(view.modalities, key=lambda modality: modality.batch_size)
    if large.batch_size >= BATCH_RATIO * small.batch_size:
        problem = (
            f"{large.name} has {large.batch_size} and {small.name} {small.batch_size}: {large.name} has fewer batches, so "
            f"that its documents wait up to {large.longest_wait_steps} steps for their next chunk ({small.name}: "
            f"{small.longest_wait_steps}), and the number of tokens per step varies by this factor"
        )
        even = f"{{ {small.name} = {-(-large.batch_size // limits.EVEN_BATCHES)} }}"
        yield ConfigWarning("data.mixing.batch_size_by_modality", problem, even)
    total = sum(modality.streams for modality in view.modalities)
    for modality in view.modalities:
        if modality.absent_share > ABSENT:
            wanted = min(total, -(-2 * total // modality.streams))
            problem = (
                f"{view.num_mixed} open streams at a time leave {modality.name} ({modality.streams} of {total} streams) out in "
                f"{modality.absent_share:.0%} of the batches"
            )
            fix = f"set it to {wanted}, or make {modality.name} a source of its own"
            yield ConfigWarning(f"source {view.name}: mixing.num_streams_mixed", problem, fix)


def _ledger_warnings(config: RunConfig, preview: Preview, ledger: LedgerView) -> Iterator[ConfigWarning]:
    threshold, bound, longest = ledger.stale_threshold, ledger.wait_bound_steps, ledger.counted_wait_steps
    if threshold is not None and threshold < max(min(bound, preview.steps), longest):
        problem = (
            f"{threshold} steps is enough for this seed (longest wait {longest}), but with another one a document may wait "
            f"up to {bound} steps for its next chunk"
        )
        if ledger.waits_beyond_threshold:
            problem = (
                f"{threshold} steps: documents wait up to {longest} steps for their next chunk, and "
                f"{ledger.waits_beyond_threshold} waits are longer; their states are evicted while they are needed"
            )
        yield ConfigWarning("ledger.stale_threshold", problem, str(max(bound, longest)), settable=True)
    if ledger.mode == "full" and config.ledger.wipe_every <= preview.steps:
        problem = (
            f'"full" drops every state {preview.steps // config.ledger.wipe_every} times in this run, and does not count '
            "false evictions"
        )
        yield ConfigWarning("ledger.wipe_mode", problem, '"lru"', settable=True)
    row_bytes = round(ledger.megabytes * 1e6 / ledger.capacity)
    oversize = limits.ledger_oversize(ledger.capacity, ledger.groups_in_flight, row_bytes)
    if oversize.is_beyond:
        yield ConfigWarning("ledger.capacity", oversize.words, str(oversize.better), settable=True)


def _run_warnings(config: RunConfig) -> Iterator[ConfigWarning]:
    steps, interval = config.train.steps, config.metrics.log_interval
    if config.eval.every > steps:
        problem = f"{config.eval.every} exceeds the {steps} steps of the run: it is never evaluated"
        yield ConfigWarning("eval.every", problem, str(steps), settable=True)
    if steps > 1 and interval >= steps:
        problem = f"{interval} logs only the first and the last of {steps} steps: too few to diagnose"
        yield ConfigWarning("metrics.log_interval", problem, str(max(steps // 20, 1)), settable=True)
