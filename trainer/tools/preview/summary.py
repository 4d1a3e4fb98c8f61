"""The numbers of a run before it starts, for `train preview` to print and to warn about."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trainer.arrays import Ints
from trainer.config.rules import mixing_of, reads_lanes
from trainer.data.groups import OpenStream
from trainer.data.mixing import Slice, num_rows
from trainer.data.weights import WeightSpec, positions
from trainer.micro_batches import MicroBatches
from trainer.tools import limits
from trainer.tools.preview.lanes_forecast import (
    MAX_COUNTED,
    Corpus,
    LanesForecast,
    count_lanes,
    measure,
    open_lengths,
)
from trainer.training.setup.plan import Plan, ledger_bytes
from trainer.training.setup.sources import Source
from trainer.wording import counted

SAMPLED = 1 << 14  # batches of a piece of the run


@dataclass(frozen=True)
class ModalityView:
    """One modality of a source over all ranks; docs/preview.md explains the columns. None: not forecast.

    Attributes:
        corpus_documents, corpus_tokens: of a pass over its training documents.
        corpus_share, drawn_share: of the tokens of all countable sources, in such passes and in the run.
        picks: documents that are begun.
        exhausts: streams that end.
    """

    name: str
    streams: int
    corpus_documents: int
    corpus_tokens: int
    corpus_share: float = 0.0
    drawn_share: float | None = None
    picks: float | None = None
    exhausts: float | None = None
    tokens: float | None = None


@dataclass(frozen=True, kw_only=True)
class SourceView:
    """One source over the run. Only the first three fields are known of a custom `target`.

    Attributes:
        batches: expected micro-batches per rank (mean over seeds).
        tokens, epochs: None: not forecast.
        num_mixed: K, or the number of streams if that is less.
        rank_token_shares: of the source's tokens that each rank reads in an epoch; of full rows.
        behind_cuts_share: of its tokens, those that follow a cut of their document.
    """

    name: str
    batches: float
    batch_share: float
    tokens: float | None = None
    epochs: float | None = None
    num_mixed: int = 0
    rank_token_shares: tuple[float, ...] = ()
    behind_cuts_share: float = 0.0
    wait_bound_steps: int = 0
    modalities: tuple[ModalityView, ...] = ()


@dataclass(frozen=True)
class LedgerView:
    """The ledger of one rank, and the states it must hold.

    Attributes:
        groups_in_flight: upper bound of the states needed at once: one per row, or K x batch size over the sources.
        capacity_to_change_ranks: states that a resume on another number of ranks may need at once.
        wait_bound_steps: from a chunk of a document to the next, at most.
    """

    mode: str
    capacity: int
    groups_in_flight: int
    capacity_to_change_ranks: int
    megabytes: float
    stale_threshold: int | None
    wait_bound_steps: int


@dataclass(frozen=True)
class FillView:
    """The positions that hold a document's token, as a share of those of full rows, which `data/fill` then measures.

    Attributes:
        least, mean, most: by step; the mean is over the whole run.
        full_tokens: of an average step whose rows are full, over all ranks.
        padding: share of the positions that are behind a document's end, where each begins a row.
        better_seq_len: a shorter `data.seq_len` that pads few positions; 0: none does.
        documents: of the data shard with fewest in an epoch.
        longest: tokens of the longest document of the shard where it is most in the way.
        row_tokens: tokens that a row of that shard reads in an epoch.
    """

    least: float
    mean: float
    most: float
    full_tokens: float
    padding: float
    better_seq_len: int
    documents: int
    longest: int
    row_tokens: float


@dataclass(frozen=True)
class Preview:
    """All numbers of a run before it starts.

    Attributes:
        micro_batches: in words.
        num_batches: micro-batches per rank; with `auto`, if it never grew.
        tokens_per_step: at most, over all ranks.
        has_full_rows: rows hold documents of all sources. Only of such a run it is forecast what it will draw.
        is_counted: picks, exhausts and tokens are counted for this seed; otherwise they are averages.
        counted_batches: batches per rank that were counted.
        ends_at_step: the step at which a source without `repeat` runs out of data.
        fill: None without a forecast, and with data sets of the user's own alone.
        ledger: None for a model without recurrent state.
    """

    name: str
    world_size: int
    data_shards: int
    steps: int
    micro_batches: str
    num_batches: int
    tokens_per_step: int
    has_full_rows: bool
    is_counted: bool
    counted_batches: int
    ends_at_step: int | None
    fill: FillView | None
    sources: tuple[SourceView, ...]
    ledger: LedgerView | None


def make_preview(plan: Plan, *, most: int = MAX_COUNTED) -> Preview:
    """Compute a preview. Opens every stream, but reads only document lengths.

    Args:
        most: rows that are counted, over all data shards; beyond them numbers are averages.

    Raises:
        UserError: a stream cannot be opened, a source has nothing to train on, or the model lacks the state that a setting
            needs.
    """
    plan.state_width()  # or an error
    expected = expected_batches([source.weight for source in plan.sources], plan.num_batches, plan.batches_by_steps)
    streams = {
        source.name: open_lengths(plan, source) for source in plan.sources if source.streams and not source.is_off
    }
    corpora = {name: measure(each, plan.config.row_tokens) for name, each in streams.items()}
    sources = [
        _source_view(plan, source, batches, streams.get(source.name, {}), corpora.get(source.name))
        for source, batches in zip(plan.sources, expected, strict=True)
    ]
    corpus = max(sum(each.corpus_tokens for view in sources for each in view.modalities), 1)
    sources = [
        replace(
            view, modalities=tuple(replace(each, corpus_share=each.corpus_tokens / corpus) for each in view.modalities)
        )
        for view in sources
    ]
    lanes, fill = None, None
    if reads_lanes(plan.config):
        lanes = count_lanes(plan, streams, most=most // 2)  # a row costs as much as two counted batches
        fill = _fill(plan, corpora, lanes)
        sources = _with_draws(plan, sources, lanes, fill)
    return Preview(
        name=plan.config.run.name,
        world_size=plan.facts.world_size,
        data_shards=plan.facts.data_shards,
        steps=plan.config.train.steps,
        micro_batches=_micro_batches(plan.config.micro_batches),
        num_batches=plan.num_batches,
        tokens_per_step=plan.facts.tokens_per_step,
        has_full_rows=lanes is not None,
        is_counted=lanes is not None and lanes.is_whole,
        counted_batches=0 if lanes is None else lanes.num_batches,
        ends_at_step=None if lanes is None else _ends_at(plan, lanes, sources, fill),
        fill=fill,
        sources=tuple(sources),
        ledger=_ledger_view(plan, sources),
    )


def _ends_at(plan: Plan, forecast: LanesForecast, sources: Sequence[SourceView], fill: FillView | None) -> int | None:
    """The step at which the data is exhausted; where so much was not counted, about."""
    if forecast.ended_at is not None:
        return plan.batches_by_steps.step_of(forecast.ended_at)
    tables = [source.table for source in plan.sources if not source.is_off]
    is_endless = any(table.target is not None or mixing_of(plan.config, table).repeat for table in tables)
    if fill is None or forecast.is_whole or is_endless:
        return None
    tokens = sum(view.corpus_tokens for source in sources for view in source.modalities)
    step = math.ceil(tokens / (fill.mean * fill.full_tokens))
    if step >= plan.config.train.steps:
        return None
    return step


def _micro_batches(batches: MicroBatches) -> str:
    if batches.auto is not None:
        return f"{counted(batches.first, 'micro-batch')} at first (the run may double them, up to {batches.most})"
    if batches.is_constant:
        return counted(batches.first, "micro-batch")
    return f"{batches.least} to {batches.most} micro-batches"


def _fill(plan: Plan, corpora: Mapping[str, Corpus], forecast: LanesForecast) -> FillView | None:
    """The fill over the run: steps that were not counted repeat the last epoch that was, or the second half."""
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
        period = math.ceil(max(longest[worst], by_row[worst]) * rows * plan.facts.data_shards / full.mean())
        begin = steps // 2
        if period <= steps:
            begin = steps - period
        times, more = divmod(plan.config.train.steps - steps, steps - begin)
        sums = [
            column.sum() + times * column[begin:].sum() + column[begin : begin + more].sum()
            for column in (tokens, full)
        ]
        mean = sums[0] / sums[1]
    padded, own = sum(corpus.padded for corpus in corpora.values()), shards[:, :, 0].sum()
    padding = 1 - own / np.maximum(padded, 1)
    good = np.flatnonzero(padding <= limits.GOOD_PADDING)
    better_seq_len = 0
    if len(good) and not forecast.runs_on:
        better_seq_len = plan.config.data.seq_len >> int(good[0])
    fills = tokens / full
    return FillView(
        least=float(fills.min()),
        mean=float(mean),
        most=float(fills.max()),
        full_tokens=float(forecast.full.mean()),
        padding=0.0 if forecast.runs_on else float(padding[0]),
        better_seq_len=better_seq_len,
        documents=int(shards[:, :, 2].sum(axis=0).min()),
        longest=int(longest[worst]),
        row_tokens=float(by_row[worst]),
    )


def _source_view(
    plan: Plan, source: Source, batches: float, streams: Mapping[str, OpenStream], corpus: Corpus | None
) -> SourceView:
    """A source without a forecast. `corpus`: None if nothing of it is read, or it is the user's own."""
    share = batches / plan.num_batches
    view = SourceView(name=source.name, batches=batches, batch_share=share)
    if corpus is None:
        return view
    mixing, wait = mixing_of(plan.config, source.table), 1  # a row is read, and stored, in every micro-batch
    num_mixed = min(mixing.num_streams_mixed, len(streams))
    if not reads_lanes(plan.config):
        picks = []
        for opened in streams.values():
            lanes = mixing.batch_size_by_modality.get(opened.stream.modality, mixing.batch_size)
            shards = plan.facts.data_shards
            slices = [Slice(0, at, shards).of(opened, opened.groups.num_cells) for at in range(shards)]
            own = [num_rows(opened.groups.num_cells[each], lanes) for each in slices]
            if mixing.batching_mode == "per_stream":  # the ranks read a stream together
                own = [max(own)]
            picks += own
        picks = [each for each in picks if each]
        wait = limits.wait_bound(picks, min(mixing.num_streams_mixed, len(picks)), share, plan.batches_by_steps.least)
    return replace(
        view,
        num_mixed=num_mixed,
        behind_cuts_share=corpus.behind_cuts / sum(corpus.tokens.values()),
        wait_bound_steps=wait,
        modalities=tuple(
            ModalityView(name, corpus.streams[name], corpus.groups[name], corpus.tokens[name])
            for name in sorted(corpus.streams)
        ),
    )


def _with_draws(
    plan: Plan, sources: Sequence[SourceView], forecast: LanesForecast, fill: FillView | None
) -> list[SourceView]:
    """The sources of full rows. Where the run was not counted to its end, a source gives its share of the tokens, and its
    modalities theirs of an epoch."""
    tokens_per_batch = 0.0
    if fill is not None:
        tokens_per_batch = fill.mean * fill.full_tokens * plan.config.train.steps / plan.num_batches
    found = []
    for source, view in zip(plan.sources, sources, strict=True):
        epoch = sum(each.corpus_tokens for each in view.modalities)
        if not epoch:
            found.append(view)
            continue
        tallies, passes = forecast.tallies[view.name], view.batches * tokens_per_batch / epoch
        if not mixing_of(plan.config, source.table).repeat:
            passes = min(passes, 1.0)
        modalities = []
        for each in view.modalities:
            picks, exhausts, tokens = (passes * n for n in (each.corpus_documents, each.streams, each.corpus_tokens))
            if forecast.is_whole:
                picks, exhausts = (
                    float(sum(getattr(tally, what)[each.name] for tally in tallies)) for what in ("picks", "exhausts")
                )
                tokens = sum(tally.tokens[each.name] for tally in tallies)
            modalities.append(replace(each, picks=picks, exhausts=exhausts, tokens=tokens))
        tokens = sum(each.tokens or 0.0 for each in modalities)
        shares = tuple((forecast.shards[view.name][:, 0] / epoch).tolist())
        view = replace(view, tokens=tokens, epochs=tokens / epoch, rank_token_shares=shares)
        found.append(replace(view, modalities=tuple(modalities)))
    total = max(sum(view.tokens or 0.0 for view in found), 1)
    return [
        replace(
            view, modalities=tuple(replace(each, drawn_share=(each.tokens or 0.0) / total) for each in view.modalities)
        )
        for view in found
    ]


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


def shares_at(weights: Sequence[WeightSpec], batches: Ints, micro_batches: MicroBatches) -> npt.NDArray[np.float64]:
    """The probability of each source at each batch, float64 [sources, batches]; zero where all weights are zero."""
    raw = np.array([spec.evaluate_many(positions(spec.unit, batches, micro_batches)) for spec in weights])
    total = raw.sum(axis=0)
    shares: npt.NDArray[np.float64] = np.divide(raw, total, out=np.zeros_like(raw), where=total > 0)
    return shares


def expected_batches(weights: Sequence[WeightSpec], num_batches: int, micro_batches: MicroBatches) -> list[float]:
    """The expected number of micro-batches of each source: the sum of its probability over the run.

    Between two points of the schedules a probability is smooth: long pieces are sampled, so that any run takes as long.
    """
    # Between these batches every weight changes smoothly.
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
        sums += shares_at(weights, middles.astype(np.int64), micro_batches).mean(axis=1) * (end - start)
    return [float(total) for total in sums]
