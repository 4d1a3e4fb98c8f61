"""What a run says to a person when it begins and when it ends."""

from __future__ import annotations

import logging
import os
import sys

from trainer.metrics.logger import get_logger
from trainer.training.checkpointing import checkpoint
from trainer.training.run_dir import FINISHED, RunDir, how_to_go_on
from trainer.training.run_state import Run
from trainer.training.setup.build import Parts

logger = get_logger(__name__)


def announce(parts: Parts, run_dir: RunDir) -> None:
    """The first words: what is trained, on what, and where it is written."""
    facts = parts.plan.facts
    count = sum(p.numel() for p in parts.model.parameters())
    logger.info(
        "%s: %s parameters, %d rank(s) on %s%s, run directory %s",
        parts.plan.config.run.name,
        f"{count:,}",
        facts.world_size,
        parts.device,
        f", up to {facts.tokens_per_step:,} tokens a step" if facts.tokens_per_step else "",
        run_dir.path,
    )


def conclude(run: Run, run_dir: RunDir, state: str, reason: str) -> None:
    """The last words: what happened, where it is, and what to look at."""
    lines = [f"{state} at step {run.step} of {run.config.train.steps}: {reason}"]
    if run.first_loss is not None and run.last_loss is not None:
        change = f"loss {run.first_loss:.4f} -> {run.last_loss:.4f} ({run.last_loss / run.first_loss:.0%} of the first)"
        if run.first_step:
            change = f"since step {run.first_step}: {change}"
        eval_loss = run.last_eval.get("loss")
        lines.append(change + (f", held out {eval_loss:.4f}" if eval_loss is not None else ""))
    lines.append(f"the run is in {run_dir.path}")
    lines.append("  metrics.jsonl   every logged number; events.jsonl: what happened besides")
    if checkpoint.complete_checkpoints(run_dir.checkpoints):
        lines.append(f"  checkpoints/    {_way_on(run, run_dir, state)}")
    if run.config.metrics.wandb.mode == "offline":
        lines.append(f"  wandb/          upload with: wandb sync {run_dir.path}/wandb/offline-run-*")
    lines.append("what the keys mean: docs/training/METRICS_LOSSES.md")
    for number, line in enumerate(lines):
        logger.log(logging.ERROR if state == "failed" and number == 0 else logging.INFO, "%s", line)
    sys.stderr.flush()


def _way_on(run: Run, run_dir: RunDir, state: str) -> str:
    ranks = run.info.world_size
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks if ranks == 1 else 0))
    command = how_to_go_on(run_dir, run.config, ranks, local_world_size=local)
    if state == FINISHED:
        return f"go on beyond step {run.step} with: {command} --steps {2 * run.config.train.steps}"
    return f"go on with: {command}"
