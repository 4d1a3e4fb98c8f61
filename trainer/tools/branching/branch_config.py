"""The config of a branch: the run's at the checkpoint, with another batch and a constant learning rate."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from trainer.config.data_tables import MixingTable, SourceTable
from trainer.config.schema import RunConfig, SchedulerTable
from trainer.tools.branching.study import Branch, Study

LOGGED_ROWS = 20  # of a branch at least, if its training loss is not what counts
NEVER = 10**9  # steps between evaluations: there is one after the last step


def training_config(study: Study, branch: Branch) -> RunConfig:
    """The config that a branch trains with. Rows that differ from the run's would change the held-out batches: then it does
    not evaluate, see `evaluation_config`."""
    origin = study.origin
    config = _without_side_effects(origin.config)
    evaluates = study.is_held_out and branch.batch.row_share == 1
    every = 1 if not study.is_held_out else max(branch.steps // LOGGED_ROWS, 1)
    changed: dict[str, dict[str, Any]] = {
        "train": {
            "steps": origin.step + branch.steps,
            "tokens": 0,
            "micro_batches": branch.batch.micro_batches,
            "on_non_finite": "stop",
        },
        "optimizer": {"lr": branch.lr},
        "ledger": _ledger(config, branch.batch.factor, branch.seed),
        "eval": {"every": NEVER if evaluates else 0},
        "metrics": {"log_interval": every},
        "data": {
            "mixing": _fewer_rows(config.data.mixing, branch.batch.row_share),
            "source": [_source(source, branch.batch.row_share) for source in config.data.source],
        },
    }
    return _changed(config, changed).model_copy(update={"scheduler": SchedulerTable(name="constant")})


def evaluation_config(study: Study, branch: Branch) -> RunConfig:
    """The config that the end of a branch with fewer rows is evaluated with: the run's own held-out batches."""
    config = training_config(study, branch)
    data = {"mixing": study.origin.config.data.mixing, "source": study.origin.config.data.source}
    return _changed(config, {"data": data, "eval": {"every": NEVER}})


def _changed(config: RunConfig, changed: dict[str, dict[str, Any]]) -> RunConfig:
    tables = {table: getattr(config, table).model_copy(update=update) for table, update in changed.items()}
    return config.model_copy(update=tables)


def _without_side_effects(config: RunConfig) -> RunConfig:
    """Without what a branch has no use for: samples, probes, other sinks, stores, and checkpoints but at its end."""
    wandb = config.metrics.wandb.model_copy(update={"mode": "disabled"})
    steps = {"every": 0, "every_minutes": 0.0, "keep_last": 1, "keep_every": 0}
    checkpoint = {**steps, "background": False, "remote": None, "resume": "auto"}
    return _changed(
        config,
        {
            "ledger": {"probe_every": 0},
            "gns": {"enabled": False},
            "metrics": {"profile": 0, "stdout": "off", "wandb": wandb, "tensorboard": False},
            "sample": {"every": 0},
            "checkpoint": checkpoint,
        },
    )


def _ledger(config: RunConfig, factor: Fraction, seed: int) -> dict[str, Any]:
    """What counts steps counts as many tokens as before."""
    table = config.ledger
    changed: dict[str, Any] = {}
    if table.stale_threshold:
        changed["stale_threshold"] = max(math.ceil(table.stale_threshold / factor), 1)
    if table.wipe_every:
        changed["wipe_every"] = max(round(table.wipe_every / factor), 1)
    if table.wipe_mode == "none" and seed:
        # The groups that the run had in flight are never read on: they must make room, which "none" would not let them.
        changed["wipe_mode"] = "lru"
    return changed


def _fewer_rows(mixing: MixingTable, share: Fraction) -> MixingTable:
    by_modality = {name: _rows(size, share) for name, size in mixing.batch_size_by_modality.items()}
    update = {"batch_size": _rows(mixing.batch_size, share), "batch_size_by_modality": by_modality}
    return mixing.model_copy(update=update)


def _source(source: SourceTable, share: Fraction) -> SourceTable:
    own = source.mixing
    update: dict[str, Any] = {}
    if own.batch_size is not None:
        update["batch_size"] = _rows(own.batch_size, share)
    if own.batch_size_by_modality is not None:
        update["batch_size_by_modality"] = {name: _rows(n, share) for name, n in own.batch_size_by_modality.items()}
    return source.model_copy(update={"mixing": own.model_copy(update=update)})


def _rows(size: int, share: Fraction) -> int:
    rows = size * share
    assert rows.denominator == 1, (size, share)
    return rows.numerator
