"""The numbers of a run before it starts: what `train preview` prints and warns about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from trainer.data.mixing import BATCHING_MODES, BatchingMode
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
        lane_fill: rows of the average batch over the configured batch size.
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
    padding_share: float = 0.0
    lane_fill: float = 1.0
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
class Preview:
    """All numbers of a run before it starts.

    Attributes:
        micro_batches: in words.
        num_batches: micro-batches per rank; with `auto`, if it never grew.
        is_counted: picks, exhausts and tokens are counted for this seed; otherwise they are averages.
        counted_batches: batches per rank that were counted.
        ends_at_step: the step at which a source without `repeat` runs out of data.
        cells_per_step: minimum, mean, maximum over the counted steps, over all ranks.
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
    sources: tuple[SourceView, ...]
    ledger: LedgerView | None


def make_preview(plan: Plan, *, most: int = MAX_COUNTED) -> Preview:
    """Compute a preview. Opens every stream, but reads only document lengths.

    Args:
        most: batches that are counted, over all ranks; beyond them numbers are averages.

    Raises:
        UserError: a stream cannot be opened, a source has nothing to train on, or the model lacks the state that a setting
            needs.
    """
    num_shards = plan.facts.data_shards
    steps, by_steps, num_batches = plan.config.train.steps, plan.batches_by_steps, plan.num_batches
    plan.state_width()  # or an error
    shapes = [source_shape(plan, source, num_shards) for source in plan.sources]
    forecast = count_run(plan, shapes, num_shards, most=most)
    expected = expected_batches([source.weight for source in plan.sources], num_batches, by_steps)
    sources = [_source_view(plan, *each, forecast) for each in zip(shapes, expected, strict=True)]
    tokens = max(sum(source.tokens or 0 for source in sources), 1)
    corpus = max(sum(view.corpus_tokens for source in sources for view in source.modalities), 1)
    for at, source in enumerate(sources):
        views = (
            replace(view, corpus_share=view.corpus_tokens / corpus, drawn_share=view.tokens / tokens)
            for view in source.modalities
        )
        sources[at] = replace(source, modalities=tuple(views))
    cells = forecast.cells_per_step
    return Preview(
        name=plan.config.run.name,
        world_size=plan.facts.world_size,
        data_shards=num_shards,
        steps=steps,
        micro_batches=_micro_batches(plan.config.micro_batches),
        num_batches=num_batches,
        is_counted=forecast.is_whole,
        counted_batches=forecast.num_batches,
        ends_at_step=None if forecast.ended_at is None else by_steps.step_of(forecast.ended_at),
        cells_per_step=(int(cells.min()), float(cells.mean()), int(cells.max())) if len(cells) else (0, 0.0, 0),
        sources=tuple(sources),
        ledger=_ledger_view(plan, sources, forecast),
    )


def _micro_batches(batches: MicroBatches) -> str:
    if batches.auto is not None:
        return f"{counted(batches.first, 'micro-batch')} at first (the run may double them, up to {batches.most})"
    return (
        counted(batches.first, "micro-batch")
        if batches.is_constant
        else f"{batches.least} to {batches.most} micro-batches"
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
    rows = sum(len(part.loads) * part.num_picks for _, part in slices)
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
        padding_share=1 - epoch_tokens / (epoch_cells * plan.config.row_tokens),
        lane_fill=rows / sum(stream.batch_size * part.num_picks for stream, part in slices),
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


def _ledger_view(plan: Plan, sources: Sequence[SourceView], forecast: Forecast) -> LedgerView | None:
    width, table = plan.state_width(), plan.config.ledger
    if width == 0:
        return None
    tallies = [tally for by_rank in forecast.tallies.values() for tally in by_rank]
    waits = sum((waits for tally in tallies for waits in tally.waits.values()), Counter[int]())
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
