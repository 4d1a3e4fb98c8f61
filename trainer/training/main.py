"""A run on this rank, from plan to end: process group, start, loop, outcome."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from textwrap import shorten

import torch

from trainer.config.rules import needs_of_cuda
from trainer.config.schema import RunConfig
from trainer.data.formats import is_copied
from trainer.distributed.env import GroupError, RankInfo, pick_device, process_group, rank_info
from trainer.distributed.watchdog import is_of_a_collective
from trainer.errors import UserError, raise_found
from trainer.import_path import place_of
from trainer.metrics.logger import get_logger
from trainer.metrics.sinks import kept_for_payloads
from trainer.training import MISSING
from trainer.training.loop import CorruptedError, NonFiniteError, run_loop
from trainer.training.open_run import Launch, Run, open_run
from trainer.training.plan import Plan, make_plan
from trainer.training.run_dir import FINISHED
from trainer.training.saved_state import SaveError
from trainer.wording import error_text

logger = get_logger(__name__)
every_rank_logger = get_logger(f"{__name__}.failure", rank_zero_only=False)
EXIT_FAILED = 1


class UnexpectedExit(Exception):
    """The user's code ended the process; the message says how and where."""


class RunFailed(Exception):
    """An unexpected error, which is logged. Other ranks may hang in a collective: do not wait."""


def train(config: RunConfig, launch: Launch) -> int:
    """Train on this rank, alone or as one of torchrun's.

    Returns 0: the run is done, or stopped with a checkpoint; 1: it failed, or stopped without one.
    Raises UserError, perhaps on several ranks: its `speaker`, if it has one, is to say it.
    """
    stop = launch.stop
    # `last` waits for uploads, when no rank waits for this one any more.
    with ExitStack() as stack, kept_for_payloads() as stdout, exits_as_errors(), ExitStack() as last:
        if stop.install():  # a process that lives on after the run gets its signals back
            stack.callback(stop.uninstall)
        launch = replace(launch, stdout=stdout)
        info = rank_info()
        device = pick_device(config.train.device, info, key="train.device")
        if device.type != "cuda":
            raise_found(needs_of_cuda(config.train))
        plan = _with_tokens(make_plan(config, info.world_size, parts=launch.parts), info, launch)
        if plan is None:
            logger.warning("stopped while text was tokenized; the same command continues")
            return EXIT_FAILED
        timeout = config.distributed.timeout_sec
        group = process_group(info, timeout_sec=timeout, device=device, is_stopped=lambda: stop.requested)
        try:
            with group:
                try:
                    with ExitStack() as of_run, exits_as_errors():
                        run = open_run(plan, launch, info, device, of_run, last)
                        if run is None:
                            return 0
                        return run_recorded(run)
                except UserError:  # also from closing the run
                    stop.is_muted = True
                    raise
        except RunFailed:
            return EXIT_FAILED
        except (GroupError, RuntimeError) as error:
            if not (isinstance(error, GroupError) or is_of_a_collective(error)):
                raise
            text = "rank %d: another rank has ended or does not answer, see its messages (here: %s)"
            if stop.requested and isinstance(error, GroupError):
                text = "rank %d: stopped while the ranks started (%s)"
            every_rank_logger.error(text, info.rank, shorten(str(error), 150))
            return EXIT_FAILED


def _with_tokens(plan: Plan, info: RankInfo, launch: Launch) -> Plan | None:
    """The plan, with copies of the tokens of what is slow to read; None: stopped meanwhile."""
    sources = (*plan.sources, *plan.eval_sources)
    if not any(
        is_copied(stream.path, each.table.format, plan.tokenizer) for each in sources for stream in each.streams
    ):
        return plan
    if plan.parts.data is None:
        logger.info("text is tokenized again whenever it is read: %s", MISSING)
        return plan
    return plan.parts.data.tokenize_once(plan, info, lambda: launch.stop.requested)


@contextmanager
def exits_as_errors(when: Callable[[], str] = str) -> Iterator[None]:
    """Turn `sys.exit`, and what else is no `Exception`, into an `UnexpectedExit`.

    The message of an exit says `when` in the run it came, as ` after step 7`.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        what = f"{type(error).__name__} was raised"
        if isinstance(error, SystemExit):
            what = f"sys.exit({error.code!r}) was called"
        raise UnexpectedExit(f"{what}{when()}{place_of(error)}") from error


def run_recorded(run: Run) -> int:
    """Run the loop; status.json says how it ends. Returns the exit code; RunFailed: see there."""
    view, messages = run.view, run.view.plan.parts.messages
    reason, state, code = "", "failed", EXIT_FAILED
    try:
        with exits_as_errors(lambda: f" after step {run.position.step}"):
            reason = run_loop(run)
        state = "stopped" if reason.startswith("stopped") else FINISHED
        # Without a checkpoint, a script must not take a stopped run for done.
        if state == FINISHED or run.saver.last_saved >= 0:
            code = 0
    except (CorruptedError, NonFiniteError, SaveError) as error:
        reason = str(error)
        logger.error("%s", reason)
    except OSError as error:
        reason = error_text(error)
        if error.filename is not None:
            reason = f"{error.filename}: {error.strerror}"
        run.watchdog.tell(reason)
        every_rank_logger.error("%s", reason)
        raise RunFailed from error
    except UserError as error:
        reason = error.message
        # Before this rank leaves: the others would report a lost connection instead.
        run.watchdog.tell(reason)
        _say_memory(run, error.__cause__)
        raise
    except Exception as error:
        reason = _report_failure(run, error)
        raise RunFailed from error
    finally:
        step = run.position.step
        run.watchdog.at("end", step, may_wait=True)
        if view.info.is_main:
            # Before the sinks are closed, which may take time. The record is written at every step.
            view.run_dir.leave_status(view.info, state, reason=reason, step=step)
            run.tracker.close()  # flushes the sinks
            if messages is not None:
                view.diagnostics.best_effort("summary").run(messages.ended, run, state, reason)
        for line in view.diagnostics.summary():
            every_rank_logger.warning("%s", line)
    return code


def _report_failure(run: Run, error: Exception) -> str:
    """Log an unexpected error. Returns why the run failed, which may be another rank's error."""
    own, reason = error_text(error), run.watchdog.explain(error)
    frames = "".join(traceback.format_exception(error)).rstrip()
    if reason == own:
        every_rank_logger.error("%s", frames)
    else:
        # Another rank is the cause: where this one stood goes to its own log only.
        every_rank_logger.error("%s", reason)
        run.watchdog.write(frames)
    _say_memory(run, error)
    return reason


def _say_memory(run: Run, error: BaseException | None) -> None:
    """Log what takes memory, if there was none left."""
    messages = run.view.plan.parts.messages
    if messages is not None and (isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)):
        run.view.diagnostics.best_effort("out of memory").run(messages.out_of_memory, run)
