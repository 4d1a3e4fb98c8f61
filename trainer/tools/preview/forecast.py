"""What a run will draw from its data, counted batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.arrays import Ints
from trainer.config.rules import mixing_of
from trainer.data.blend import BlendDataset, BlendSource
from trainer.tools.preview.counted import CountedMixing, Tally
from trainer.tools.preview.shapes import SourceShape
from trainer.training.setup.plan import Plan
from trainer.training.setup.sources import Source

MAX_COUNTED = 200_000
"""Batches over all counted ranks, which take some seconds. The rest of a longer run is extrapolated."""


@dataclass(frozen=True)
class Forecast:
    """Counts of the first `num_batches` batches per rank.

    Attributes:
        is_whole: these are all batches of the run.
        ended_at: the batch at which no rank has data left, which ends the run; None: never.
        tallies: for each source, one tally per rank, or a single one if all ranks share a pool; none for a custom `target`,
            whose batches cannot be counted.
        cells_per_step: over all ranks and countable sources, int64 [steps].
        in_flight: most rows of started readers on one rank at once: states that its ledger must hold.
    """

    num_batches: int
    is_whole: bool
    ended_at: int | None
    tallies: dict[str, list[Tally]]
    cells_per_step: Ints
    in_flight: int


class _Uncounted:
    """A custom `target`: endless batches of unknown content."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield {"dataset_labels": (), "rows": 0, "is_shared": True}


def count_run(plan: Plan, shapes: Sequence[SourceShape], world_size: int, *, most: int = MAX_COUNTED) -> Forecast:
    """Count what a run with this config and seed will draw.

    Args:
        plan: of the run.
        shapes: of its sources, in order.
        world_size: number of ranks.
        most: limit of batches over all ranks; at least one optimizer step is counted.
    """
    batches = plan.batches_by_steps
    ranks = range(1 if all(shape.shared or not shape.streams for shape in shapes) else world_size)
    steps = min(plan.config.train.steps, max(batches.step_of(most // len(ranks)) - 1, 1))
    cells = np.zeros(steps, dtype=np.int64)
    tallies: dict[str, list[Tally]] = {shape.name: [] for shape in shapes}
    in_flight = 0
    ends = []
    for rank in ranks:
        parts = [_counted(plan, source, shape, rank) for source, shape in zip(plan.sources, shapes, strict=True)]
        most_here, ended_here = _count_rank(plan, parts, cells, is_first=rank == 0)
        in_flight = max(in_flight, most_here)
        ends += [ended_here] if ended_here is not None else []
        for part in parts:
            if isinstance(part, CountedMixing) and (rank == 0 or not part.shape.shared):
                tallies[part.shape.name].append(part.tally)
    # Ranks without data run masked batches until no rank has any.
    ended_at = max(ends) if len(ends) == len(ranks) else None
    num_batches = batches.batches_before(steps + 1) if ended_at is None else ended_at
    is_whole = steps == plan.config.train.steps or ended_at is not None
    counted_steps = batches.step_of(num_batches - 1) if num_batches else 0
    return Forecast(num_batches, is_whole, ended_at, tallies, cells[:counted_steps], in_flight)


def _counted(plan: Plan, source: Source, shape: SourceShape, rank: int) -> CountedMixing | _Uncounted:
    if not shape.streams:
        return _Uncounted()
    mixing, seed = mixing_of(plan.config, source.table), plan.config.run.seed
    return CountedMixing(shape, pick_mode=mixing.pick_mode, repeat=mixing.repeat, seed=seed, rank=rank)


def _count_rank(
    plan: Plan, parts: Sequence[CountedMixing | _Uncounted], cells: Ints, *, is_first: bool
) -> tuple[int, int | None]:
    """Add the cells of one rank to `cells`; returns (most rows in flight, the batch at which the data ended)."""
    batches = plan.batches_by_steps
    blend = BlendDataset(
        [BlendSource(source.name, part, source.weight) for source, part in zip(plan.sources, parts, strict=True)],
        seed=plan.config.run.seed,
        micro_batches=batches,
    )
    mixings = [part for part in parts if isinstance(part, CountedMixing)]
    most = 0
    for step in range(1, len(cells) + 1):
        for mixing in mixings:
            mixing.step = step
        for index in range(batches.batches_before(step), batches.batches_before(step + 1)):
            batch = next(blend, None)
            if batch is None:
                return most, index
            # The first rank counts the batches of a shared pool for all ranks.
            if is_first or not batch["is_shared"]:
                cells[step - 1] += batch["rows"]
            most = max(most, sum(mixing.tally.in_flight for mixing in mixings))
    return most, None
