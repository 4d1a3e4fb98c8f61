"""A run on this rank, from plan to end: process group, state, resume, loop. `train()` is what the console program calls."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from textwrap import shorten

import torch

from trainer.config.schema import RunConfig
from trainer.data.tokenizer import HuggingFaceTokenizer
from trainer.distributed.env import GroupError, pick_backend, pick_device, process_group, rank_info
from trainer.distributed.watchdog import is_of_a_collective
from trainer.errors import UserError, raise_found
from trainer.metrics.catalog.lookup import ERROR_SUFFIX, ERRORS_SHOWN
from trainer.metrics.logger import get_logger
from trainer.metrics.sinks import kept_for_payloads
from trainer.training.around_step import CorruptedError, NonFiniteError, stopped_by
from trainer.training.checkpointing import checkpoint
from trainer.training.checkpointing.saver import SaveError
from trainer.training.loop import run_loop
from trainer.training.run import Run
from trainer.training.run_dir import FINISHED, RunDir, resume_command
from trainer.training.setup.open_run import Launch, open_run
from trainer.training.setup.plan import make_plan
from trainer.training.signals import exits_as_errors
from trainer.wording import error_text

logger = get_logger(__name__)
every_rank_logger = get_logger(f"{__name__}.failure", rank_zero_only=False)
EXIT_FAILED = 1


class RunFailed(Exception):
    """Something unexpected ended this rank's run; it is logged. Other ranks may be in a collective: do not wait for them."""


def train(config: RunConfig, launch: Launch) -> int:
    """Train on this rank, alone or as one of torchrun's.

    Returns:
        0 when the run is done or was stopped with a checkpoint, 1 when it failed or was stopped before its first step.

    Raises:
        UserError: on every rank alike, for what a user can mend.
        UnexpectedExit: the user's code called `sys.exit` before the first step.
    """
    stop = launch.stop
    with ExitStack() as stack, kept_for_payloads() as stdout, exits_as_errors():
        if stop.install():  # the signals of a process that goes on after the run are not the run's
            stack.callback(stop.uninstall)
        launch = replace(launch, stdout=stdout)
        info = rank_info()
        device = pick_device(config.train.device, info, key="train.device")
        plan = make_plan(config, launch.config_path or Path(), info.world_size, parts=launch.parts)
        if isinstance(plan.tokenizer, HuggingFaceTokenizer):  # whose encoding takes long enough to keep what it gives
            if (tokenized := plan.part("tokenized text")) is None:
                logger.info("text is tokenized again whenever it is read: %s", plan.parts.problem)
            else:
                try:
                    plan = tokenized.tokenize_once(plan, info, lambda: stop.requested)
                except tokenized.Stopped:
                    logger.warning("stopped while text was tokenized; the same command continues")
                    return EXIT_FAILED
        # A model of one's own may do anything while it is built: it is built once, where it is needed.
        raise_found(plan.unmet_needs(device, counts_model=plan.has_built_in_model))
        backend = pick_backend(device)
        timeout = config.distributed.timeout_sec
        with ExitStack() as after_group:
            try:
                with process_group(info, backend=backend, timeout_sec=timeout, device=device):
                    try:
                        with ExitStack() as of_run:
                            run = open_run(plan, launch, info, device, of_run, after_group)
                            return 0 if run is None else _run_to_end(run)
                    except UserError:
                        stop.mute()
                        raise
            except RunFailed:
                return EXIT_FAILED
            except (GroupError, RuntimeError) as error:
                if not (isinstance(error, GroupError) or is_of_a_collective(error)):
                    raise
                text = "rank %d: another rank has ended or does not answer, see its messages (here: %s)"
                every_rank_logger.error(text, info.rank, shorten(str(error), 150))
                return EXIT_FAILED


def _run_to_end(run: Run) -> int:
    """Run the loop, and record the outcome in status.json."""
    state, reason, code, run_dir = "failed", "", EXIT_FAILED, run.run_dir
    run.stop.is_watched = True
    try:
        with exits_as_errors(lambda: f" after step {run.position.step}"):
            reason = run_loop(run)
        run.watchdog.at("end", run.position.step, may_wait=True)
        state = "stopped" if reason.startswith("stopped") else FINISHED
        run.saver.close()
        # Stopped before the first step there is no checkpoint, and what follows in a script must not take it for done.
        code = 0 if state == FINISHED or run.saver.last_saved >= 0 else EXIT_FAILED
    except (CorruptedError, NonFiniteError, SaveError) as error:
        reason = str(error)
        logger.error("%s", reason)
    except OSError as error:
        reason = _describe(error, run_dir)
        run.watchdog.tell(reason)
        every_rank_logger.error("%s", reason)
        raise RunFailed from error
    except UserError as error:
        reason = error.message
        run.watchdog.tell(reason)
        raise
    except Exception as error:
        if run.stop.requested and run.position.step == max(run.saver.last_saved, 0):
            # Nothing is lost. The same Ctrl-C may have ended a compiler that the first step waits for.
            state, reason = "stopped", f"{stopped_by(run)}; it ended {shorten(error_text(error), 150)}"
            raise RunFailed from error
        own = error_text(error)
        reason = run.watchdog.explain(error)
        # Once, into this rank's log too, and without the frames of the command line above it. Where another rank is why,
        # where this one stood is in its log alone.
        frames = "".join(traceback.format_exception(error)).rstrip()
        every_rank_logger.error("%s", frames if reason == own else reason)
        if reason != own:
            run.watchdog.write(frames)
        is_full = isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in own
        if is_full and (explain := run.plan.part("out of memory")) is not None:
            run.diagnostics.best_effort("out of memory").run(explain, run)
        raise RunFailed from error
    finally:
        run.watchdog.at("end", run.position.step, may_wait=True)
        guard = run.diagnostics.best_effort
        if run.info.is_main:
            # A run that failed: what this rank knows, since the others cannot be asked any more.
            run.extensions.exchange(alone=True)
            # Before the sinks are closed, one of which may take its time. The record is written at every step.
            run_dir.leave_status(run.info, state, reason=reason, step=run.position.step)
            run.tracker.close()
            guard("summary").run(summarize, run, run_dir, state, reason)
        for line in run.diagnostics.summary():
            every_rank_logger.warning("%s", line)
    return code


def _describe(error: OSError, run_dir: RunDir) -> str:
    """A file that cannot be written or read, as a message."""
    if error.filename is None:
        return error_text(error)
    text = f"{error.filename}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        text += f" ({shutil.disk_usage(run_dir.path).free / 1e6:.1f} MB are free)"
    return text


def summarize(run: Run, run_dir: RunDir, state: str, reason: str) -> None:
    """Log what happened, where the record is, and what to look at next."""
    position = run.position
    # In tokens, how many steps a run has is known at its end alone if its batch decides for itself.
    grows = run.length.is_in_tokens and run.config.micro_batches.auto is not None
    of = "" if grows else f" of {run.config.train.steps}"
    lines = [f"{state} at step {position.step}{of}: {reason}"]
    if position.first_losses:
        lines.append(f"training loss {_ends_of(position.first_losses, position.last_losses)}")
    lines.append(f"the run is in {run_dir.path}")
    lines.append("  metrics.jsonl   every logged number; events.jsonl: other events")
    if checkpoint.complete_checkpoints(run_dir.checkpoints):
        lines.append(f"  checkpoints/    {_next_command(run, run_dir, state)}")
    elif state == "stopped":
        lines.append("nothing was trained, so the exit code is 1; the same command begins anew")
    if any((run_dir.path / "wandb").glob("offline-run-*")):
        lines.append(f"  wandb/          upload with: wandb sync {run_dir.path}/wandb/offline-run-*")
    lines.append("what the keys mean: docs/training/METRICS_LOSSES.md")
    if position.last_eval is not None:  # the result: last
        if run.config.eval.depth:
            lines += run.plan.parts.need("lines by depth", "eval.depth")(position.last_eval[1], run.config)
        sets = [] if run.evaluator is None else run.evaluator.sets
        more = f"; on all of it: train eval {run_dir.path}" if any(each.sample is not None for each in sets) else ""
        lines += [line + more for line in _evaluated(*position.last_eval, {each.name: each.read for each in sets})]
    for number, line in enumerate(lines):
        logger.log(logging.ERROR if state == "failed" and number == 0 else logging.INFO, "%s", line)
    sys.stderr.flush()


def _ends_of(first: Sequence[tuple[int, float]], last: Iterable[tuple[int, float]]) -> str:
    losses = [*first, *(each for each in last if each[0] > first[-1][0])]
    num = max(len(losses) // 2, 1)
    return ", then ".join(dict.fromkeys(map(_mean_loss, (losses[:num], losses[-num:]))))


def _mean_loss(losses: Iterable[tuple[int, float]]) -> str:
    """Of some steps, with their standard deviation: single ones differ by it."""
    steps, values = zip(*losses, strict=True)
    at = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    return f"{fmean(values):.4f} (spread {pstdev(values):.4f}) over {at}"


def _evaluated(step: int, metrics: Mapping[str, float], read: Mapping[str, str]) -> list[str]:
    """The losses of the last evaluation, with their errors, and how much of each set was read."""
    losses = []
    for name, text in read.items():
        key = f"eval/{name}/loss" if name else "eval_loss"
        if key in metrics:
            error = metrics.get(key + ERROR_SUFFIX)
            shown = f" +- {ERRORS_SHOWN * error:.4f} (95 %; {text})" if error is not None else f" ({text})"
            losses.append(f"{name or 'held out'} {metrics[key]:.4f}{shown}")
    return [f"evaluated at step {step}: {', '.join(losses)}"] if losses else []


def _next_command(run: Run, run_dir: RunDir, state: str) -> str:
    ranks = run.info.world_size
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks if ranks == 1 else 0))
    command = resume_command(run_dir, run.config, ranks, local_world_size=local)
    if state == FINISHED:
        return f"train beyond step {run.position.step} with: {command} --steps {2 * run.config.train.steps}"
    return f"resume with: {command}"
