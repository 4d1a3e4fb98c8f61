"""Metrics: catalog, payload contract, aggregation, tracker and sinks.

Names are loaded on first use, so that `trainer.metrics.payload_contract` and the other contract
modules can be imported without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trainer.metrics.aggregate import Recorder, Reporter, SumCount, reduce_loss_metrics, reduce_over_ranks
    from trainer.metrics.best_effort import BestEffort, Diagnostics, SkipBatch
    from trainer.metrics.catalog.lookup import CATALOG, UnknownMetric, lookup, register
    from trainer.metrics.catalog.spec import MetricSpec
    from trainer.metrics.logger import format_metrics, get_logger
    from trainer.metrics.noise_scale.hooks import GradientNoiseScale
    from trainer.metrics.tracker import MetricsTracker, StepMetrics

# Those that import torch come last.
_MODULES: Final = "best_effort catalog.lookup catalog.spec logger aggregate noise_scale.hooks tracker"

__all__ = [
    "CATALOG",
    "BestEffort",
    "Diagnostics",
    "GradientNoiseScale",
    "MetricSpec",
    "MetricsTracker",
    "Recorder",
    "Reporter",
    "SkipBatch",
    "StepMetrics",
    "SumCount",
    "UnknownMetric",
    "format_metrics",
    "get_logger",
    "lookup",
    "reduce_loss_metrics",
    "reduce_over_ranks",
    "register",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        modules = (import_module(f"{__name__}.{each}") for each in _MODULES.split())
        return next(getattr(module, name) for module in modules if hasattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
