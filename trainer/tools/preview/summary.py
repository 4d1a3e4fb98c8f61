"""The numbers of a run before it starts, and the tables in which `train preview` prints them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from trainer.arrays import Ints
from trainer.config.rules import mixing_of, reads_lanes
from trainer.data.weights import WeightSpec, positions
from trainer.errors import UserError
from trainer.micro_batches import MicroBatches
from trainer.tools.fitted_table import Column, fitted_table
from trainer.tools.preview.lanes_forecast import MAX_COUNTED, Corpus, LanesForecast, count_lanes, measure, open_lengths
from trainer.training.setup.plan import Plan, ledger_bytes
from trainer.training.setup.sources import Source
from trainer.wording import counted

SAMPLED = 1 << 14  # batches of a piece of the run


@dataclass(frozen=True)
class ModalityView:
    """One modality of a source over all ranks (see docs/preview.md). None: not forecast."""

    name: str
    streams: int
    corpus_documents: int  # in a pass over its training documents, as `corpus_tokens`
    corpus_tokens: int
    corpus_share: float = 0.0  # of the tokens of all countable sources in such a pass
    drawn_share: float | None = None  # of the tokens that the run reads
    tokens: float | None = None


@dataclass(frozen=True, kw_only=True)
class SourceView:
    """One source over the run. Only the first three fields are known of a custom `target`."""

    name: str
    batches: float  # expected micro-batches per rank (mean over seeds)
    batch_share: float
    tokens: float | None = None  # None: not forecast, as `epochs`
    epochs: float | None = None
    num_mixed: int = 0  # K, or the number of streams if that is less
    modalities: tuple[ModalityView, ...] = ()

    @property
    def corpus_tokens(self) -> int:
        """Tokens of an epoch."""
        return sum(each.corpus_tokens for each in self.modalities)


@dataclass(frozen=True)
class LedgerView:
    """The ledger of one rank, and the states it must hold."""

    mode: str
    capacity: int
    groups_in_flight: int  # states needed at once, at most: one per row, or K x batch size
    capacity_to_change_ranks: int  # as many after a resume on other ranks
    megabytes: float


@dataclass(frozen=True)
class FillView:
    """The positions with a document's token, as a share of those of full rows, as `data/fill`."""

    least: float  # by step, as `most`
    mean: float  # over the whole run
    most: float
    full_tokens: float  # of an average step whose rows are full, over all ranks
    padding: float  # share of the positions behind a document's end, where each begins a row
    documents: int  # of the data shard with fewest in an epoch
    longest: int  # tokens of the longest document of the shard where it is most in the way
    row_tokens: float  # that a row of that shard reads in an epoch


@dataclass(frozen=True, kw_only=True)
class Preview:
    """All numbers of a run before it starts."""

    name: str
    world_size: int
    data_shards: int
    steps: int
    micro_batches: str  # in words
    num_batches: int  # micro-batches per rank; with `auto`, if it never grew
    tokens_per_step: int  # at most, over all ranks
    # Only of such a run, without data sets of the user's own, it is forecast what it will draw.
    has_full_rows: bool = False
    is_counted: bool = False  # tokens are those of this seed, not averages
    counted_batches: int = 0  # per rank
    ends_at_step: int | None = None  # where a source without `repeat` runs out of data
    fill: FillView | None = None
    sources: tuple[SourceView, ...]
    ledger: LedgerView | None  # None for a model without recurrent state


def make_preview(plan: Plan, *, most: int = MAX_COUNTED) -> Preview:
    """Compute a preview. Opens every stream, but reads only document lengths.
    `most`: rows that are counted, over all data shards; beyond them numbers are averages.
    Raises UserError: a stream cannot be opened, a source has nothing to train on, or the model
    lacks the state that a setting needs."""
    plan.state_width()  # or an error, before any file is opened
    read = [source for source in plan.sources if source.streams and not source.is_off]
    streams = {source.name: open_lengths(plan, source) for source in read}
    corpora = {name: measure(each, plan.config.row_tokens) for name, each in streams.items()}
    weights = [source.weight for source in plan.sources]
    expected = expected_batches(weights, plan.num_batches, plan.batches_by_steps)
    total = max(sum(each.tokens.total() for each in corpora.values()), 1)
    sources = []
    for source, batches in zip(plan.sources, expected, strict=True):
        view = SourceView(name=source.name, batches=batches, batch_share=batches / plan.num_batches)
        if source.name in corpora:
            view = _with_corpus(plan, source, view, corpora[source.name], total)
        sources.append(view)
    preview = Preview(
        name=plan.config.run.name,
        world_size=plan.facts.world_size,
        data_shards=plan.facts.data_shards,
        steps=plan.config.train.steps,
        micro_batches=_micro_batches(plan.config.micro_batches),
        num_batches=plan.num_batches,
        tokens_per_step=plan.facts.tokens_per_step,
        sources=tuple(sources),
        ledger=_ledger_view(plan),
    )
    has_own = any(source.table.target is not None and not source.is_off for source in plan.sources)
    if not reads_lanes(plan.config) or has_own:
        return preview
    lanes = count_lanes(plan, streams, most=most // 2)  # a row costs as much as two counted batches
    fill, ends_at = _fill(plan, corpora, lanes), None
    if lanes.ended_at is not None:
        ends_at = plan.batches_by_steps.step_of(lanes.ended_at)
    return replace(
        preview,
        has_full_rows=True,
        is_counted=lanes.is_whole,
        counted_batches=lanes.num_batches,
        ends_at_step=ends_at,
        fill=fill,
        sources=tuple(_with_draws(plan, sources, lanes, fill)),
    )


def _micro_batches(batches: MicroBatches) -> str:
    first = counted(batches.first, "micro-batch")
    if batches.auto is not None:
        return f"{first} at first (the run may double them, up to {batches.most})"
    if batches.is_constant:
        return first
    return f"{batches.least} to {batches.most} micro-batches"


def _fill(plan: Plan, corpora: Mapping[str, Corpus], forecast: LanesForecast) -> FillView:
    """The fill of the counted steps, which stand for all."""
    shards = np.array(list(forecast.shards.values()))  # [sources, shards, 3]
    by_row = shards[:, :, 0].sum(axis=0) / plan.config.data.mixing.batch_size
    longest = shards[:, :, 1].max(axis=0)
    # A document longer than a row's share of an epoch leaves the other rows idle until it ends.
    worst = int((longest / np.maximum(by_row, 1)).argmax())
    padding = 0.0
    if not forecast.runs_on:  # rows that run on from one document to the next have no padding
        positions = sum(each.padded for each in corpora.values())
        padding = 1 - float(shards[:, :, 0].sum()) / max(positions, 1)
    fills = forecast.tokens / forecast.full
    return FillView(
        least=float(fills.min()),
        mean=float(forecast.tokens.sum() / forecast.full.sum()),
        most=float(fills.max()),
        full_tokens=float(forecast.full.mean()),
        padding=padding,
        documents=int(shards[:, :, 2].sum(axis=0).min()),
        longest=int(longest[worst]),
        row_tokens=float(by_row[worst]),
    )


def _with_corpus(plan: Plan, source: Source, view: SourceView, corpus: Corpus, total: int) -> SourceView:
    """The source with its content; all sources together have `total` tokens."""
    modalities = []
    for name, tokens in sorted(corpus.tokens.items()):
        counts = corpus.streams[name], corpus.groups[name]
        modalities.append(ModalityView(name, *counts, tokens, tokens / total))
    readers = mixing_of(plan.config, source.table).num_streams_mixed
    return replace(view, num_mixed=min(readers, corpus.streams.total()), modalities=tuple(modalities))


def _with_draws(plan: Plan, sources: Sequence[SourceView], forecast: LanesForecast, fill: FillView) -> list[SourceView]:
    """The sources of full rows. Where the run was not counted to its end, a source gives its share
    of the tokens, and its modalities theirs of an epoch."""
    tokens_per_batch = fill.mean * fill.full_tokens * plan.config.train.steps / plan.num_batches
    found = []
    for source, view in zip(plan.sources, sources, strict=True):
        epoch = view.corpus_tokens
        if epoch:
            passes = view.batches * tokens_per_batch / epoch
            if not mixing_of(plan.config, source.table).repeat:
                passes = min(passes, 1.0)
            tokens = {each.name: passes * each.corpus_tokens for each in view.modalities}
            if forecast.is_whole:
                tokens = {each.name: float(forecast.drawn[view.name][each.name]) for each in view.modalities}
            modalities = tuple(replace(each, tokens=tokens[each.name]) for each in view.modalities)
            drawn = sum(tokens.values())
            view = replace(view, tokens=drawn, epochs=drawn / epoch, modalities=modalities)
        found.append(view)
    total = max(sum(view.tokens or 0.0 for view in found), 1)
    for at, view in enumerate(found):
        shown = [replace(each, drawn_share=(each.tokens or 0.0) / total) for each in view.modalities]
        found[at] = replace(view, modalities=tuple(shown))
    return found


def _ledger_view(plan: Plan) -> LedgerView | None:
    width, table = plan.state_width(), plan.config.ledger
    if width == 0:
        return None
    return LedgerView(
        mode=table.wipe_mode,
        capacity=table.capacity,
        groups_in_flight=plan.facts.groups_in_flight,
        capacity_to_change_ranks=plan.facts.capacity_to_change_ranks,
        megabytes=ledger_bytes(table, width) / 1e6,
    )


def expected_batches(weights: Sequence[WeightSpec], num_batches: int, micro_batches: MicroBatches) -> list[float]:
    """The expected number of micro-batches of each source: the sum of its probability over the run.

    Between two points of the schedules a probability is smooth: long pieces are sampled.
    """
    edges = {0, num_batches}
    for spec in weights:
        points = set(spec.points)
        if spec.unit != "batch":
            points = {micro_batches.batches_before(max(step, 1)) for step in points}
        edges |= points
    sums = np.zeros(len(weights))
    for start, end in itertools.pairwise(sorted(edge for edge in edges if edge <= num_batches)):
        count = min(end - start, SAMPLED)
        middles = start + (np.arange(count) + 0.5) * ((end - start) / count)
        shares = _shares_at(weights, middles.astype(np.int64), micro_batches)
        sums += shares.mean(axis=1) * (end - start)
    return sums.tolist()


def _shares_at(weights: Sequence[WeightSpec], batches: Ints, micro_batches: MicroBatches) -> npt.NDArray[np.float64]:
    """The probability of each source at each batch, float64 [sources, batches]; or zero."""
    places = [positions(spec.unit, batches, micro_batches) for spec in weights]
    raw = np.array([spec.evaluate_many(at) for spec, at in zip(weights, places, strict=True)])
    total = raw.sum(axis=0)
    shares: npt.NDArray[np.float64] = np.divide(raw, total, out=np.zeros_like(raw), where=total > 0)
    return shares


# ---- In the terminal


def print_preview(preview: Preview, warnings: Sequence[UserError], console: Console) -> None:
    """Print tables and warnings."""
    tables = [_source_columns(preview), _modality_columns(preview)]
    parts: list[RenderableType] = [Text(_headline(preview))]
    for title, columns in tables:
        parts.append(fitted_table(columns, width=console.width, title=title))
    if preview.ledger is not None:
        parts.append(_ledger_table(preview, preview.ledger))
    parts += [Text(f"warning: {warning.message}") for warning in warnings]
    count = counted(len(warnings), "warning") if warnings else "no warnings"
    for part in (*parts, Text(count)):
        console.print(part, highlight=False)


def _headline(preview: Preview) -> str:
    part, ranks, fill = _part(preview), counted(preview.world_size, "rank"), preview.fill
    if part != "rank":
        ranks += f" with {preview.data_shards} data shards"
    size = f"at most {preview.tokens_per_step:,} tokens per step"
    if fill is not None:
        size = f"{fill.mean * fill.full_tokens:,.0f} tokens per step of {fill.full_tokens:,.0f} "
        size += f"(fill {fill.mean:.1%}, by step {fill.least:.1%} to {fill.most:.1%})"
    text = f"{preview.name}: {counted(preview.steps, 'step')} of {preview.micro_batches} "
    text += f"on {ranks} ({preview.num_batches:,} per {part}); {size}"
    if not preview.has_full_rows:
        return f'{text}\nwhat the run will draw is forecast of full rows of files only (data.mixing.batching_mode = "per_row")'
    if preview.ends_at_step is not None:
        return f"{text}\nthe data is exhausted at step {preview.ends_at_step:,}"
    if not preview.is_counted:
        counted_part = f"the first {preview.counted_batches:,} of {preview.num_batches:,} batches"
        return f"{text}\nthe fill was counted over {counted_part}; all other numbers are averages"
    return text


def _part(preview: Preview) -> str:
    """The name of a reader of a part of the data."""
    if preview.data_shards == preview.world_size:
        return "rank"
    return "data shard"


def _number(value: float | None, form: str, unknown: str) -> str:
    return unknown if value is None else format(value, form)


def _numbers(heading: str, values: Sequence[float | None], leave_out: int = 0, form: str = ",.0f") -> Column:
    return Column(heading, [format(value or 0.0, form) for value in values], "right", leave_out)


def _source_columns(preview: Preview) -> tuple[str, list[Column]]:
    sources = preview.sources
    columns = [
        Column("source", [escape(each.name) for each in sources]),
        _numbers("expected\nshare", [each.batch_share for each in sources], form=".1%"),
    ]
    if preview.has_full_rows:
        tokens = [_number(each.tokens, ",.0f", "unknown") for each in sources]
        epochs = [_number(each.epochs, ".2f", "") for each in sources]
        columns += [Column("tokens", tokens, "right"), Column("epochs", epochs, "right")]
    columns.append(Column("open\nstreams", [str(each.num_mixed or "") for each in sources], "right", leave_out=2))
    return "Sources, over all ranks", columns


def _modality_columns(preview: Preview) -> tuple[str, list[Column]]:
    names: list[str] = []
    views: list[ModalityView] = []
    for source in preview.sources:
        names += [escape(source.name)] * len(source.modalities)
        views += source.modalities
    columns = [
        Column("source", names),
        Column("modality", [escape(view.name) for view in views]),
        _numbers("streams", [view.streams for view in views], 3),
    ]
    share = _numbers("of\ncorpus", [view.corpus_share for view in views], 1, ".1%")
    if not preview.has_full_rows:
        columns.append(_numbers("documents", [view.corpus_documents for view in views]))
        columns.append(_numbers("tokens", [view.corpus_tokens for view in views]))
        return "Modalities, in a pass over the training documents", [*columns, share]
    columns += [
        _numbers("tokens", [view.tokens for view in views], 2),
        share,
        _numbers("of\ndrawn", [view.drawn_share for view in views], 1, ".1%"),
    ]
    return "Modalities, over all ranks", columns


def _ledger_table(preview: Preview, ledger: LedgerView) -> Table:
    part, needed = _part(preview), "open streams x batch size"
    if preview.has_full_rows:
        needed = "one per row"
    others = f"a resume on another number of {part}s may need {ledger.capacity_to_change_ranks:,}"
    if ledger.capacity < ledger.capacity_to_change_ranks:
        others += ": more than the capacity"
    table = Table("", "", title=f"Ledger, per {part}", title_justify="left", show_header=False)
    table.add_row("mode", ledger.mode)
    table.add_row("capacity", f"{ledger.capacity:,} states, {ledger.megabytes:,.1f} MB")
    table.add_row("needed", f"at most {ledger.groups_in_flight:,} states ({needed})")
    table.add_row("on other ranks", others)
    return table
