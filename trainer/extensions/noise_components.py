"""Training steps that tell where gradient noise comes from: each micro-batch is run in two halves (`gns.components_every`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.arrays import IGNORED
from trainer.data.batch import MicroBatch
from trainer.metrics.best_effort import SkipBatch
from trainer.metrics.noise_scale import components, estimate
from trainer.metrics.noise_scale.components import Piece, normal_equations
from trainer.training.extension import Extension

if TYPE_CHECKING:
    from trainer.training.run import Run


class NoiseSources(Extension):
    """Feeds the components of the noise scale. Steps in halves are no windows of its averages."""

    keeps = "pairs"
    num_sums = estimate.NUM_SUMS + components.NUM_SUMS

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.measure_every = run.config.gns.components_every
        # The same within each source: the probability that two of its rows come from one stream.
        self._concentrations = [source.concentration for source in run.plan.sources]
        self._coincidence = 0.0
        self._halves: list[MicroBatch] = []

    def window_read(self, step: int, window: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """The window in halves."""
        shares = self.run.state.dataset.shares_at(step, (step - 1) * len(window))
        within = zip(shares, self._concentrations, strict=True)
        self._coincidence = sum(share**2 * same for share, same in within)
        self._halves = [half for micro in window for half in halves(micro)]
        return self._halves

    def updated(self) -> Tensor:
        """This rank's part of the noise scale's sums, and of the step's `normal_equations`. Waits for the device."""
        gns = self.run.gns
        norms = None if gns is None else gns.pair_norms()
        if gns is None or norms is None:
            raise SkipBatch("the noise scale did not measure the halves")
        kappas, squares, sums = norms.T.tolist()
        equations = normal_equations([_piece(micro) for micro in self._halves], kappas, squares, sums)
        return torch.cat([gns.local_sums(), torch.from_numpy(equations).to(norms.device)])

    def summed(self, sums: Sequence[float], *, grad_sq: float, grad_factor: float, is_taken: bool) -> None:
        """Take the window into the components."""
        window, equations = sums[: estimate.NUM_SUMS], sums[estimate.NUM_SUMS :]
        if (
            is_taken
            and self.run.gns is not None
            and window[estimate.FAULTS] == 0.0
            and window[estimate.BIG_NOISE] > 0.0
        ):
            num_rows = window[estimate.KAPPA] ** 2 / window[estimate.BIG_NOISE]
            self.run.gns.components.update(equations, grad_sq / grad_factor**2, num_rows, self._coincidence)


def halves(micro: MicroBatch) -> list[MicroBatch]:
    """The first and the second half of the rows; a single row, and that row with nothing to predict and no group.

    Always two: ranks that exchange states, or synchronize in a forward, must do it equally often.
    """
    middle = len(micro.targets) // 2
    return [micro.rows(slice(middle)), micro.rows(slice(middle, None))] if middle else [micro, micro.masked()]


def _piece(micro: MicroBatch) -> Piece:
    labels = micro.extras.get("dataset_labels") or [""]
    located = json.loads(micro.meta)
    stream = located.get("stream") if isinstance(located, dict) else None  # a data set of one's own may say anything
    weights = (micro.targets != IGNORED).sum(dim=1).tolist()
    groups = micro.carry.group_ids.tolist() if micro.carry is not None else [-1] * len(weights)
    return Piece((*sorted(set(labels)), stream), groups, weights)
