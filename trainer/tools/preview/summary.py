"""The numbers of a run before it starts, for `train preview` to print and to warn about."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trainer.arrays import Ints
from trainer.config.data_tables import MixingTable
from trainer.config.rules import mixing_of, reads_lanes
from trainer.data.groups import OpenStream
from trainer.data.mixing import Slice, num_rows
from trainer.data.weights import WeightSpec, positions
from trainer.options import MicroBatches
from trainer.tools import limits
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
    picks: float | None = None  # documents begun
    exhausts: float | None = None  # streams that end
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
    rank_token_shares: tuple[float, ...] = ()  # of its tokens in an epoch of full rows
    behind_cuts_share: float = 0.0  # of its tokens, those that follow a cut of their document
    wait_bound_steps: int = 0
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
    stale_threshold: int | None
    wait_bound_steps: int  # from a chunk of a document to the next, at most


@dataclass(frozen=True)
class FillView:
    """The positions with a document's token, as a share of those of full rows, as `data/fill`."""

    least: float  # by step, as `most`
    mean: float  # over the whole run
    most: float
    full_tokens: float  # of an average step whose rows are full, over all ranks
    padding: float  # share of the positions behind a document's end, where each begins a row
    better_seq_len: int  # a shorter `data.seq_len` that pads few positions; 0: none does
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
    has_full_rows: bool = False  # only of such a run it is forecast what it will draw
    is_counted: bool = False  # picks, exhausts and tokens are those of this seed, not averages
    counted_batches: int = 0  # per rank
    ends_at_step: int | None = None  # where a source without `repeat` runs out of data
    fill: FillView | None = None  # None also with data sets of the user's own alone
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
            view = _with_corpus(plan, source, view, streams[source.name], corpora[source.name], total)
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
        ledger=_ledger_view(plan, sources),
    )
    if not reads_lanes(plan.config):
        return preview
    lanes = count_lanes(plan, streams, most=most // 2)  # a row costs as much as two counted batches
    fill = _fill(plan, corpora, lanes)
    return replace(
        preview,
        has_full_rows=True,
        is_counted=lanes.is_whole,
        counted_batches=lanes.num_batches,
        ends_at_step=_ends_at(plan, lanes, sources, fill),
        fill=fill,
        sources=tuple(_with_draws(plan, sources, lanes, fill)),
    )


def _ends_at(plan: Plan, forecast: LanesForecast, sources: Sequence[SourceView], fill: FillView | None) -> int | None:
    """The step at which the data is exhausted; where so much was not counted, about."""
    if forecast.ended_at is not None:
        return plan.batches_by_steps.step_of(forecast.ended_at)
    if fill is None or forecast.is_whole:
        return None
    for source in plan.sources:
        endless = source.table.target is not None or mixing_of(plan.config, source.table).repeat
        if endless and not source.is_off:
            return None
    tokens = sum(source.corpus_tokens for source in sources)
    step = math.ceil(tokens / (fill.mean * fill.full_tokens))
    if step >= plan.config.train.steps:
        return None
    return step


def _micro_batches(batches: MicroBatches) -> str:
    first = counted(batches.first, "micro-batch")
    if batches.auto is not None:
        return f"{first} at first (the run may double them, up to {batches.most})"
    if batches.is_constant:
        return first
    return f"{batches.least} to {batches.most} micro-batches"


def _fill(plan: Plan, corpora: Mapping[str, Corpus], forecast: LanesForecast) -> FillView | None:
    """The fill over the run: uncounted steps repeat the last epoch, or the second half."""
    tokens, full = (column[forecast.full > 0] for column in (forecast.tokens, forecast.full))
    if not len(full):
        return None
    shards = np.array(list(forecast.shards.values()))  # [sources, shards, 3]
    rows, mean = plan.config.data.mixing.batch_size, tokens.sum() / full.sum()
    by_row, longest = shards[:, :, 0].sum(axis=0) / rows, shards[:, :, 1].max(axis=0)
    # A document longer than a row's share of an epoch leaves the other rows idle until it ends.
    worst = int((longest / np.maximum(by_row, 1)).argmax())
    if not forecast.is_whole:
        steps = len(full)
        epoch_tokens = max(longest[worst], by_row[worst]) * rows * plan.facts.data_shards
        period = math.ceil(epoch_tokens / full.mean())
        begin = steps // 2
        if period <= steps:
            begin = steps - period
        times, more = divmod(plan.config.train.steps - steps, steps - begin)
        sums = []
        for column in (tokens, full):
            repeated, rest = column[begin:].sum(), column[begin : begin + more].sum()
            sums.append(column.sum() + times * repeated + rest)
        mean = sums[0] / sums[1]
    positions_padded = np.maximum(sum(each.padded for each in corpora.values()), 1)
    padding = 1 - shards[:, :, 0].sum() / positions_padded
    padded, better_seq_len = 0.0, 0
    # Rows that run on from one document to the next have no padding.
    if not forecast.runs_on:
        padded = float(padding[0])
        good = np.flatnonzero(padding <= limits.GOOD_PADDING)
        if len(good):
            better_seq_len = plan.config.data.seq_len >> int(good[0])
    fills = tokens / full
    return FillView(
        least=float(fills.min()),
        mean=float(mean),
        most=float(fills.max()),
        full_tokens=float(forecast.full.mean()),
        padding=padded,
        better_seq_len=better_seq_len,
        documents=int(shards[:, :, 2].sum(axis=0).min()),
        longest=int(longest[worst]),
        row_tokens=float(by_row[worst]),
    )


def _with_corpus(
    plan: Plan,
    source: Source,
    view: SourceView,
    streams: Mapping[str, OpenStream],
    corpus: Corpus,
    total: int,
) -> SourceView:
    """The source with its content; all sources together have `total` tokens."""
    mixing, wait = mixing_of(plan.config, source.table), 1  # full rows are read each time
    if not reads_lanes(plan.config):
        picks = _picks_per_slice(plan, mixing, streams.values())
        readers = min(mixing.num_streams_mixed, len(picks))
        wait = limits.wait_bound(picks, readers, view.batch_share, plan.batches_by_steps.least)
    modalities = []
    for name, tokens in sorted(corpus.tokens.items()):
        counts = corpus.streams[name], corpus.groups[name]
        modalities.append(ModalityView(name, *counts, tokens, tokens / total))
    return replace(
        view,
        num_mixed=min(mixing.num_streams_mixed, len(streams)),
        behind_cuts_share=corpus.behind_cuts / corpus.tokens.total(),
        wait_bound_steps=wait,
        modalities=tuple(modalities),
    )


def _picks_per_slice(plan: Plan, mixing: MixingTable, streams: Iterable[OpenStream]) -> list[int]:
    """The picks that a data shard gets out of its slice of each stream, without empty ones."""
    shards, picks = plan.facts.data_shards, list[int]()
    for opened in streams:
        lanes = mixing.batch_size_by_modality.get(opened.stream.modality, mixing.batch_size)
        cells = opened.groups.num_cells
        slices = [Slice(0, at, shards).of(opened, cells) for at in range(shards)]
        own = [num_rows(cells[each], lanes) for each in slices]
        if mixing.batching_mode == "per_stream":  # the ranks read a stream together
            own = [max(own)]
        picks += filter(None, own)
    return picks


def _with_draws(
    plan: Plan, sources: Sequence[SourceView], forecast: LanesForecast, fill: FillView | None
) -> list[SourceView]:
    """The sources of full rows. Where the run was not counted to its end, a source gives its share
    of the tokens, and its modalities theirs of an epoch."""
    tokens_per_batch = 0.0
    if fill is not None:
        tokens_per_batch = fill.mean * fill.full_tokens * plan.config.train.steps / plan.num_batches
    found = []
    for source, view in zip(plan.sources, sources, strict=True):
        epoch = view.corpus_tokens
        if epoch:
            passes = view.batches * tokens_per_batch / epoch
            if not mixing_of(plan.config, source.table).repeat:
                passes = min(passes, 1.0)
            modalities = tuple(_drawn(each, view.name, passes, forecast) for each in view.modalities)
            tokens = sum(each.tokens or 0.0 for each in modalities)
            shares = tuple((forecast.shards[view.name][:, 0] / epoch).tolist())
            view = replace(view, tokens=tokens, epochs=tokens / epoch, rank_token_shares=shares)
            view = replace(view, modalities=modalities)
        found.append(view)
    total = max(sum(view.tokens or 0.0 for view in found), 1)
    for at, view in enumerate(found):
        shown = [replace(each, drawn_share=(each.tokens or 0.0) / total) for each in view.modalities]
        found[at] = replace(view, modalities=tuple(shown))
    return found


def _drawn(view: ModalityView, source: str, passes: float, forecast: LanesForecast) -> ModalityView:
    """A modality with what the run draws of it: counted, or `passes` times its content."""
    if not forecast.is_whole:
        picks, exhausts = passes * view.corpus_documents, passes * view.streams
        return replace(view, picks=picks, exhausts=exhausts, tokens=passes * view.corpus_tokens)
    tallies, name = forecast.tallies[source], view.name
    picks = float(sum(tally.picks[name] for tally in tallies))
    exhausts = float(sum(tally.exhausts[name] for tally in tallies))
    tokens = sum(tally.tokens[name] for tally in tallies)
    return replace(view, picks=picks, exhausts=exhausts, tokens=tokens)


def _ledger_view(plan: Plan, sources: Sequence[SourceView]) -> LedgerView | None:
    width, table = plan.state_width(), plan.config.ledger
    if width == 0:
        return None
    threshold = None
    if table.wipe_mode == "periodic_stale":
        threshold = table.stale_threshold
    return LedgerView(
        mode=table.wipe_mode,
        capacity=table.capacity,
        groups_in_flight=plan.facts.groups_in_flight,
        capacity_to_change_ranks=plan.facts.capacity_to_change_ranks,
        megabytes=ledger_bytes(table, width) / 1e6,
        stale_threshold=threshold,
        wait_bound_steps=max((source.wait_bound_steps for source in sources), default=0),
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
