"""Warnings about harmful settings: the config key, its effect on this run, and a better value.

The thresholds and their reasons are in `trainer.tools.limits`, as those that `train diagnose`
applies after the run; settings that need no forecast are doubts of the plan
(`trainer.tools.doubts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import starmap

from trainer.config.data_tables import ScheduleTable
from trainer.config.schema import RunConfig
from trainer.tools import limits
from trainer.tools.doubts import never_reached
from trainer.tools.preview.summary import FillView, LedgerView, Preview, SourceView
from trainer.training.setup.plan import Plan
from trainer.wording import counted


@dataclass(frozen=True)
class ConfigWarning:
    """A harmful setting, and its effect on this run."""

    key: str
    problem: str
    value: str  # a better one: as TOML if it is `settable`, otherwise what to do in words
    settable: bool = False  # `--set key=value` is the fix

    @property
    def message(self) -> str:
        fix = self.value
        if self.settable:
            fix = f"set it to {self.value}"
        return f"{self.key}: {self.problem}; {fix}"


def _to_set(key: str, problem: str, value: object) -> ConfigWarning:
    return ConfigWarning(key, problem, str(value), settable=True)


def find_warnings(plan: Plan, preview: Preview) -> list[ConfigWarning]:
    """All warnings: the doubts of the plan, then those of the forecast in the config's order."""
    found = [ConfigWarning(doubt.key, doubt.problem, doubt.fix) for doubt in plan.doubts]
    for source, view in zip(plan.sources, preview.sources, strict=True):
        found += _blend_warnings(source.table.weight, view, preview)
    found += fill_warnings(plan, preview)
    if preview.ends_at_step is not None:
        when = f"step {preview.ends_at_step} of {preview.steps}"
        problem = f"is false, and the data is exhausted at {when}"
        found.append(_to_set("data.mixing.repeat", problem, "true"))
    if preview.ledger is not None:
        found += _ledger_warnings(plan.config, preview, preview.ledger)
    return [*found, *mix_warnings(plan, preview), *_run_warnings(plan.config)]


def mix_warnings(plan: Plan, preview: Preview) -> Iterator[ConfigWarning]:
    """About modalities that are drawn in another share of the tokens than the corpus has."""
    # The shares of a blend with a schedule are meant to change.
    is_constant = not any(isinstance(each.table.weight, ScheduleTable) for each in plan.sources)
    if not preview.has_full_rows or not is_constant:
        return
    skewed: list[str] = []
    shares: dict[str, float] = {}
    for source in preview.sources:
        for view in source.modalities:
            drawn, corpus = view.drawn_share or 0.0, view.corpus_share
            shares[source.name] = shares.get(source.name, 0.0) + corpus
            # Where the weight is the corpus's share, only a longer run draws more evenly.
            is_alike = _alike(corpus, drawn) or (len(source.modalities) == 1 and _alike(corpus, source.batch_share))
            if max(corpus, drawn) >= limits.SEEN_SHARE and not is_alike:
                shown = f"{corpus:.1%} of the corpus and {drawn:.1%} of what is drawn"
                skewed.append(f"{view.name} is {shown}")
    fix = "give each modality a source of its own, with a weight (train init writes that), "
    fix += "or train longer"
    if len(shares) > 1:
        weights = ", ".join(f"{name} = {share:.3g}" for name, share in shares.items())
        fix = f"if that is not meant, the shares of the corpus come from the weights {weights}"
    if skewed:
        yield ConfigWarning("data.source.weight", "; ".join(skewed), fix)


def _alike(one: float, other: float) -> bool:
    return one <= limits.SKEW * other and other <= limits.SKEW * one


def fill_warnings(plan: Plan, preview: Preview) -> Iterator[ConfigWarning]:
    """Why full rows have gaps: too few or too long documents for so many rows, or padding."""
    fill, config, rows = preview.fill, plan.config, plan.config.data.mixing.batch_size
    if fill is None or fill.mean >= limits.LOW_FILL:
        return
    fitting = min(fill.documents, int(fill.row_tokens * rows // max(fill.longest, 1)))
    if fitting >= rows:
        if fill.padding > 1 - limits.LOW_FILL:
            yield _padding(plan, fill)
        return
    why = f"the longest document has {fill.longest:,} tokens, "
    why += f"and an epoch {fill.row_tokens:,.0f} for each row"
    if fill.documents < rows:
        each = "data shard" if plan.facts.data_shards > 1 else "run"
        why = f"a {each} has {counted(fill.documents, 'document')} for {counted(rows, 'row')}"
    problem = f"{rows}: {fill.mean:.0%} of the positions hold a token, since {why}"
    cells = max(int(fill.row_tokens // config.data.seq_len), config.train.tbptt_cells)
    others = f"data.max_group_cells = {cells} (which loses state) or more data"
    key = "data.mixing.batch_size"
    if fitting:
        yield _to_set(key, f"{problem} ({others} would also help)", fitting)
    else:
        yield ConfigWarning(key, problem, f"set {others}, or use fewer ranks")


def _padding(plan: Plan, fill: FillView) -> ConfigWarning:
    data, why = plan.config.data, f"pads documents, each of which begins a row, by {fill.padding:.0%}"
    if data.align == "document" and getattr(plan.weightless_model(), "resets_in_one_pass", False):
        return _to_set("data.align", f'"document" {why}', '"stream"')
    problem = f"{data.seq_len} {why}"
    model = "a model that runs resets in one pass (docs/models.md), which needs no padding"
    if not fill.better_seq_len:
        return ConfigWarning("data.seq_len", problem, f"train {model}, or on longer documents")
    return _to_set("data.seq_len", f"{problem}; or train {model}", fill.better_seq_len)


def _blend_warnings(weight: float | ScheduleTable, view: SourceView, preview: Preview) -> Iterator[ConfigWarning]:
    key = f"source {view.name}: weight"
    if isinstance(weight, ScheduleTable):
        length, unit = preview.num_batches, "micro-batches per rank"
        if weight.unit == "step":
            length, unit = preview.steps, "steps"
        yield from starmap(ConfigWarning, never_reached(key, weight.points, length, unit))
    if 0 < view.batches < 1:
        problem = f"gives {view.batches:.2g} of {preview.num_batches:,} micro-batches: "
        problem += "the source is hardly ever read"
        fix = f"raise it {1 / view.batches:.0f} times or more, or set it to 0"
        yield ConfigWarning(key, problem, fix)
    if view.epochs is not None and view.epochs > limits.MAX_EPOCHS:
        problem = f"reads the source for {view.epochs:.1f} epochs; "
        problem += f"beyond {limits.MAX_EPOCHS:.0f}, repeated tokens add little"
        times = view.epochs / limits.MAX_EPOCHS
        yield ConfigWarning(key, problem, f"lower it about {times:.1f} times, or lower train.steps")


def _ledger_warnings(config: RunConfig, preview: Preview, ledger: LedgerView) -> Iterator[ConfigWarning]:
    threshold, bound = ledger.stale_threshold, ledger.wait_bound_steps
    if threshold is not None and threshold < min(bound, preview.steps):
        problem = f"{threshold} steps: a document may wait up to {bound} steps for its next chunk, "
        yield _to_set("ledger.stale_threshold", problem + "and its state is evicted", bound)
    if ledger.mode == "full" and config.ledger.wipe_every <= preview.steps:
        times = preview.steps // config.ledger.wipe_every
        problem = f'"full" drops every state {times} times in this run, '
        problem += "and does not count false evictions"
        yield _to_set("ledger.wipe_mode", problem, '"lru"')
    row_bytes = round(ledger.megabytes * 1e6 / ledger.capacity)
    oversize = limits.ledger_oversize(ledger.capacity, ledger.groups_in_flight, row_bytes)
    if oversize.is_beyond:
        yield _to_set("ledger.capacity", oversize.words, oversize.better)


def _run_warnings(config: RunConfig) -> Iterator[ConfigWarning]:
    steps, interval = config.train.steps, config.metrics.log_interval
    if config.eval.every > steps:
        problem = f"{config.eval.every} exceeds the {steps} steps of the run: it is never evaluated"
        yield _to_set("eval.every", problem, steps)
    if steps > 1 and interval >= steps:
        problem = f"{interval} logs only the first and the last of {steps} steps: too few to diagnose"
        yield _to_set("metrics.log_interval", problem, max(steps // 20, 1))
