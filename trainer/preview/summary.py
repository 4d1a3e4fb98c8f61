"""A run before it starts, in numbers: what `train preview` prints, draws and warns about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainer.preview.counted import Tally
from trainer.preview.forecast import Forecast, count_run
from trainer.preview.shapes import SourceShape, StreamShape, source_shape
from trainer.preview.shares import ZeroSpan, expected_batches, first_zero, sample_points, shares_at
from trainer.training.setup.plan import Plan
from trainer.training.step.optimizer import lr_at


@dataclass(frozen=True)
class ModalityView:
    """One modality of one source over the whole run, over all ranks."""

    name: str
    streams: int
    batch_size: int
    picks: float
    exhausts: float
    cells: float
    tokens: float
    absent_share: float
    """Share of the source's picks that saw no active reader of it (of the picks that were counted)."""
    longest_wait_steps: int
    """Most optimizer steps between two picks of one of its readers, as counted."""


@dataclass(frozen=True)
class SourceView:
    """One source over the whole run. A `target` has no streams, and only what the blend knows of it."""

    name: str
    batches: float
    """Micro-batches a rank, on average over seeds."""
    batch_share: float
    zero: ZeroSpan | None
    tokens: float | None
    token_share: float | None
    """Of the tokens of all sources that can be counted."""
    epochs: float | None
    num_mixed: int
    """K, or the number of streams if that is less."""
    picks_per_slice: tuple[int, int, int] | None
    """Least, median, most."""
    idle_share: float
    """Share of a shared pass that ranks with a shorter slice spend on masked rows."""
    padding_share: float
    """Share of the cells' tokens that is padding."""
    lane_fill: float
    """Rows of the average batch over the configured batch size."""
    wait_bound_steps: int
    """2 K n in optimizer steps; see `wait_bound`."""
    modalities: tuple[ModalityView, ...]


@dataclass(frozen=True)
class LedgerView:
    """The ledger of one rank against what it must hold, and for how long."""

    mode: str
    capacity: int
    groups_in_flight: int
    """K x batch size over the sources: what can be needed at most."""
    counted_in_flight: int
    """The most that is needed at once, as counted."""
    megabytes: float
    stale_threshold: int | None
    wait_bound_steps: int
    counted_wait_steps: int
    waits_beyond_threshold: int | None
    """How many of the counted waits are longer than the stale threshold."""


@dataclass(frozen=True)
class Curves:
    """What is drawn: shares of the sources at some batches, and the learning rate at some steps."""

    batches: list[int]
    shares: dict[str, list[float]]
    steps: list[int]
    lr: list[float]


@dataclass(frozen=True)
class Preview:
    """Everything that is known of a run before it starts."""

    name: str
    world_size: int
    steps: int
    micro_batches: int
    is_counted: bool
    """The numbers of picks, exhausts and tokens are those of this seed; otherwise averages."""
    counted_batches: int
    ends_at_step: int | None
    """The step at which the data of a source without `repeat` runs out."""
    cells_per_step: tuple[int, float, int]
    """Least, mean, most, over all ranks, as counted."""
    sources: tuple[SourceView, ...]
    ledger: LedgerView | None
    """None for a model without state."""
    curves: Curves

    @property
    def num_batches(self) -> int:
        """Micro-batches of a rank."""
        return self.steps * self.micro_batches


def make_preview(plan: Plan, world_size: int) -> Preview:
    """Work out a preview; opens every stream, but reads no more than its documents' lengths.

    Raises:
        UserError: a stream cannot be opened, or a source has nothing to train on.
    """
    config, train = plan.config, plan.config.train
    shapes = [source_shape(plan, source, world_size) for source in plan.sources]
    forecast = count_run(plan, shapes, world_size)
    weights = [source.weight for source in plan.sources]
    num_batches = train.steps * train.micro_batches
    expected = expected_batches(weights, num_batches, train.micro_batches)
    zeros = [first_zero(weight, num_batches, train.micro_batches) for weight in weights]
    sources = [
        _source_view(plan, shape, batches, zero, forecast)
        for shape, batches, zero in zip(shapes, expected, zeros, strict=True)
    ]
    cells = forecast.cells_per_step
    return Preview(
        name=config.run.name,
        world_size=world_size,
        steps=train.steps,
        micro_batches=train.micro_batches,
        is_counted=forecast.is_whole,
        counted_batches=forecast.num_batches,
        ends_at_step=None if forecast.ended_at is None else forecast.ended_at // train.micro_batches + 1,
        cells_per_step=(int(cells.min()), float(cells.mean()), int(cells.max())) if len(cells) else (0, 0.0, 0),
        sources=tuple(_with_token_shares(sources)),
        ledger=_ledger_view(plan, sources, forecast),
        curves=_curves(plan, num_batches),
    )


def wait_bound(picks_per_slice: Sequence[int], num_mixed: int, share: float, micro_batches: int) -> int:
    """The longest wait of a group for its next cell to expect, in optimizer steps.

    With weighted picks an almost drained reader waits for about the picks that are left in the whole pool, at most K n;
    waits beyond 2 K n practically do not happen (docs/ledger.md; docs/preview.md has a count). That holds from about 20
    picks a slice; below, trust what was counted. Slices differ, so K n is the sum of the K longest. A
    source that gives a share of the micro-batches, m of them a step, makes them in 1 / (share m) as many steps.

    Args:
        picks_per_slice: n of every slice.
        num_mixed: K.
        share: of the micro-batches that this source gives.
        micro_batches: m.
    """
    if num_mixed <= 1 or share <= 0 or not picks_per_slice:
        return round(1 / (share * micro_batches)) if share > 0 else 0
    longest = sorted(picks_per_slice)[-num_mixed:]
    return int(np.ceil(2 * sum(longest) / (share * micro_batches)))


def _source_view(
    plan: Plan, shape: SourceShape, batches: float, zero: ZeroSpan | None, forecast: Forecast
) -> SourceView:
    num_batches = plan.config.train.steps * plan.config.train.micro_batches
    share = batches / num_batches
    tallies = forecast.tallies[shape.name]
    if tallies is None:
        return SourceView(shape.name, batches, share, zero, None, None, None, 0, None, 0.0, 0.0, 1.0, 0, ())
    world_size = len(shape.streams[0].slices)
    modalities = [_modality_view(name, shape, batches, tallies, forecast, world_size) for name in shape.modalities]
    picks = shape.picks_per_slice()
    num_mixed = min(shape.num_mixed, len(picks))
    epoch_cells = sum(part.num_cells for stream in shape.streams for part in stream.slices)
    epoch_tokens = sum(part.tokens for stream in shape.streams for part in stream.slices)
    rows = sum(len(part.loads) * part.num_picks for stream in shape.streams for part in stream.slices)
    asked = sum(stream.batch_size * part.num_picks for stream in shape.streams for part in stream.slices)
    passes = sum(stream.shared_picks for stream in shape.streams) * world_size
    busy = sum(part.num_picks for stream in shape.streams for part in stream.slices)
    return SourceView(
        name=shape.name,
        batches=batches,
        batch_share=share,
        zero=zero,
        tokens=sum(view.tokens for view in modalities),
        token_share=None,
        epochs=sum(view.cells for view in modalities) / epoch_cells,
        num_mixed=num_mixed,
        picks_per_slice=(picks[0], picks[len(picks) // 2], picks[-1]),
        idle_share=1 - busy / passes if shape.shared else 0.0,
        padding_share=1 - epoch_tokens / (epoch_cells * plan.config.data.seq_len),
        lane_fill=rows / asked,
        wait_bound_steps=wait_bound(picks, num_mixed, share, plan.config.train.micro_batches),
        modalities=tuple(modalities),
    )


def _modality_view(
    name: str, shape: SourceShape, batches: float, tallies: list[Tally], forecast: Forecast, world_size: int
) -> ModalityView:
    streams = [stream for stream in shape.streams if stream.modality == name]
    times = world_size if shape.shared else 1
    counted = sum(tally.batches for tally in tallies)
    waits: Counter[int] = sum((tally.waits[name] for tally in tallies), Counter())
    if forecast.is_whole:
        picks = float(sum(tally.picks[name] for tally in tallies) * times)
        exhausts = float(sum(tally.exhausts[name] for tally in tallies) * times)
        cells = float(sum(tally.cells[name] for tally in tallies))
        tokens = sum(tally.tokens.get(name, 0.0) for tally in tallies)
    else:
        picks, exhausts, cells, tokens = _expected(shape, streams, batches * world_size)
    return ModalityView(
        name=name,
        streams=len(streams),
        batch_size=streams[0].batch_size,
        picks=picks,
        exhausts=exhausts,
        cells=cells,
        tokens=tokens,
        absent_share=sum(tally.absent[name] for tally in tallies) / max(counted, 1),
        longest_wait_steps=max(waits, default=0),
    )


def _passes(shape: SourceShape, streams: Sequence[StreamShape]) -> tuple[int, int]:
    """(batches over all ranks, exhausts over all ranks) of these streams in an epoch."""
    if shape.shared:
        picks = [stream.shared_picks for stream in streams for _ in stream.slices]
    else:
        picks = [part.num_picks for stream in streams for part in stream.slices]
    return sum(picks), sum(each > 0 for each in picks)


def _expected(shape: SourceShape, streams: Sequence[StreamShape], batches: float) -> tuple[float, float, float, float]:
    """(picks, exhausts, cells, tokens) of some streams in `batches` of their source, as in the average of whole epochs."""
    epochs = batches / max(_passes(shape, shape.streams)[0], 1)
    picks, exhausts = _passes(shape, streams)
    parts = [part for stream in streams for part in stream.slices]
    cells, tokens = sum(part.num_cells for part in parts), sum(part.tokens for part in parts)
    return epochs * picks, epochs * exhausts, epochs * cells, epochs * tokens


def _with_token_shares(sources: Sequence[SourceView]) -> list[SourceView]:
    total = sum(source.tokens for source in sources if source.tokens is not None)
    return [
        source if source.tokens is None else replace(source, token_share=source.tokens / max(total, 1))
        for source in sources
    ]


def _ledger_view(plan: Plan, sources: Sequence[SourceView], forecast: Forecast) -> LedgerView | None:
    width, table = plan.state_width(), plan.config.ledger
    if width == 0:
        return None
    waits: Counter[int] = Counter()
    for tallies in forecast.tallies.values():
        for tally in tallies or []:
            for found in tally.waits.values():
                waits += found
    threshold = table.stale_threshold if table.wipe_mode == "periodic_stale" else None
    return LedgerView(
        mode=table.wipe_mode,
        capacity=table.capacity,
        groups_in_flight=plan.facts.groups_in_flight,
        counted_in_flight=forecast.in_flight,
        megabytes=(table.capacity + 1) * width * 4 / 1e6,
        stale_threshold=threshold,
        wait_bound_steps=max((source.wait_bound_steps for source in sources), default=0),
        counted_wait_steps=max(waits, default=0),
        waits_beyond_threshold=None
        if threshold is None
        else sum(times for wait, times in waits.items() if wait > threshold),
    )


def _curves(plan: Plan, num_batches: int) -> Curves:
    config = plan.config
    batches, steps = sample_points(num_batches), sample_points(config.train.steps) + 1
    shares = shares_at([source.weight for source in plan.sources], batches, config.train.micro_batches)
    rates = [
        lr_at(step, steps=config.train.steps, peak=config.optimizer.lr, table=config.scheduler)
        for step in steps.tolist()
    ]
    return Curves(
        batches.tolist(),
        {source.name: row for source, row in zip(plan.sources, shares.tolist(), strict=True)},
        steps.tolist(),
        rates,
    )
