"""The pieces of a training step that tell where gradient noise comes from: each micro-batch in two halves."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.arrays import IGNORED
from trainer.data.blend import BlendDataset
from trainer.metrics.noise_scale.components import NUM_SUMS, Piece, normal_equations
from trainer.training.step.microbatch import MicroBatch, halves


def coincidence(blend: BlendDataset, concentrations: Sequence[float], step: int, batch: int) -> float:
    """Probability that two rows, drawn independently from the blend as it is at a step, come from the same stream.

    Args:
        concentrations: the same within each source.
        batch: the step's first micro-batch.
    """
    shares = blend.shares_at(step, batch)
    return sum(share**2 * within for share, within in zip(shares, concentrations, strict=True))


def split(window: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches in halves, whose gradients add up to the same sum."""
    return [half for micro in window for half in halves(micro)]


def equations_of(window: Sequence[MicroBatch], norms: Tensor | None) -> Tensor:
    """[NUM_SUMS] float64 on the device: this rank's part of the step's `normal_equations`. Waits for the device.

    Args:
        window: what `split` gave.
        norms: what `GradientNoiseScale.pair_norms` gave after the last backward.
    """
    assert norms is not None, "a window of pieces without their norms"
    kappas, squares, sums = norms.T.tolist()
    equations = normal_equations([_piece(micro) for micro in window], kappas, squares, sums)
    return torch.from_numpy(equations).to(norms.device)


def no_equations(device: torch.device) -> Tensor:
    """What a rank contributes that could not measure: all ranks then leave the step out."""
    return torch.full((NUM_SUMS,), torch.nan, dtype=torch.float64, device=device)


def _piece(micro: MicroBatch) -> Piece:
    labels = micro.extras.get("dataset_labels") or [""]
    located = json.loads(micro.meta)
    stream = located.get("stream") if isinstance(located, dict) else None  # a data set of one's own may say anything
    weights = (micro.targets != IGNORED).sum(dim=1).tolist()
    groups = micro.carry.group_ids.tolist() if micro.carry is not None else [-1] * len(weights)
    return Piece((*sorted(set(labels)), stream), groups, weights)
