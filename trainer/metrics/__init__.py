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
    from trainer.metrics.catalog import CATALOG, UnknownMetric, lookup, register
    from trainer.metrics.catalog_rows import MetricSpec
    from trainer.metrics.logger import format_metrics, get_logger
    from trainer.metrics.noise_scale.hooks import GradientNoiseScale
    from trainer.metrics.tracker import MetricsTracker, StepMetrics

_NAMES: Final = {
    "aggregate": "Recorder Reporter SumCount reduce_loss_metrics reduce_over_ranks",
    "best_effort": "BestEffort Diagnostics SkipBatch",
    "catalog": "CATALOG UnknownMetric lookup register",
    "catalog_rows": "MetricSpec",
    "logger": "format_metrics get_logger",
    "noise_scale.hooks": "GradientNoiseScale",
    "tracker": "MetricsTracker StepMetrics",
}

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
    for home, names in _NAMES.items():
        if name in names.split():
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
