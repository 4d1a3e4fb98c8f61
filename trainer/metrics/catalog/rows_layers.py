"""Catalog rows of layers and of the optimizer's parameter groups; see docs/gns.md."""

from __future__ import annotations

from functools import partial

from trainer.metrics.catalog.spec import MetricSpec

_LAYER = "layer/<name>/"
_GROUP = "param_group/<name>/"
_Row = partial(MetricSpec, group="Layers", window="last")

ROWS: tuple[MetricSpec, ...] = tuple(
    row
    for prefix, of in ((_LAYER, "layer"), (_GROUP, "parameter group"))
    for row in (
        _Row(
            name=f"{prefix}grad_norm",
            unit="",
            title=f"Gradient norm by {of}",
            description=f"L2 norm of the {of}'s gradient before clipping; the squares add up to that of grad_norm.",
            healthy="Within a factor of a hundred of each other.",
            pathological="0: no gradient reaches it. One has nearly all of grad_norm: clipping shrinks all others with it.",
        ),
        _Row(
            name=f"{prefix}update_ratio",
            unit="ratio",
            precision=8,
            title=f"Update over weight by {of}",
            description=f"L2 norm of the step's change of the {of}'s weights over that of the weights, weight decay included; "
            "of large tensors from a sample of their entries.",
            healthy="1e-4 to 1e-2 at the peak learning rate; follows the schedule.",
            pathological="Far below all others: it stands still. Above 0.1: its weights are replaced within a few steps.",
        ),
        _Row(
            name=f"{prefix}b_simple",
            unit="sequences",
            precision=1,
            title=f"Noise scale by {of}",
            description=f"B_simple of the {of}'s gradient alone, averaged over logged steps; absent without an upper bound.",
            healthy="Within a factor of ten of gns/b_simple.",
            pathological="Far above the batch: the layer sees mostly noise.",
        ),
    )
)
