"""The numbers of a run before it starts: what `train preview` prints and warns about."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from trainer.arrays import Ints
from trainer.config.data_tables import BatchingMode, MixingTable
from trainer.config.rules import mixing_of, reads_lanes
from trainer.data.mixing import BATCHING_MODES
from trainer.micro_batches import MicroBatches
from trainer.tools.limits import wait_bound
from trainer.tools.preview.forecast import (
    MAX_COUNTED,
    Forecast,
    SourceShape,
    StreamShape,
    count_run,
    expected_batches,
    source_shape,
)
from trainer.tools.preview.lanes_forecast import GOOD_PADDING, Corpus, LanesForecast, count_lanes
from trainer.training.setup.plan import Plan
from trainer.training.setup.plausible import ledger_bytes
from trainer.wording import counted


@dataclass(frozen=True)
class ModalityView:
    """One modality of a source over the run, over all ranks; docs/preview.md explains the columns.

    Attributes:
        corpus_tokens: of a pass over its training documents.
        corpus_share, drawn_share: of the tokens of all countable sources, in such passes and in the run.
    """

    name: str
    streams: int
    batch_size: int
    picks: float
    exhausts: float
    cells: float
    tokens: float
    absent_share: float
    longest_wait_steps: int
    corpus_tokens: int
    corpus_share: float = 0.0
    drawn_share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SourceView:
    """One source over the run. Only the first three fields are known of a custom `target`.

    Attributes:
        batches: expected micro-batches per rank (mean over seeds).
        drawn_batches: micro-batches per rank with the seed of this run; None if they were not all counted.
        pass_batches: micro-batches per rank of a pass over the source.
        num_mixed: K, or the number of slices if that is less.
        picks_per_slice: minimum, median, maximum.
        idle_share: of fully masked micro-batches in the configured batching mode, over all ranks.
        rank_token_shares: of the source's tokens that each rank reads in an epoch, in both batching modes.
        masked_share: of fully masked micro-batches on the worst rank, by batching mode.
        behind_cuts_share: of its tokens, those that are read without the state of the text before them in their document.
    """

    name: str
    batches: float
    batch_share: float
    drawn_batches: int | None = None
    pass_batches: float = 0.0
    tokens: float | None = None
    epochs: float | None = None
    num_mixed: int = 0
    picks_per_slice: tuple[int, int, int] | None = None
    batching_mode: BatchingMode = "per_stream"
    idle_share: float = 0.0
    rank_token_shares: tuple[float, ...] = ()
    masked_share: Mapping[BatchingMode, float] = field(default_factory=dict)
    behind_cuts_share: float = 0.0
    wait_bound_steps: int = 0
    modalities: tuple[ModalityView, ...] = ()


@dataclass(frozen=True)
class LedgerView:
    """The ledger of one rank, and the states it must hold.

    Attributes:
        groups_in_flight: K x batch size over the sources: upper bound of the states needed at once.
        capacity_to_change_ranks: states that a resume on another number of ranks may need at once.
        waits_beyond_threshold: number of counted waits longer than the stale threshold.
    """

    mode: str
    capacity: int
    groups_in_flight: int
    capacity_to_change_ranks: int
    megabytes: float
    stale_threshold: int | None
    wait_bound_steps: int
    counted_wait_steps: int
    waits_beyond_threshold: int | None


@dataclass(frozen=True)
class FillView:
    """The positions that hold a document's token, as a share of those of full rows, which `data/fill` then measures.

    Attributes:
        least, mean, most: by step; with full rows the mean is over the whole run.
        full_tokens: of an average step whose rows are full, over all ranks.
        runs_on: documents begin within rows; None: rows are not full ones, and what follows is 0.
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
    runs_on: bool | None = None
    padding: float = 0.0
    better_seq_len: int = 0
    documents: int = 0
    longest: int = 0
    row_tokens: float = 0.0


@dataclass(frozen=True)
class Preview:
    """All numbers of a run before it starts.

    Attributes:
        micro_batches: in words.
        num_batches: micro-batches per rank; with `auto`, if it never grew.
        is_counted: picks, exhausts and tokens are counted for this seed; otherwise they are averages.
        counted_batches: batches per rank that were counted.
        ends_at_step: the step at which a source without `repeat` runs out of data.
        cells_per_step: minimum, mean, maximum over the counted steps, over all ranks; of full rows, all rows.
        fill: None with data sets of the user's own alone.
        ledger: None for a model without recurrent state.
    """

    name: str
    world_size: int
    data_shards: int
    steps: int
    micro_batches: str
    num_batches: int
    is_counted: bool
    counted_batches: int
    ends_at_step: int | None
    cells_per_step: tuple[int, float, int]
    fill: FillView | None
    sources: tuple[SourceView, ...]
    ledger: LedgerView | None

    @property
    def has_full_rows(self) -> bool:
        """Whether rows hold documents of all sources."""
        return any(source.batching_mode == "per_row" for source in self.sources)


def make_preview(plan: Plan, *, most: int = MAX_COUNTED) -> Preview:
    """Compute a preview. Opens every stream, but reads only document lengths.

    Args:
        most: batches that are counted, over all ranks; beyond them numbers are averages.

    Raises:
        UserError: a stream cannot be opened, a source has nothing to train on, or the model lacks the state that a setting
            needs.
    """
    plan.state_width()  # or an error
    expected = expected_batches([source.weight for source in plan.sources], plan.num_batches, plan.batches_by_steps)
    forecast: Forecast | LanesForecast
    if reads_lanes(plan.config):
        forecast = lanes = count_lanes(plan, most=most // 2)  # a row costs as much as two counted batches
        fill = _lanes_fill(plan, lanes)
        cells = lanes.full // plan.config.row_tokens
        sources = _lane_views(plan, expected, lanes, fill)
    else:
        shapes = [source_shape(plan, source, plan.facts.data_shards) for source in plan.sources]
        forecast = counts = count_run(plan, shapes, plan.facts.data_shards, most=most)
        cells = counts.cells_per_step
        sources = [_source_view(plan, *each, counts) for each in zip(shapes, expected, strict=True)]
        fill = _cells_fill(plan, cells, sources)
    tokens = max(sum(source.tokens or 0 for source in sources), 1)
    corpus = max(sum(view.corpus_tokens for source in sources for view in source.modalities), 1)
    for at, source in enumerate(sources):
        views = (
            replace(view, corpus_share=view.corpus_tokens / corpus, drawn_share=view.tokens / tokens)
            for view in source.modalities
        )
        sources[at] = replace(source, modalities=tuple(views))
    return Preview(
        name=plan.config.run.name,
        world_size=plan.facts.world_size,
        data_shards=plan.facts.data_shards,
        steps=plan.config.train.steps,
        micro_batches=_micro_batches(plan.config.micro_batches),
        num_batches=plan.num_batches,
        is_counted=forecast.is_whole,
        counted_batches=forecast.num_batches,
        ends_at_step=_ends_at(plan, forecast, sources, fill),
        cells_per_step=(int(cells.min()), float(cells.mean()), int(cells.max())) if len(cells) else (0, 0.0, 0),
        fill=fill,
        sources=tuple(sources),
        ledger=_ledger_view(plan, sources, forecast),
    )


def _ends_at(
    plan: Plan, forecast: Forecast | LanesForecast, sources: Sequence[SourceView], fill: FillView | None
) -> int | None:
    """The step at which the data is exhausted; of full rows that were not counted so far, about."""
    if forecast.ended_at is not None:
        return plan.batches_by_steps.step_of(forecast.ended_at)
    tables = [source.table for source in plan.sources if not source.is_off]
    is_endless = any(table.target is not None or mixing_of(plan.config, table).repeat for table in tables)
    if isinstance(forecast, Forecast) or fill is None or forecast.is_whole or is_endless:
        return None
    tokens = sum(view.corpus_tokens for source in sources for view in source.modalities)
    step = math.ceil(tokens / (fill.mean * fill.full_tokens))
    return step if step < plan.config.train.steps else None


def _micro_batches(batches: MicroBatches) -> str:
    if batches.auto is not None:
        return f"{counted(batches.first, 'micro-batch')} at first (the run may double them, up to {batches.most})"
    return (
        counted(batches.first, "micro-batch")
        if batches.is_constant
        else f"{batches.least} to {batches.most} micro-batches"
    )


def _cells_fill(plan: Plan, cells: Ints, sources: Sequence[SourceView]) -> FillView | None:
    """Of batches of cells, whose tokens are those of an average cell."""
    rows = sum(view.cells for source in sources for view in source.modalities)
    if not len(cells) or not rows or any(source.tokens is None for source in sources):
        return None
    tokens_per_row = sum(source.tokens or 0 for source in sources) / rows
    steps = np.arange(1, len(cells) + 1)
    full = np.array([plan.batches_by_steps.at(int(step), 0) for step in steps]) * float(plan.facts.tokens_per_micro)
    fills = cells * tokens_per_row / full
    return FillView(fills.min(), cells.sum() * tokens_per_row / full.sum(), fills.max(), full.mean())


def _lanes_fill(plan: Plan, forecast: LanesForecast) -> FillView | None:
    """Of full rows. What was not counted repeats the last epoch that was, or the second half."""
    tokens, full = (column[forecast.full > 0] for column in (forecast.tokens, forecast.full))
    if not len(full):
        return None
    shards = np.array([corpus.shards for corpus in forecast.corpora.values()])  # [sources, shards, 3]
    rows, mean = plan.config.data.mixing.batch_size, tokens.sum() / full.sum()
    by_row, longest = shards[:, :, 0].sum(axis=0) / rows, shards[:, :, 1].max(axis=0)
    worst = int((longest / np.maximum(by_row, 1)).argmax())
    if not forecast.is_whole:
        steps = len(full)
        period = math.ceil(max(longest[worst], by_row[worst]) * rows * plan.facts.data_shards / full.mean())
        begin = steps - period if period <= steps else steps // 2
        times, more = divmod(plan.config.train.steps - steps, steps - begin)
        sums = [
            column.sum() + times * column[begin:].sum() + column[begin : begin + more].sum()
            for column in (tokens, full)
        ]
        mean = sums[0] / sums[1]
    padded, own = sum(corpus.padded for corpus in forecast.corpora.values()), shards[:, :, 0].sum()
    padding = 1 - own / np.maximum(padded, 1)
    good = np.flatnonzero(padding <= GOOD_PADDING)
    fills = tokens / full
    return FillView(
        least=float(fills.min()),
        mean=float(mean),
        most=float(fills.max()),
        full_tokens=float(forecast.full.mean()),
        runs_on=forecast.runs_on,
        padding=0.0 if forecast.runs_on else float(padding[0]),
        better_seq_len=plan.config.data.seq_len >> int(good[0]) if len(good) and not forecast.runs_on else 0,
        documents=int(shards[:, :, 2].sum(axis=0).min()),
        longest=int(longest[worst]),
        row_tokens=float(by_row[worst]),
    )


def _lane_views(
    plan: Plan, expected: Sequence[float], forecast: LanesForecast, fill: FillView | None
) -> list[SourceView]:
    """The sources of full rows. Where the run was not counted to its end, a source gives its share of the tokens, and its
    modalities theirs of an epoch."""
    found = []
    by_batch = plan.config.train.steps / plan.num_batches
    scale = 0.0 if fill is None else fill.mean * fill.full_tokens * by_batch
    for source, batches in zip(plan.sources, expected, strict=True):
        share, corpus = batches / plan.num_batches, forecast.corpora.get(source.name)
        view = SourceView(name=source.name, batches=batches, batch_share=share)
        if corpus is not None:
            view = _lane_view(plan, view, mixing_of(plan.config, source.table), corpus, forecast, batches * scale)
        found.append(view)
    return found


def _lane_view(
    plan: Plan, view: SourceView, mixing: MixingTable, corpus: Corpus, forecast: LanesForecast, expected: float
) -> SourceView:
    """A source of full rows. `expected`: its tokens, if they were not counted."""
    tallies, epoch = forecast.tallies[view.name], sum(corpus.tokens.values())
    passes = expected / epoch if mixing.repeat else min(expected / epoch, 1.0)
    modalities = []
    for name in sorted(corpus.streams):
        if forecast.is_whole:
            picks, exhausts = (
                float(sum(getattr(tally, what)[name] for tally in tallies)) for what in ("picks", "exhausts")
            )
            tokens = sum(tally.tokens[name] for tally in tallies)
        else:
            picks, exhausts = passes * corpus.groups[name], passes * corpus.streams[name]
            tokens = passes * corpus.tokens[name]
        modalities.append(
            ModalityView(
                name=name,
                streams=corpus.streams[name],
                batch_size=mixing.batch_size,
                picks=picks,
                exhausts=exhausts,
                cells=tokens / plan.config.row_tokens,
                tokens=tokens,
                absent_share=sum(tally.absent[name] for tally in tallies)
                / max(sum(tally.batches for tally in tallies), 1),
                longest_wait_steps=1,
                corpus_tokens=corpus.tokens[name],
            )
        )
    tokens = sum(each.tokens for each in modalities)
    return replace(
        view,
        pass_batches=epoch / (plan.facts.tokens_per_micro or 1),
        tokens=tokens,
        epochs=tokens / epoch,
        num_mixed=min(mixing.num_streams_mixed, sum(corpus.streams.values())),
        batching_mode="per_row",
        rank_token_shares=tuple((corpus.shards[:, 0] / epoch).tolist()),
        behind_cuts_share=corpus.behind_cuts / epoch,
        wait_bound_steps=1,
        modalities=tuple(modalities),
    )


def _source_view(plan: Plan, shape: SourceShape, batches: float, forecast: Forecast) -> SourceView:
    share = batches / plan.num_batches
    if not shape.streams:
        return SourceView(name=shape.name, batches=batches, batch_share=share)
    modalities = tuple(_modality_view(name, shape, batches, forecast) for name in shape.modalities)
    picks = shape.picks_per_slice()
    num_mixed = min(shape.num_mixed, len(picks))
    slices = [(stream, part) for stream in shape.streams for part in stream.slices]
    epoch_cells = sum(part.num_cells for _, part in slices)
    epoch_tokens = sum(part.tokens for _, part in slices)
    masked = shape.masked_shares(shared=shape.shared)
    worst: dict[BatchingMode, float] = {m: max(shape.masked_shares(shared=m == "per_stream")) for m in BATCHING_MODES}
    ranks = range(len(masked))
    return SourceView(
        name=shape.name,
        batches=batches,
        batch_share=share,
        drawn_batches=max(tally.batches for tally in forecast.tallies[shape.name]) if forecast.is_whole else None,
        pass_batches=sum(_picks(shape, stream, rank) for stream in shape.streams for rank in ranks) / len(ranks),
        tokens=sum(view.tokens for view in modalities),
        epochs=sum(view.cells for view in modalities) / epoch_cells,
        num_mixed=num_mixed,
        picks_per_slice=(picks[0], picks[len(picks) // 2], picks[-1]),
        batching_mode="per_stream" if shape.shared else "device_per_stream",
        idle_share=sum(masked) / len(masked),
        rank_token_shares=tuple(shape.token_shares()),
        masked_share=worst,
        behind_cuts_share=sum(stream.behind_cuts for stream in shape.streams) / epoch_tokens,
        wait_bound_steps=wait_bound(picks, num_mixed, share, plan.batches_by_steps.least),
        modalities=modalities,
    )


def _modality_view(name: str, shape: SourceShape, batches: float, forecast: Forecast) -> ModalityView:
    tallies = forecast.tallies[shape.name]
    streams = [stream for stream in shape.streams if stream.modality == name]
    world_size = len(shape.streams[0].slices)
    if forecast.is_whole:
        times = world_size if shape.shared else 1
        picks = float(sum(tally.picks[name] for tally in tallies) * times)
        exhausts = float(sum(tally.exhausts[name] for tally in tallies) * times)
        cells = float(sum(tally.cells[name] for tally in tallies))
        tokens = sum(tally.tokens[name] for tally in tallies)
    else:
        picks, exhausts, cells, tokens = _expected(shape, streams, batches)
    return ModalityView(
        name=name,
        streams=len(streams),
        batch_size=streams[0].batch_size,
        picks=picks,
        exhausts=exhausts,
        cells=cells,
        tokens=tokens,
        absent_share=sum(tally.absent[name] for tally in tallies) / max(sum(tally.batches for tally in tallies), 1),
        longest_wait_steps=max((wait for tally in tallies for wait in tally.waits[name]), default=0),
        corpus_tokens=sum(part.tokens for stream in streams for part in stream.slices),
    )


def _expected(shape: SourceShape, streams: Sequence[StreamShape], batches: float) -> tuple[float, float, float, float]:
    """(picks, exhausts, cells, tokens) of some streams in `batches` batches of their source on each rank, averaged over
    whole epochs. Ranks with pools of their own are in epochs of their own."""
    totals = np.zeros(4)
    for rank in range(len(shape.streams[0].slices)):
        epochs = batches / max(sum(_picks(shape, stream, rank) for stream in shape.streams), 1)
        for stream in streams:
            part, passes = stream.slices[rank], _picks(shape, stream, rank)
            totals += epochs * np.array([passes, passes > 0, part.num_cells, part.tokens])
    picks, exhausts, cells, tokens = totals.tolist()
    return picks, exhausts, cells, tokens


def _picks(shape: SourceShape, stream: StreamShape, rank: int) -> int:
    """The number of batches of a rank's pass over a stream."""
    return stream.shared_picks if shape.shared else stream.slices[rank].num_picks


def _ledger_view(plan: Plan, sources: Sequence[SourceView], forecast: Forecast | LanesForecast) -> LedgerView | None:
    width, table = plan.state_width(), plan.config.ledger
    if width == 0:
        return None
    tallies = [tally for by_rank in forecast.tallies.values() for tally in by_rank]
    waits = sum((waits for tally in tallies for waits in tally.waits.values()), Counter[int]())
    if isinstance(forecast, LanesForecast):
        waits[1] = 1  # a document that is read is stored in every micro-batch
    threshold = table.stale_threshold if table.wipe_mode == "periodic_stale" else None
    beyond = None if threshold is None else sum(times for wait, times in waits.items() if wait > threshold)
    return LedgerView(
        mode=table.wipe_mode,
        capacity=table.capacity,
        groups_in_flight=plan.facts.groups_in_flight,
        capacity_to_change_ranks=plan.facts.capacity_to_change_ranks,
        megabytes=ledger_bytes(table, width) / 1e6,
        stale_threshold=threshold,
        wait_bound_steps=max((source.wait_bound_steps for source in sources), default=0),
        counted_wait_steps=max(waits, default=0),
        waits_beyond_threshold=beyond,
    )
