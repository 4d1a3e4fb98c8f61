"""Resuming with another config than the saved one: reject incompatible changes, warn about the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from trainer.config.load import flatten, recorded_settings
from trainer.config.schema import RunConfig
from trainer.errors import UserError
from trainer.metrics.logger import get_logger
from trainer.storage import is_url
from trainer.training.checkpointing import checkpoint

logger = get_logger(__name__)

# Changing these changes the shapes of weights, the data, or which tokens the stored states follow; the data set itself
# refuses what changes its cells.
BREAKING = (
    "model.",
    "data.tokenizer",
    "data.vocab_size",
    "data.seq_len",
    "train.tbptt_cells",
    "ledger.burn_in",
    "run.seed",
    "optimizer.name",
    "optimizer.target",
    "optimizer.group",
)
# The checkpoint has weights of its own; trust and contract decide which models are refused, not what they compute.
HARMLESS = ("model.weights", "model.trust", "model.contract")
# These say where and how a run is executed, not what it computes.
SILENT = (
    "run.",
    "metrics.",
    "sample.",
    "checkpoint.",
    "distributed.",
    "train.device",
    "ledger.probe_",
    "data.cache_",
    *HARMLESS,
)
# But this is said: a model that needs shards may be resumed without them by mistake.
SAID = ("distributed.strategy",)


def check_resume(config: RunConfig, resume: str) -> None:
    """Refuse a checkpoint that a run could not resume from; no file is hashed.

    Args:
        resume: `checkpoint.resume`, a path absolute. A URL is left to the run, which downloads it.

    Raises:
        UserError: it is not there, not whole, or was made with another config.
    """
    if resume not in ("off", "auto") and not is_url(resume):
        check_config(checkpoint.named(resume, checkpoint.read_state).get("config", {}), config)


def check_config(saved: Mapping[str, Any], config: RunConfig) -> None:
    """Compare the config of a checkpoint with that of the run that resumes from it.

    Raises:
        UserError: keys differ that the saved state does not fit.
    """
    changed = changed_settings(saved, {}, config, {})
    breaking = [key for key in changed if key.startswith(BREAKING) and key not in HARMLESS]
    if breaking:
        listed = ", ".join(f"{key}: {changed[key].before!r} -> {changed[key].after!r}" for key in breaking)
        raise UserError(
            "--resume", f"the checkpoint was made with another config: {listed}", "restore them, or start a new run"
        )
    for key, (before, after) in changed.items():
        if key in SAID or not key.startswith(SILENT):
            logger.warning("resuming with another config: %s: %r -> %r", key, before, after)


class Change(NamedTuple):
    """What a resume changed a setting from and to; None: there the key is not set."""

    before: Any
    after: Any


def changed_settings(
    saved: Mapping[str, Any],
    saved_environment: Mapping[str, Any],
    config: RunConfig,
    environment: Mapping[str, Any],
) -> dict[str, Change]:
    """What differs from the settings and versions that a checkpoint was made with; see `recorded_settings` for the keys."""
    before = recorded_settings(saved, saved_environment)
    now = recorded_settings(config.model_dump(mode="json"), environment)
    chosen = flatten(config.model_dump(mode="json", exclude_defaults=True))
    # A key that the saved config lacks is newer than the checkpoint: it was made with what is the default now.
    unchanged = now.keys() - before.keys() - chosen.keys()
    pairs = {key: Change(before.get(key), now.get(key)) for key in sorted((before.keys() | now.keys()) - unchanged)}
    return {key: change for key, change in pairs.items() if change.before != change.after}
