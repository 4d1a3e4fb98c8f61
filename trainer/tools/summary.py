"""A run's `trainer.training.Messages`: what is trained, the outcome, and how to resume."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainer.config.rules import reads_lanes
from trainer.distributed.strategy import layout_of, num_parameters, own_part
from trainer.errors import UserError
from trainer.metrics.catalog import EMA_PREFIX, ERROR_SUFFIX, ERRORS_SHOWN
from trainer.metrics.logger import get_logger
from trainer.tools.doubts import planned as planned
from trainer.tools.doubts import warn_of_rate_change, why_no_noise_scale
from trainer.training import checkpoint
from trainer.training.build import runs_on, state_bytes
from trainer.training.plan import Plan, width_of
from trainer.training.run_dir import FINISHED
from trainer.wording import counted, decimals_text

if TYPE_CHECKING:
    from trainer.training.extension import RunView
    from trainer.training.open_run import Run

logger = get_logger(__name__)
every_rank_logger = get_logger(f"{__name__}.memory", rank_zero_only=False)


def ended(run: Run, state: str, reason: str) -> None:
    """Log the outcome, and the command that resumes the run or trains it further."""
    position, run_dir, of = run.position, run.view.run_dir, f" of {run.view.config.train.steps}"
    if run.length.is_in_tokens:  # its steps are only those of full batches
        of = ""
    lines = [f"{state} at step {position.step}{of}: {reason}"]
    if isinstance(sys.exc_info()[1], UserError):  # which is printed last of all
        run.watchdog.write(lines[0])
        lines[0] = lines[0].removesuffix(reason) + "see the error below"
    lines.append(f"the run is in {run_dir.path}")
    if position.untrained_steps:
        steps = counted(position.untrained_steps, "step")
        lines.append(f"{steps} trained no token: all targets were masked, or not known")
    saved = checkpoint.complete_checkpoints(run_dir.checkpoints)
    if saved:
        lines += _next_command(run, state, reason)
    elif state == "stopped":
        lines.append("nothing was trained, so the exit code is 1; the same command begins anew")
    if any((run_dir.path / "wandb").glob("offline-run-*")):
        lines.append(f"wandb: upload with: wandb sync {shlex.quote(str(run_dir.path))}/wandb/offline-run-*")
    if position.last_eval is not None:  # last of all, since it is the result
        lines += _evaluation_lines(run, *position.last_eval)
    if saved and run.view.config.checkpoint.keep_best:
        from trainer.lab.extensions import BEST

        best = checkpoint.read_state(saved[0])["extensions"].get(BEST)
        if best:
            lines.append(f"best: step {best['step']}, {best['key']} {decimals_text(best['value'])}")
    for number, line in enumerate(lines):
        level = logging.ERROR if state == "failed" and number == 0 else logging.INFO
        logger.log(level, "%s", line)
    sys.stderr.flush()


def _evaluation_lines(run: Run, step: int, metrics: Mapping[str, float]) -> list[str]:
    """The losses of the last evaluation, with their errors, and how much of each set was read."""
    lines: list[str] = []
    if run.view.config.eval.depth:
        from trainer.tools.runs.readings import curves_of, in_words

        cell = run.view.config.data.seq_len
        lines += [f"{name or 'held out'}: {in_words(curve, cell)}" for name, curve in curves_of(metrics).items()]
    losses, more = [], ""
    for each in () if run.evaluator is None else run.evaluator.sets:
        if each.sample is not None and not each.name:
            more = f"; on all of it: train eval {shlex.quote(str(run.view.run_dir.path))} --held-out"
        key = f"eval/{each.name}/loss" if each.name else "eval_loss"
        if key in metrics:
            error, shown = metrics.get(key + ERROR_SUFFIX), f" ({each.read})"
            if error is not None:
                shown = f" +- {decimals_text(ERRORS_SHOWN * error)} (95 %; {each.read})"
            if EMA_PREFIX + key in metrics:
                shown += f", with averaged weights {decimals_text(metrics[EMA_PREFIX + key])}"
            losses.append(f"{each.name or 'held out'} {decimals_text(metrics[key])}{shown}")
    if losses:
        lines.append(f"evaluated at step {step}: {', '.join(losses)}{more}")
    return lines


def _next_command(run: Run, state: str, reason: str) -> list[str]:
    if reason == "data exhausted":  # more steps would find no data
        return []
    command = resume_command(run.view)
    if state == FINISHED:
        length = f"--steps {2 * run.view.config.train.steps}"
        if run.length.is_in_tokens:
            length = f"--set train.tokens={2 * run.length.total}"
        return [f"train beyond step {run.position.step} with: {command} {length}"]
    return [f"resume with: {command}"]


def resume_command(run: RunView) -> str:
    """The command line that resumes a run from the same working directory, with all its settings.

    Of several nodes, which each have a launcher, only the options to add.
    """
    ranks, options = run.info.world_size, f"--resume auto --run-dir {shlex.quote(str(run.run_dir.path))}"
    if os.environ.get("LOCAL_WORLD_SIZE", "1") != str(ranks):
        return f"the same command line and {options}"
    config_path, nproc = shlex.quote(str(run.run_dir.resolved_config)), f"--nproc {ranks} " * (ranks > 1)
    return f"train {nproc}--config {config_path} {options}"


def begun(view: RunView) -> None:
    """Log model, machine, precision and run directory, and how the ranks share the model."""
    plan, facts, model = view.plan, view.plan.facts, view.model
    if view.found is not None:
        warn_of_rate_change(view.found[1], plan, view.position.reached)
    device = next(model.parameters()).device
    ranks, precision = counted(facts.world_size, "rank"), plan.config.train.precision
    text = f"{num_parameters(model):,} parameters, {ranks} on {device} in {precision}"
    if facts.tokens_per_step:
        text += f", up to {facts.tokens_per_step:,} tokens per step"
    text += f", run directory {view.run_dir.path}"
    implementation = getattr(model, "implementation", None)
    if implementation is not None and plan.has_built_in_model:
        text += f"; {implementation(device, precision)}"
    if facts.world_size > 1:
        held = str(layout_of(model.parameters()) or "each rank holds the whole model")
        text += f"; {plan.config.distributed.strategy}: {held}"
    logger.info("%s: %s", plan.config.run.name, text)
    if align := alignment(plan, model):
        logger.info("full rows, align = %s", align)
    reason = why_no_noise_scale(plan.config, facts.world_size)
    if plan.config.gns.enabled and reason is not None:
        logger.info("the gradient noise scale is not measured: %s", reason)


def alignment(plan: Plan, model: nn.Module | None) -> str:
    """How documents lie in full rows, and why; empty if there are none. `model`: see `runs_on`."""
    has_files = any(each.streams and not each.is_off for each in plan.sources)
    if not has_files or not reads_lanes(plan.config):
        return ""
    if runs_on(plan, model):
        return "stream: documents begin within rows, and no position is padded"
    if plan.config.data.align == "document":
        return "document: each begins a row, as data.align says"
    name = type(model or plan.weightless_model()).__name__
    why = f"since {name} does not declare resets_in_one_pass"
    return f"document: each begins a row, {why}; with stream no row would be padded"


def out_of_memory(run: Run) -> None:
    """Log what this rank's memory holds, by part."""
    parameters, state = list(run.view.model.parameters()), run.view.state
    states = sum(ledger.capacity for ledger in state.ledgers.values())
    sizes = {
        "weights": _bytes(parameters),
        "gradients": _bytes([parameter.grad for parameter in parameters]),
        "optimizer": _bytes(tree_leaves([*state.optimizer.state.values()])),
        "averages": _bytes(state.tensors.values()),
        "ledger": states * state_bytes(run.view.config.ledger, width_of(run.view.model)),
    }
    if run.view.device.type == "cuda":
        sizes["all tensors at their peak"] = torch.cuda.max_memory_allocated(run.view.device)
    found = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in sizes.items())
    text = "out of memory at step %d, rank %d: %s; docs/memory.md lists what takes less"
    every_rank_logger.error(text, run.position.step + 1, run.view.info.rank, found)


def _bytes(held: Iterable[object]) -> int:
    """What this rank holds of the tensors among them."""
    return sum(own_part(each).nbytes for each in held if isinstance(each, Tensor))
