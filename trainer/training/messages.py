"""What a run tells people when it begins and when it ends."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.config.rules import why_no_noise_scale
from trainer.config.schema import RunConfig
from trainer.distributed.shards import layout_of, own_part
from trainer.distributed.strategy import num_parameters
from trainer.errors import UserError
from trainer.metrics.logger import get_logger
from trainer.training.checkpointing import checkpoint
from trainer.training.checkpointing.train_state import Position, TrainState
from trainer.training.run import Run
from trainer.training.run_dir import FINISHED, RunDir, resume_command
from trainer.training.setup.plan import Plan, width_of
from trainer.training.setup.plausible import MOMENTS, ledger_bytes
from trainer.training.step.schedule import Length, make_schedule
from trainer.wording import counted

logger = get_logger(__name__)
RATE_MARGIN = 0.01


def announce(plan: Plan, state: TrainState, device: torch.device, run_dir: RunDir) -> None:
    """Log what is trained, on what, where it is written, and how the ranks share it."""
    facts, model = plan.facts, state.model
    logger.info(
        "%s: %s parameters, %s on %s%s, run directory %s",
        plan.config.run.name,
        f"{num_parameters(model):,}",
        counted(facts.world_size, "rank"),
        device,
        f", up to {facts.tokens_per_step:,} tokens per step" if facts.tokens_per_step else "",
        run_dir.path,
    )
    if facts.world_size > 1:
        logger.info("%s", _shares(plan, state))
    reason = why_no_noise_scale(plan.config, facts.world_size)
    if plan.config.gns.enabled and reason is not None:
        logger.info("the gradient noise scale is not measured: %s", reason)


def _shares(plan: Plan, state: TrainState) -> str:
    """What one rank of several holds."""
    parameters = list(state.model.parameters())
    layout = layout_of(parameters)
    trained = [p for p in parameters if p.requires_grad]
    own, weights, gradients = (
        sum(map(size, found)) for size, found in ((_own_bytes, parameters), (_bytes, parameters), (_own_bytes, trained))
    )
    sizes = {"weights": own, "gradients": gradients, "optimizer": MOMENTS[plan.config.optimizer.name] * gradients}
    if plan.config.optimizer.target is not None:
        del sizes["optimizer"]  # not known
    if state.ledger is not None:
        sizes["ledger"] = ledger_bytes(plan.config.ledger, width_of(state.model))
    held = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in sizes.items())
    if layout is None:
        return f"ddp: each rank holds the whole model: {held}"
    return f"{plan.config.distributed.strategy}: {layout} of {weights / 1e6:,.1f} MB of weights; a rank holds: {held}"


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _own_bytes(tensor: Tensor) -> int:
    return _bytes(own_part(tensor))


def say_rate_change(saved: Mapping[str, Any], plan: Plan, position: Position) -> None:
    """Warn where a resume makes the learning rate jump: a schedule over another length, or another schedule.

    Args:
        saved: the config of the checkpoint.
    """
    try:
        before = RunConfig.model_validate(saved)
        length = Length.of(before, plan.facts.tokens_per_micro)
        former = make_schedule(before, length)
    except (ValueError, UserError):  # of an earlier version; what differs is said anyway
        return
    if length.is_in_tokens != plan.length.is_in_tokens or not position.step:
        return
    then, now = (
        schedule(min(position.reached, each.total))
        for schedule, each in ((former, length), (make_schedule(plan.config, plan.length), plan.length))
    )
    if abs(now - then) > RATE_MARGIN * max(abs(then), abs(now)):
        text = "the learning rate jumps: at step %d it was %.3g, by this config it is %.3g (the schedule spans the whole run)"
        logger.warning(text, position.step, then, now)


def summarize(run: Run, run_dir: RunDir, state: str, reason: str) -> None:
    """Log what happened, where the record is, and what to look at next."""
    position = run.position
    # In tokens, how many steps a run has is known at its end alone if its batch decides for itself.
    grows = run.length.is_in_tokens and run.config.micro_batches.auto is not None
    of = "" if grows else f" of {run.config.train.steps}"
    lines = [f"{state} at step {position.step}{of}: {reason}"]
    first, last = position.first_loss, position.last_loss
    if first is not None and last is not None:
        # Of single steps, which a change of source or a schedule moves: the report has means.
        losses = [f"{loss:.4f} at step {step}" for step, loss in (first, last)]
        lines.append(f"loss {losses[0]}, {losses[1]} ({last[1] / first[1]:.0%})")
    if position.last_eval is not None:
        lines += _evaluated(*position.last_eval, run.config.eval.batches)
    lines.append(f"the run is in {run_dir.path}")
    lines.append("  metrics.jsonl   every logged number; events.jsonl: other events")
    if checkpoint.complete_checkpoints(run_dir.checkpoints):
        lines.append(f"  checkpoints/    {_next_command(run, run_dir, state)}")
    elif state == "stopped":
        lines.append("nothing was trained, so the exit code is 1; the same command begins anew")
    if any((run_dir.path / "wandb").glob("offline-run-*")):
        lines.append(f"  wandb/          upload with: wandb sync {run_dir.path}/wandb/offline-run-*")
    lines.append("what the keys mean: docs/training/METRICS_LOSSES.md")
    for number, line in enumerate(lines):
        logger.log(logging.ERROR if state == "failed" and number == 0 else logging.INFO, "%s", line)
    sys.stderr.flush()


def _evaluated(step: int, metrics: Mapping[str, float], batches: int) -> list[str]:
    """The losses of the last evaluation, which reads at most so many micro-batches a rank of the held-out documents."""
    losses = []
    if "eval_loss" in metrics:
        losses.append(f"held out {metrics['eval_loss']:.4f} (the first {counted(batches, 'micro-batch')} a rank)")
    for key, value in metrics.items():
        if key.startswith("eval/") and key.endswith("/loss"):
            losses.append(f"{key.removeprefix('eval/').removesuffix('/loss')} {value:.4f}")
    return [f"evaluated at step {step}: {', '.join(losses)}"] if losses else []


def _next_command(run: Run, run_dir: RunDir, state: str) -> str:
    ranks = run.info.world_size
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks if ranks == 1 else 0))
    command = resume_command(run_dir, run.config, ranks, local_world_size=local)
    if state == FINISHED:
        return f"train beyond step {run.position.step} with: {command} --steps {2 * run.config.train.steps}"
    return f"resume with: {command}"
