"""What rules know of a run beside its series: from its config where it is there, otherwise from the metrics themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.diagnostics.series import Series, series
from trainer.runs.load import Run

MODALITIES = "stream_mixing/active/modalities/"
SHARE_ERROR = "blend/max_share_error"
BUILT_IN_MODEL = "trainer.model:build"


def micro_batches(run: Run) -> int:
    """Micro-batches a step and rank; 1 if the config is not there."""
    return max(int(run.setting("train.micro_batches", 1)), 1)


def ranks(run: Run) -> int:
    """Ranks of the run; 1 if env.json is not there."""
    return run.world_size or 1


def picks_between(run: Run, first: int, last: int) -> int:
    """Picks of one rank between the ends of two steps."""
    return (last - first) * micro_batches(run)


def has_own_pools(run: Run) -> bool:
    """Whether every rank picks from a pool of its own."""
    return bool(run.setting("data.mixing.batching_mode") == "device_per_stream")


def is_one_pool(run: Run) -> bool:
    """Whether a rank has one pool only. A blend of one source follows its share exactly; one of several never does."""
    errors = series(run, SHARE_ERROR)
    return not any(errors.values)


def modality_columns(run: Run) -> list[Series]:
    """Active readers by modality."""
    return [series(run, key) for key in run.train.keys if key.startswith(MODALITIES)]


def readers_of_a_rank(run: Run) -> float | None:
    """Active readers of one rank, all its pools together, at their most; None if it is not logged.

    All ranks report: with a shared pool the same readers several times, otherwise each its own. A source that has not been read
    yet does not report its modalities, so rows may lack some.
    """
    totals: dict[int, float] = {}
    for column in modality_columns(run):
        for step, value in zip(column.steps, column.values, strict=True):
            totals[step] = totals.get(step, 0.0) + value
    return max(totals.values()) / ranks(run) if totals else None


def sources(run: Run) -> list[Mapping[str, Any]]:
    """The tables `[[data.source]]`."""
    found = run.setting("data.source", [])
    return [table for table in found if isinstance(table, Mapping)] if isinstance(found, list) else []


def batch_sizes(run: Run) -> list[int]:
    """Every batch size that the config names."""
    tables = [run.setting("data.mixing", {}), *(table.get("mixing", {}) for table in sources(run))]
    found = [table.get("batch_size") for table in tables]
    for table in tables:
        found.extend(dict(table.get("batch_size_by_modality") or {}).values())
    return [size for size in found if isinstance(size, int)]


def state_bytes(run: Run) -> int | None:
    """Bytes of one group's state; known for the built-in model alone."""
    if run.setting("model.target") != BUILT_IN_MODEL:
        return None
    return 4 * int(run.setting("model.dim", 0)) * int(run.setting("model.num_layers", 0)) or None
