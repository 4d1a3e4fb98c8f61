"""A run on this rank, from plan to end: process group, state, resume, loop. `train()` is what the console program calls."""

from __future__ import annotations

import errno
import os
import shutil
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from trainer.config.schema import RunConfig
from trainer.distributed.agree import from_main_rank, raise_on_all_ranks
from trainer.distributed.env import RankInfo, pick_backend, pick_device, process_group, rank_info
from trainer.distributed.startup import GroupError
from trainer.distributed.watchdog import is_of_a_collective
from trainer.errors import UserError
from trainer.extensions.contract_check import check_before_run
from trainer.extensions.mirror.claim import Claimed
from trainer.extensions.mirror.mirror import start_mirror, wait_for_mirror
from trainer.extensions.mirror.resume import find_checkpoint
from trainer.metrics.logger import add_log_file, get_logger, remove_log_file
from trainer.metrics.sinks.stdout import Output, kept_for_payloads
from trainer.training.checkpointing import checkpoint
from trainer.training.checkpointing.data_changes import DataPolicy, check_data
from trainer.training.checkpointing.restore import restore
from trainer.training.checkpointing.saver import SaveError
from trainer.training.checkpointing.train_state import Position, TrainState
from trainer.training.exits import exits_as_errors
from trainer.training.finish import NonFiniteError, write_spikes
from trainer.training.loop import run_loop
from trainer.training.messages import say_rate_change, summarize
from trainer.training.run import Run
from trainer.training.run_dir import FINISHED, RunDir, choose_run_dir
from trainer.training.setup.data import eval_sets
from trainer.training.setup.open_run import open_run
from trainer.training.setup.parts import make_state, with_noise_scale
from trainer.training.setup.plan import Plan, begin_from_weights, make_plan, width_of
from trainer.training.setup.plausible import refuse_unmet
from trainer.training.setup.sharding import make_strategy, refuse_bypassed_units
from trainer.training.setup.tokens import Stopped, tokenize_once
from trainer.training.signals import StopRequest, say_stopping
from trainer.training.step.schedule import Length
from trainer.wording import error_text, printable

logger = get_logger(__name__)
every_rank_logger = get_logger(f"{__name__}.failure", rank_zero_only=False)
EXIT_FAILED = 1
VerdictMaker = Callable[[Path], Callable[[], str]]


class RunFailed(Exception):
    """Something unexpected ended this rank's run; it is logged. Other ranks may be in a collective: do not wait for them."""


def train(
    config: RunConfig,
    config_path: Path,
    given_run_dir: str | None,
    *,
    stop: StopRequest | None = None,
    verdict_of: VerdictMaker | None = None,
    data_policy: DataPolicy = DataPolicy(),  # noqa: B008 - frozen
) -> int:
    """Train on this rank, alone or as one of torchrun's.

    Args:
        config_path: where the config was read from.
        given_run_dir: what --run-dir says.
        stop: tells when somebody asks the run to stop, its signals being handled already; None: they are from now on.
        verdict_of: a run's directory -> what gives the words on its health that stand beside the progress bar.
        data_policy: what to do about data that changed since the checkpoint.

    Returns:
        0 when the run is done or was stopped with a checkpoint, 1 when it failed or was stopped before its first step.

    Raises:
        UserError: on every rank alike, for what a user can mend.
        UnexpectedExit: the user's code called `sys.exit` before the first step.
    """
    if stop is None:
        stop = StopRequest(say_stopping)
        stop.install()
    # The user's code, which is imported from here on, may change the working directory.
    config_path, given_run_dir = config_path.absolute(), given_run_dir and os.path.abspath(given_run_dir)
    with kept_for_payloads() as stdout, exits_as_errors():
        info = rank_info()
        device = pick_device(config.train.device, info)
        plan = make_plan(config, config_path, info.world_size)
        try:
            plan = tokenize_once(plan, info, lambda: stop.requested)
        except Stopped:
            logger.warning("stopped while text was tokenized; the same command continues")
            return EXIT_FAILED
        # A model of one's own may do anything while it is built: it is built once, where it is needed.
        refuse_unmet(plan.unmet_needs(device, counts_model=plan.has_built_in_model))
        backend = pick_backend(config.distributed.backend, device)
        timeout = config.distributed.timeout_sec
        # The last upload is waited for when the other ranks are done with their collectives.
        with ExitStack() as after_group:
            try:
                with process_group(info, backend=backend, timeout_sec=timeout, device=device):
                    try:
                        return _train_in_group(
                            plan,
                            config_path,
                            given_run_dir,
                            info,
                            device,
                            stop,
                            stdout,
                            verdict_of,
                            data_policy,
                            after_group,
                        )
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


def _train_in_group(
    plan: Plan,
    config_path: Path,
    given: str | None,
    info: RankInfo,
    device: torch.device,
    stop: StopRequest,
    stdout: Output,
    verdict_of: VerdictMaker | None,
    data_policy: DataPolicy,
    after_group: ExitStack,
) -> int:
    config = plan.config
    with ExitStack() as stack:
        run_dir, found, claimed = _place(plan, given, info, stack)
        data = check_data(plan, found[1] if found is not None else None, info, data_policy)
        strategy = make_strategy(config, info, device)
        with raise_on_all_ranks(world_size=info.world_size):
            state = make_state(plan, info, device, strategy)
        refuse_bypassed_units(strategy, state.model, device, seq_len=config.data.seq_len)
        state = with_noise_scale(state, config, info)
        if state.gns is not None:
            stack.callback(state.tracker.diagnostics.best_effort("end of gns").run, state.gns.close)
        with raise_on_all_ranks(world_size=info.world_size):
            sets = eval_sets(plan, info, device)
            if found is None:
                position = _start(plan, state)
            else:
                in_flight = plan.facts.groups_in_flight
                position = restore(*found, state, config, info, device, data, groups_in_flight=in_flight)
                say_rate_change(found[1]["config"], plan, position)
        if _is_over(position, plan.length):
            text = "%s: the run is at step %d, train.%s = %d: nothing is left to do; set it higher to continue"
            unit = "tokens" if plan.length.is_in_tokens else "steps"
            logger.info(text, run_dir.path, position.step, unit, plan.length.total)
            if run_dir.status().get("state") == "running":  # its process was killed after the last checkpoint
                run_dir.leave_status(info, FINISHED, reason="all steps are done", step=position.step)
            return 0
        contract = _checked_contract(plan, strategy.whole(state.model), info, device, position.step)
        run_dir = _begin_record(info, run_dir, stack, position.step)
        mirror = None
        if claimed is not None:
            mirror = start_mirror(claimed, run_dir, config.checkpoint, position.step, state.tracker.diagnostics)
            after_group.callback(wait_for_mirror, mirror, stop)
        run = open_run(
            plan,
            state,
            position,
            info,
            device,
            run_dir,
            strategy=strategy,
            fingerprint=data.now,
            eval_sets=sets,
            resumed=found,
            describe=partial(run_dir.describe, config, config_path, info, state_width=width_of(state.model)),
            stop=stop,
            stdout=stdout,
            verdict=verdict_of(run_dir.path) if verdict_of is not None else None,
            stack=stack,
            on_published=mirror.publish if mirror is not None else None,
        )
        if contract is not None:
            run.event(contract)
        if data.change:
            run.event({"event": "data_changed", "global_step": position.step, "change": str(data.change)})
        return _run_to_end(run, run_dir)


def _is_over(position: Position, length: Length) -> bool:
    """Whether nothing is left of the run, whose last step is noted where it is known."""
    if not length.is_in_tokens:
        position.last_step = length.total
    elif position.reached >= length.total:
        position.last_step = position.step
    has_ended = position.last_step is not None and position.step >= position.last_step
    return has_ended and not position.evaluation_is_due


def _checked_contract(
    plan: Plan, model: nn.Module | None, info: RankInfo, device: torch.device, step: int
) -> dict[str, Any] | None:
    """What the check of a model of the user's own found (rank 0); the tests prove the built-in one.

    On a resume too: the code of a model may have changed since.

    Args:
        model: the run's; None if it is in shards, of which nothing is run on one rank alone: another one is built.
    """
    contract: dict[str, Any] | None = None
    with raise_on_all_ranks(world_size=info.world_size):
        if info.is_main and not plan.has_built_in_model:
            contract = check_before_run(plan, model, device, step=step)
    return contract


def _begin_record(info: RankInfo, run_dir: RunDir, stack: ExitStack, step: int) -> RunDir:
    """Lock the run's directory, clear what is left of work beyond `step`, and open this rank's log in it.

    Returns:
        The directory: its name may have changed, see `claim`.
    """
    with raise_on_all_ranks(world_size=info.world_size):
        if info.is_main:
            _make_ready(run_dir, stack)
            run_dir.create()
            checkpoint.discard_staging(run_dir.checkpoints)
            for path in checkpoint.set_aside_after(run_dir.checkpoints, step):
                logger.warning("%s belongs to an abandoned branch of this run; moved to %s", path.name, path)
    run_dir = RunDir(Path(from_main_rank(str(run_dir.path), world_size=info.world_size)))
    handler = add_log_file(run_dir.log_file(info.rank))
    stack.callback(remove_log_file, handler)
    return run_dir


def _place(
    plan: Plan, given: str | None, info: RankInfo, stack: ExitStack
) -> tuple[RunDir, tuple[Path, dict[str, Any]] | None, Claimed | None]:
    """The run's directory, the checkpoint to resume from, and (on rank 0) the store of its checkpoints: rank 0 decides.

    A directory that exists is locked first: what another run is writing there looks like damage.
    """
    config = plan.config
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": plan.place(config.run.dir)})})
    answer: tuple[str, tuple[str, dict[str, Any]] | None] | None = None
    run_dir: RunDir | None = None
    claimed: Claimed | None = None
    with raise_on_all_ranks(world_size=info.world_size):
        if info.is_main:
            resume = effective_resume(plan.resume)
            try:
                run_dir = choose_run_dir(config, given, resume)
                if run_dir.path.exists() and not run_dir.is_new:
                    stack.enter_context(run_dir.lock())
                found, claimed = find_checkpoint(config, run_dir, resume, partial(_make_ready, run_dir, stack))
            except OSError as error:  # a name that is too long, a directory that may not be read
                place = printable(str(error.filename or given or config.run.dir))
                raise UserError(
                    f"{place[:80]}{'...' if len(place) > 80 else ''}",
                    f"cannot be used: {error.strerror}",
                    "choose another place with --run-dir",
                ) from None
            answer = (str(run_dir.path), (str(found[0]), found[1]) if found else None)
    answer = from_main_rank(answer, world_size=info.world_size)
    assert answer is not None
    path, found_path = answer
    return run_dir or RunDir(Path(path)), (Path(found_path[0]), found_path[1]) if found_path else None, claimed


def _make_ready(run_dir: RunDir, stack: ExitStack) -> None:
    """Make and lock the run's directory."""
    if not run_dir.is_locked:
        run_dir.claim()
        stack.enter_context(run_dir.lock())


def effective_resume(configured: str, environ: Mapping[str, str] = os.environ) -> str:
    """`auto` when torchrun has restarted the ranks (--max-restarts): they resume, whatever the config says."""
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if configured != "off" or restarts == "0":
        return configured
    logger.warning("torchrun restarted the ranks (restart %s): resuming from the newest checkpoint", restarts)
    return "auto"


def _start(plan: Plan, state: TrainState) -> Position:
    """The position of a new run, with the weights that `[model] weights` names."""
    if effective_resume(plan.config.checkpoint.resume) == "auto":
        logger.info("--resume auto: no checkpoint found; starting at step 0")
    begin_from_weights(plan, state.model)
    return Position.of(state)


def _run_to_end(run: Run, run_dir: RunDir) -> int:
    """Run the loop, and record the outcome in status.json."""
    state, reason, code = "failed", "", EXIT_FAILED
    run.stop.is_watched = True
    try:
        with exits_as_errors(lambda: f" after step {run.position.step}"):
            reason = run_loop(run)
        run.at("end", run.position.step, may_wait=True)
        state = "stopped" if reason.startswith("stopped") else FINISHED
        run.saver.close()
        # Stopped before the first step there is no checkpoint, and what follows in a script must not take it for done.
        code = 0 if state == FINISHED or run.saver.last_saved >= 0 else EXIT_FAILED
    except (NonFiniteError, SaveError) as error:
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
        own = error_text(error)
        reason = run.watchdog.explain(error)
        # Once, into this rank's log too, and without the frames of the command line above it. Where another rank is why,
        # where this one stood is in its log alone.
        frames = "".join(traceback.format_exception(error)).rstrip()
        every_rank_logger.error("%s", frames if reason == own else reason)
        if reason != own:
            run.watchdog.write(frames)
        raise RunFailed from error
    finally:
        run.at("end", run.position.step, may_wait=True)
        guard = run.diagnostics.best_effort
        guard("end of the progress bar").run(run.progress.hide)
        if run.info.is_main:
            # A run that failed: what this rank knows, since the others cannot be asked any more.
            write_spikes(run, [(run.position.found_spikes, run.position.recent_batches)])
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
