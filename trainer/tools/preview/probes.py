"""What the probes of carry will cost in a run, and which of its cells they can measure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.config.schema import RunConfig
from trainer.tools.preview.shapes import SourceShape

# The backward costs twice the forward, and a probe has none: a step is three forward passes of each micro-batch.
PASSES_OF_A_STEP = 3
READINGS = 3  # of the probed cell: from zero, from the stored state and from the fresh one


@dataclass(frozen=True)
class ProbeView:
    """The probes of a run.

    Attributes:
        every: steps between two probes: `ledger.probe_every`, as far as steps are logged.
        count: probes in the run.
        cells: `ledger.probe_cells`.
        passes: most forward passes of one micro-batch that a probe takes.
        cost: upper bound of the share of the training time.
        reach: share of the cells that continue a group which are near enough to its start to be measured; None if no cell
            does, or if they cannot be counted (a custom `target`).
    """

    every: int
    count: int
    cells: int
    passes: int
    cost: float
    reach: float | None


def probe_view(
    config: RunConfig, shapes: Sequence[SourceShape], epochs: Sequence[float], num_batches: int
) -> ProbeView | None:
    """The probes of a run with a ledger; None if it has none.

    Args:
        shapes: of the sources.
        epochs: how often each source is read.
        num_batches: micro-batches of a rank in the run.
    """
    table, steps, interval = config.ledger, config.train.steps, config.metrics.log_interval
    if not table.probe_every:
        return None
    every = math.lcm(table.probe_every, interval)
    # Step 1 and the last are logged too.
    extra = {step for step in (1, steps) if step % table.probe_every == 0 and step % every}
    count = steps // every + len(extra)
    continuing = measured = 0.0
    longest = config.max_group_rows
    sizes = [stream.group_cells for shape in shapes for stream in shape.streams]
    if all(shape.streams for shape in shapes):
        longest = max(len(counts) - 1 for counts in sizes)
    for shape, times in zip(shapes, epochs, strict=True):
        for stream in shape.streams:
            later = np.maximum(np.arange(len(stream.group_cells)) - 1, 0)  # a group's cells but the first
            continuing += times * float(stream.group_cells @ later)
            measured += times * float(stream.group_cells @ np.minimum(later, table.probe_cells))
    passes = min(table.probe_cells, longest - 1) + READINGS if longest > 1 else 0
    return ProbeView(
        every=every,
        count=count,
        cells=table.probe_cells,
        passes=passes,
        cost=count * passes / (num_batches * PASSES_OF_A_STEP),
        reach=measured / continuing if continuing else None,
    )
