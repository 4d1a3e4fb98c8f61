"""Settings of a run that rules need: from its config and environment where they are known, else from its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any, Final

from trainer.tools.diagnostics.outcome import Knob
from trainer.tools.diagnostics.series import Series, series
from trainer.tools.runs.load import RunRecord

MODALITIES: Final = "stream_mixing/active/modalities/"
SHARE_ERROR: Final = "blend/max_share_error"
MICRO_BATCHES: Final = "train/micro_batches"


def micro_batches(run: RunRecord, since: int = 0) -> int:
    """Micro-batches per step and rank, the fewest since a step where they change; 1 if unknown."""
    setting = _configured_micro_batches(run)
    if isinstance(setting, int):
        return max(setting, 1)
    steps, values = run.train.column(MICRO_BATCHES)
    return int(min((m for step, m in zip(steps, values, strict=True) if step >= since), default=1))


def batches_through(run: RunRecord, step: int) -> int:
    """Micro-batches of a rank through a step. Where their number changes, as many in each step as in the next logged one."""
    if isinstance(_configured_micro_batches(run), int):
        return step * micro_batches(run)
    total, before, m = 0.0, 0, 1.0
    for logged, m in zip(*run.train.column(MICRO_BATCHES), strict=True):
        total, before = total + (min(logged, step) - min(before, step)) * m, logged
    return int(total + max(step - before, 0) * m)


def _configured_micro_batches(run: RunRecord) -> Any:
    """A number, a schedule, or None for a loop without a config, which may log them."""
    return run.setting("train.micro_batches", 1 if run.config else None)


def ranks(run: RunRecord) -> int:
    """Number of ranks; 1 if unknown."""
    return run.world_size or 1


def has_own_pools(run: RunRecord) -> bool:
    """Whether every rank picks from its own pool."""
    return bool(run.setting("data.mixing.batching_mode") == "device_per_stream")


def is_one_pool(run: RunRecord) -> bool:
    """Whether a rank has a single pool; in a record without a config, of several sources some row has an inexact share."""
    tables = sources(run)
    if tables and not any("include" in table for table in tables):
        return len(tables) == 1
    return not any(series(run, SHARE_ERROR).values)


def modality_columns(run: RunRecord) -> list[Series]:
    """Active readers by modality."""
    return [series(run, key) for key in run.train.keys if key.startswith(MODALITIES)]


def readers_of_a_rank(run: RunRecord) -> float | None:
    """Most active readers that one rank has in all its pools together; None if not logged.

    The metric sums over ranks: with a shared pool it counts the same readers once per rank. Rows may lack modalities, since a
    source reports them only after its first batch.
    """
    totals: dict[int, float] = {}
    for column in modality_columns(run):
        for step, value in zip(column.steps, column.values, strict=True):
            totals[step] = totals.get(step, 0.0) + value
    return max(totals.values()) / ranks(run) if totals else None


def sources(run: RunRecord) -> list[Mapping[str, Any]]:
    """The tables `[[data.source]]`."""
    found = run.setting("data.source", [])
    return [table for table in found if isinstance(table, Mapping)] if isinstance(found, list) else []


def pools(run: RunRecord, readers: int) -> list[tuple[float, int]] | None:
    """(share of the micro-batches, readers) of the pool of each source on a rank; None if the record does not tell.

    A source has at most its `num_streams_mixed` readers, and at most the rank's `readers` less one for every other source.
    A weight with a schedule counts as the mean of its points.
    """
    tables = sources(run)
    if len(tables) < 2:
        return [(1.0, readers)] if tables or is_one_pool(run) else None
    if any("include" in table for table in tables):
        return None
    weights = [_mean_weight(table.get("weight", 1.0)) for table in tables]
    mixed = run.setting("data.mixing.num_streams_mixed", readers)
    most = readers - len(tables) + 1
    found = [min(dict(table.get("mixing", {})).get("num_streams_mixed", mixed), most) for table in tables]
    return [(weight / sum(weights), max(count, 1)) for weight, count in zip(weights, found, strict=True)]


def _mean_weight(weight: Any) -> float:
    if isinstance(weight, Mapping):
        return float(weight.get("scale", 1.0)) * fmean(map(float, weight["points"].values()))
    return float(weight)


def batch_sizes(run: RunRecord) -> list[int]:
    """Every batch size in the config."""
    tables = [run.setting("data.mixing", {}), *(table.get("mixing", {}) for table in sources(run))]
    found = [table.get("batch_size") for table in tables]
    for table in tables:
        found.extend(dict(table.get("batch_size_by_modality") or {}).values())
    return [size for size in found if isinstance(size, int)]


def has_own_model(run: RunRecord) -> bool:
    """Whether the model is the user's."""
    return run.setting("model.target") is not None


def state_bytes(run: RunRecord) -> int | None:
    """Bytes of the recurrent state of one group; None without a state, and for records that do not say it."""
    width = run.environment.get("state_width")
    return (width or 0) * (2 if run.setting("ledger.dtype") == "bfloat16" else 4) or None


def lower_lr(run: RunRecord) -> Knob:
    """Half the learning rate."""
    lr = run.setting("optimizer.lr")
    return Knob("optimizer.lr", lr, lr / 2 if isinstance(lr, float) else "half of it")
