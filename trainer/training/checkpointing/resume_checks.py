"""Resuming with another config than the saved one: reject incompatible changes, warn about the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config.compare import flatten
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


def check_resume(config: RunConfig) -> None:
    """Refuse a checkpoint named by `checkpoint.resume` that a run could not resume from; no file is hashed.

    A URL is left to the run, which downloads it.

    Raises:
        UserError: it is not there, not whole, or was made with another config.
    """
    resume = config.checkpoint.resume
    if resume not in ("off", "auto") and not is_url(resume):
        check_config(checkpoint.named(resume, checkpoint.read_state).get("config", {}), config)


def check_config(saved: Mapping[str, Any], config: RunConfig) -> None:
    """Compare the config of a checkpoint with that of the run that resumes from it.

    Raises:
        UserError: keys differ that the saved state does not fit.
    """
    before, now = flatten(saved), flatten(config.model_dump(mode="json"))
    chosen = flatten(config.model_dump(mode="json", exclude_defaults=True))
    # A key that the saved config lacks is newer than the checkpoint: it was made with what is the default now.
    unchanged = now.keys() - before.keys() - chosen.keys()
    changed = sorted(key for key in (before.keys() | now.keys()) - unchanged if before.get(key) != now.get(key))
    breaking = [key for key in changed if key.startswith(BREAKING) and key not in HARMLESS]
    if breaking:
        listed = ", ".join(f"{key}: {before.get(key)!r} -> {now.get(key)!r}" for key in breaking)
        raise UserError(
            "--resume", f"the checkpoint was made with another config: {listed}", "restore them, or start a new run"
        )
    for key in changed:
        if key in SAID or not key.startswith(SILENT):
            logger.warning("resuming with another config: %s: %r -> %r", key, before.get(key), now.get(key))
