"""What a run will draw from its data: counted batch by batch, or, for the rest of a long run, in expectation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.arrays import Ints
from trainer.config.rules import mixing_of
from trainer.data.blending.blend import BlendDataset, BlendSource
from trainer.preview.counted import CountedMixing, Tally
from trainer.preview.shapes import SourceShape
from trainer.training.setup.plan import Plan
from trainer.training.setup.sources import Source

MAX_COUNTED = 200_000
"""Batches, over all ranks that are counted: some seconds. Beyond, a run is told in expectation."""


@dataclass(frozen=True)
class Forecast:
    """The first `num_batches` batches (a rank) of a run.

    Args:
        num_batches: batches counted.
        is_whole: the run has no more.
        ended_at: the batch at which the data of a source without `repeat` was used up and the run ends; None: never.
        tallies: for each source, one entry for each rank that picks alone, or one for all together; None for a
            `target` of the user's own, which nobody can count.
        cells_per_step: cells over all ranks and countable sources in each optimizer step, int64 [steps].
        in_flight: most rows of begun readers that a rank has at once: states that its ledger must hold.
    """

    num_batches: int
    is_whole: bool
    ended_at: int | None
    tallies: dict[str, list[Tally] | None]
    cells_per_step: Ints
    in_flight: int


class _Uncounted:
    """A `target`: gives batches without end, of which nothing is known."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield {"dataset_labels": (), "rows": 0, "is_shared": True}


def count_run(plan: Plan, shapes: Sequence[SourceShape], world_size: int, *, most: int = MAX_COUNTED) -> Forecast:
    """Count what the run of this config and seed will draw.

    Args:
        plan: of the run.
        shapes: of its sources, in order.
        world_size: ranks.
        most: batches over all ranks that are counted; a whole number of optimizer steps, at least one.
    """
    train = plan.config.train
    ranks = range(1 if all(shape.shared or not shape.streams for shape in shapes) else world_size)
    steps = min(train.steps, max(most // (len(ranks) * train.micro_batches), 1))
    cells = np.zeros(steps, dtype=np.int64)
    tallies: dict[str, list[Tally] | None] = {shape.name: [] if shape.streams else None for shape in shapes}
    in_flight = 0
    ended_at: int | None = None
    for rank in ranks:
        parts = [_counted(plan, source, shape, rank) for source, shape in zip(plan.sources, shapes, strict=True)]
        mixings = [part for part in parts if isinstance(part, CountedMixing)]
        most_here, ended_here = _count_rank(plan, parts, cells, is_first=rank == 0)
        in_flight = max(in_flight, most_here)
        if ended_here is not None:  # the first rank without data ends the run for all
            ended_at = ended_here if ended_at is None else min(ended_at, ended_here)
        for mixing in mixings:
            found = tallies[mixing.shape.name]
            if found is not None and (rank == 0 or not mixing.shape.shared):
                found.append(mixing.tally)
    is_whole = steps == train.steps or ended_at is not None
    num_batches = steps * train.micro_batches if ended_at is None else ended_at
    return Forecast(
        num_batches, is_whole, ended_at, tallies, cells[: -(-num_batches // train.micro_batches)], in_flight
    )


def _counted(plan: Plan, source: Source, shape: SourceShape, rank: int) -> CountedMixing | _Uncounted:
    if not shape.streams:
        return _Uncounted()
    mixing = mixing_of(plan.config, source.table)
    return CountedMixing(
        shape,
        pick_mode=mixing.pick_mode,
        repeat=mixing.repeat,
        seed=plan.config.run.seed,
        rank=rank,
    )


def _count_rank(
    plan: Plan, parts: Sequence[CountedMixing | _Uncounted], cells: Ints, *, is_first: bool
) -> tuple[int, int | None]:
    """Count one rank's batches into `cells`; the most rows in flight, and the batch at which the data ended."""
    num_micro = plan.config.train.micro_batches
    blend = BlendDataset(
        [BlendSource(source.name, part, source.weight) for source, part in zip(plan.sources, parts, strict=True)],
        seed=plan.config.run.seed,
        micro_batches=num_micro,
    )
    mixings = [part for part in parts if isinstance(part, CountedMixing)]
    most = 0
    for step in range(1, len(cells) + 1):
        for mixing in mixings:
            mixing.step = step
        for micro in range(num_micro):
            batch = next(blend, None)
            if batch is None:
                return most, (step - 1) * num_micro + micro
            if is_first or not batch["is_shared"]:
                cells[step - 1] += batch["rows"]
            most = max(most, sum(mixing.tally.in_flight for mixing in mixings))
    return most, None
