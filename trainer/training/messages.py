"""What a run tells people when it begins and when it ends."""

from __future__ import annotations

import logging
import os
import sys

import torch
from torch import nn

from trainer.metrics.logger import get_logger
from trainer.training.checkpointing import checkpoint
from trainer.training.run import Run
from trainer.training.run_dir import FINISHED, RunDir, resume_command
from trainer.training.setup.plan import Plan
from trainer.wording import counted

logger = get_logger(__name__)


def announce(plan: Plan, model: nn.Module, device: torch.device, run_dir: RunDir) -> None:
    """Log what is trained, on what, and where it is written."""
    facts = plan.facts
    logger.info(
        "%s: %s parameters, %s on %s%s, run directory %s",
        plan.config.run.name,
        f"{sum(p.numel() for p in model.parameters()):,}",
        counted(facts.world_size, "rank"),
        device,
        f", up to {facts.tokens_per_step:,} tokens per step" if facts.tokens_per_step else "",
        run_dir.path,
    )


def summarize(run: Run, run_dir: RunDir, state: str, reason: str) -> None:
    """Log what happened, where the record is, and what to look at next."""
    position = run.position
    lines = [f"{state} at step {position.step} of {run.config.train.steps}: {reason}"]
    first, last = position.first_loss, position.last_loss
    if first is not None and last is not None:
        change = f"loss {first:.4f} -> {last:.4f} ({last / first:.0%} of the first)"
        if position.first_step:
            change = f"since step {position.first_step}: {change}"
        eval_loss = position.last_eval.get("loss")
        lines.append(change + (f", held out {eval_loss:.4f}" if eval_loss is not None else ""))
    lines.append(f"the run is in {run_dir.path}")
    lines.append("  metrics.jsonl   every logged number; events.jsonl: other events")
    if checkpoint.complete_checkpoints(run_dir.checkpoints):
        lines.append(f"  checkpoints/    {_next_command(run, run_dir, state)}")
    if run.config.metrics.wandb.mode == "offline":
        lines.append(f"  wandb/          upload with: wandb sync {run_dir.path}/wandb/offline-run-*")
    lines.append("what the keys mean: docs/training/METRICS_LOSSES.md")
    for number, line in enumerate(lines):
        logger.log(logging.ERROR if state == "failed" and number == 0 else logging.INFO, "%s", line)
    sys.stderr.flush()


def _next_command(run: Run, run_dir: RunDir, state: str) -> str:
    ranks = run.info.world_size
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks if ranks == 1 else 0))
    command = resume_command(run_dir, run.config, ranks, local_world_size=local)
    if state == FINISHED:
        return f"train beyond step {run.position.step} with: {command} --steps {2 * run.config.train.steps}"
    return f"resume with: {command}"
