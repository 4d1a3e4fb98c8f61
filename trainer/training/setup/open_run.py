"""From a plan to a run that is ready for its first step: directory, state, resume, record, parts."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.data.batch import accepted_inputs
from trainer.data.fingerprint import FINGERPRINT_KEY
from trainer.data.loader import Loader
from trainer.distributed.agree import from_main_rank, gather_from_ranks, raise_on_all_ranks
from trainer.distributed.env import RankInfo
from trainer.distributed.watchdog import start_watchdog
from trainer.errors import UserError
from trainer.import_path import format_error, resolve_target
from trainer.metrics.aggregate import Operations, rank_operations
from trainer.metrics.catalog.spec import RankReduction
from trainer.metrics.logger import add_log_file, get_logger, remove_log_file
from trainer.metrics.noise_scale.hooks import GradientNoiseScale
from trainer.metrics.run_status import dead
from trainer.metrics.sinks import EventWriter, Output
from trainer.storage import is_url
from trainer.training.checkpointing import checkpoint
from trainer.training.checkpointing.checkpoint import loading
from trainer.training.checkpointing.restore import restore
from trainer.training.checkpointing.resume_checks import DataPolicy, changed_settings, check_data
from trainer.training.checkpointing.saver import Saver
from trainer.training.checkpointing.tensor_files import pack
from trainer.training.checkpointing.train_state import HOST_KEYS, Position, TrainState
from trainer.training.extension import Extension, Extensions
from trainer.training.messages import announce, say_rate_change
from trainer.training.run import Run
from trainer.training.run_dir import FINISHED, RunDir, StatusKeeper, choose_run_dir, environment
from trainer.training.setup.data import EvalSet, eval_sets, max_tokens_per_micro
from trainer.training.setup.evaluation import make_details, make_evaluator
from trainer.training.setup.parts import autocast_context, in_cells, make_state, model_and_loss
from trainer.training.setup.plan import Plan, begin_from_weights, width_of
from trainer.training.setup.sharding import make_strategy, refuse_bypassed_units
from trainer.training.setup.sinks import make_sinks, wandb_id
from trainer.training.signals import StopRequest, say_stopping
from trainer.training.step.details import LoggedDetails
from trainer.training.step.schedule import Length, make_schedule
from trainer.training.step.step import StepSettings, TrainStep
from trainer.training.step.window import WindowReader
from trainer.wording import few, printable

if TYPE_CHECKING:
    from trainer.extensions.batch_growth import BatchGrowth

logger = get_logger(__name__)
Found = tuple[Path, dict[str, Any]]
"""A checkpoint and its state.json."""


@dataclass(frozen=True)
class Launch:
    """How a run is started, beside what its config says.

    Attributes:
        stop: tells when somebody asks the run to stop.
        config_path: where the config was read from; None: it is not recorded.
        run_dir: what --run-dir says.
        stdout: for payloads.
        data_policy: what to do about data that changed since the checkpoint.
        on_run_dir: called with the run's directory.
    """

    stop: StopRequest = field(default_factory=lambda: StopRequest(say_stopping))
    config_path: Path | None = None
    run_dir: str | None = None
    stdout: Output | None = None
    data_policy: DataPolicy = DataPolicy()  # noqa: RUF009 - frozen
    on_run_dir: Callable[[Path], None] | None = None


def open_run(
    plan: Plan, launch: Launch, info: RankInfo, device: torch.device, stack: ExitStack, after_group: ExitStack
) -> Run | None:
    """The run, ready for its first step; None if nothing is left of it. Every rank must call it.

    Args:
        stack: closes what is opened here.
        after_group: is closed after the process group: the last upload is waited for when no rank waits for this one.

    Raises:
        UserError: on every rank alike.
    """
    config = plan.config
    run_dir, found, claimed = _place(plan, launch.run_dir, info, stack)
    data = check_data(plan, found[1] if found is not None else None, info, launch.data_policy)
    strategy = make_strategy(config, info, device)
    with raise_on_all_ranks(world_size=info.world_size):
        state = make_state(plan, info, device, strategy)
    refuse_bypassed_units(strategy, state.model, device, seq_len=config.data.seq_len)
    diagnostics, group = state.tracker.diagnostics, dist.group.WORLD if info.world_size > 1 else None
    if config.gns.enabled:
        state.gns = GradientNoiseScale(state.model, ema=config.gns.ema, process_group=group)
        stack.callback(diagnostics.best_effort("end of gns").run, state.gns.close)
    with raise_on_all_ranks(world_size=info.world_size):
        sets = eval_sets(plan, info, device)
        if found is None:
            position = _start(plan, state, run_dir)
        else:
            in_flight = plan.facts.groups_in_flight
            position = restore(*found, state, config, info, device, data, groups_in_flight=in_flight)
            say_rate_change(found[1]["config"], plan, position)
    if _is_over(position, plan.length):
        _say_over(run_dir, position, plan.length, info)
        return None
    contract = _checked_contract(plan, strategy.whole(state.model), info, device, position.step)
    run_dir = _begin_record(info, run_dir, stack, position.step)
    if launch.on_run_dir is not None:
        launch.on_run_dir(run_dir.path)
    run = Run(plan, info, device, strategy, run_dir, state, position, launch.stop)
    retain = None if claimed is None else _start_mirror(claimed, run, after_group)
    wandb_run_id: str | None = None
    with raise_on_all_ranks(world_size=info.world_size):
        if info.is_main:
            run.events = EventWriter(run_dir.events)
            stack.callback(diagnostics.best_effort("end of events.jsonl").run, run.events.close)
            diagnostics.on_event = run.events.write
            wandb_run_id = _open_record(run, run.events, launch, found)
            announce(plan, state, device, run_dir)
            run.status = StatusKeeper(run_dir, wandb_run_id)
    stack.callback(state.tracker.close)
    _open_parts(run, sets, stack, is_resumed=found is not None)
    if found is not None:
        with loading(found[0], "extensions"):
            run.extensions.load_state_dict(found[1]["extensions"])
    run.saver = Saver(
        directory=run_dir.checkpoints,
        table=config.checkpoint,
        info=info,
        state=state,
        extensions=run.extensions,
        device=device,
        shared={
            "wandb_run_id": wandb_run_id,
            "config": config.model_dump(mode="json"),
            "environment": environment(info),
            FINGERPRINT_KEY: data.now.to_state(),
        },
        last_saved=position.step if found is not None else -1,
        on_saving=partial(run.recorder.record, "checkpoint/save_sec"),
        retain=retain,
    )
    if contract is not None:
        run.event(contract)
    if data.change:
        run.event({"event": "data_changed", "global_step": position.step, "change": str(data.change)})
    return run


def _start_mirror(claimed: Any, run: Run, after_group: ExitStack) -> Callable[[Path], None]:
    """Start to copy checkpoints to the claimed store. Returns what decides which are kept."""
    mirrors = importlib.import_module("trainer.extensions.mirror")
    table, step = run.config.checkpoint, run.position.step
    mirror = mirrors.start_mirror(claimed, run.run_dir, table, step, run.diagnostics)
    after_group.callback(mirrors.wait_for_mirror, mirror, run.stop)
    retain: Callable[[Path], None] = mirror.publish
    return retain


def _open_parts(run: Run, sets: Sequence[EvalSet], stack: ExitStack, *, is_resumed: bool) -> None:
    """Start reading and the watchdog, and make what steps, measures and evaluates. Every rank must call it.

    Args:
        sets: what an evaluation reads.
        stack: closes what is opened here.
    """
    plan, config, state, position = run.plan, run.config, run.state, run.position
    info, device, diagnostics = run.info, run.device, run.diagnostics
    if config.train.compile:
        run.strategy.compile(state.model)
    # What a row is run through; everything that keeps or shows the model has the model itself.
    cell_model, run.loss = model_and_loss(state.model, config, device)
    run.row_model = in_cells(cell_model, config)
    step_model = run.strategy.wrap(run.row_model, state.model)
    pack(position.data_state, "data")  # one that a checkpoint cannot keep is refused before the first step
    guard = diagnostics.best_effort("data metrics")
    loader = Loader(
        state.dataset,
        device=device,
        accepted=accepted_inputs(state.model),
        burns_in=config.ledger.burn_in > 0,
        prefetch=config.data.prefetch,
        guard=guard,
    )
    stack.callback(loader.close)
    run_dir, stop = run.run_dir, run.stop
    # Nothing of a run refers to the run itself: one that is done is freed, and the process group with it.
    run.watchdog = start_watchdog(
        info,
        timeout_sec=config.distributed.timeout_sec,
        log=run_dir.log_file(info.rank),
        on_end=lambda reason: run_dir.leave_status(info, "failed", reason=reason, step=position.step),
        reading=lambda: loader.reading,
        is_asked=lambda: stop.is_heard or stop.requested,
        groups=run.strategy.groups,
    )
    stack.callback(run.watchdog.close)
    data_state = position.data_state
    run.windows = WindowReader(loader, data_state=data_state, info=info, device=device, is_resumed=is_resumed)
    run.schedule = make_schedule(config, plan.length)
    if config.eval.every:
        run.evaluator = make_evaluator(
            plan, state.model, cell_model, run.loss, info, device, diagnostics, sets, most=run.strategy.most
        )
    run.growth = _growth(run)
    run.extensions = _load_extensions(run)
    stack.callback(run.extensions.close)
    decides_every = config.micro_batches.auto.every if config.micro_batches.auto is not None else 0
    run.periods = (run.extensions.periods | {config.eval.every, config.checkpoint.every, decides_every}) - {0}
    run.train_step = TrainStep(
        model=step_model,
        ledger=state.ledger,
        objective=run.loss,
        optimizer=state.optimizer,
        gns=state.gns,
        scaler=state.scaler,
        settings=StepSettings(
            max_tokens_per_micro(plan),
            config.train.clip_grad_norm,
            world_size=info.world_size,
            device=device,
            autocast=autocast_context(config, device),
        ),
        strategy=run.strategy,
        extensions=run.extensions,
        diagnostics=diagnostics,
    )
    parts = {"ledger metrics": state.ledger, "gns": state.gns}
    run.reporters = {name: (part, tuple(part.metric_keys)) for name, part in parts.items() if part is not None}
    keys = [*HOST_KEYS, *state.dataset.metric_keys, *run.extensions.metric_keys]
    keys += [key for _, own in run.reporters.values() for key in own]
    run.operations = agreed_operations(keys, info)


def _load_extensions(run: Run) -> Extensions:
    """The extensions that the config asks for. One that is off is not imported.

    Raises:
        UserError: one of the user's own cannot be imported, or fails when it is made.
    """
    config = run.config
    shows_bar = run.info.is_main and sys.stderr.isatty()
    asked = {
        "carry probe": (run.ledger is not None and config.ledger.probe_every, "carry_probe:StepProbe"),
        "gns components": (run.gns is not None and config.gns.components_every, "noise_components:NoiseSources"),
        "per_layer": (config.metrics.per_layer, "per_layer:LayerNumbers"),
        "spikes": (config.train.spike_sigma, "spikes:LossSpikes"),
        "sample": (config.sample.every, "samples:Samples"),
        "profile": (run.info.is_main and config.metrics.profile, "profile:StepProfile"),
        "progress": (shows_bar, "progress:ProgressBar"),
    }
    found: dict[str, Extension] = {"step_details": LoggedDetails(run, make_details(run.plan, run.diagnostics))}
    for name, (is_on, target) in asked.items():
        if is_on:
            try:
                found[name] = resolve_target(f"trainer.extensions.{target}", name)(run)
            except UserError:
                raise
            except Exception as error:  # such as a profile that cannot be written
                with run.diagnostics.best_effort(name):
                    raise error
    with raise_on_all_ranks(world_size=run.info.world_size):
        for number, table in enumerate(config.extension):
            key = f"extension {table.target}"
            try:
                found[f"{table.target} ({number})"] = resolve_target(table.target, "extension.target")(
                    run, **table.args
                )
            except UserError:
                raise
            except Exception as error:
                raise UserError(key, f"fails: {format_error(error)}", "fix it there") from error
    return Extensions(found, run.diagnostics, device=run.device, world_size=run.info.world_size)


def _growth(run: Run) -> BatchGrowth | None:
    batches = run.config.micro_batches
    if batches.is_constant:
        return None
    growth: BatchGrowth = resolve_target("trainer.extensions.batch_growth:BatchGrowth", "train.micro_batches")(
        batches,
        micro_tokens=run.plan.facts.tokens_per_micro,
        noise=run.gns,
        guard=run.diagnostics.best_effort("gns"),
        world_size=run.info.world_size,
    )
    return growth


def agreed_operations(keys: Iterable[str], info: RankInfo) -> Operations:
    """How the metrics of all ranks combine, the same on each. Every rank must call it.

    A rank that does not know a metric adds nothing to it. Where ranks disagree, one warning tells who.
    """
    agreed: dict[str, RankReduction] = {}
    notes: list[str] = []
    by_rank = gather_from_ranks(rank_operations(keys), world_size=info.world_size)
    for own in by_rank:
        agreed = {**own, **agreed}
    for rank, own in enumerate(by_rank):
        if missing := sorted(agreed.keys() - own.keys()):
            notes.append(f"rank {rank} has no {few(missing)}")
        if other := [key for key in own if own[key] != agreed[key]]:
            notes.append(f"on rank {rank} the row of {few(other)} in the catalog is another")
    if notes:
        text = "the ranks do not report the same metrics: %s; what a rank does not report is that of the others"
        logger.warning(text, "; ".join(notes))
    return dict(sorted(agreed.items()))


def _open_record(run: Run, events: EventWriter, launch: Launch, found: Found | None) -> str | None:
    """Open the sinks, say in them if the run restarts, and mark it as running (rank 0). Returns the wandb run's id, if any."""
    plan, info, state, step, run_dir = run.plan, run.info, run.state, run.position.step, run.run_dir
    # Without a checkpoint too: the record of an earlier attempt is continued, and its steps are repeated.
    is_restart = run_dir.metrics.exists() or found is not None
    saved = found[1] if found is not None else {}
    sinks = make_sinks(
        plan.config,
        run_dir,
        stdout=launch.stdout or sys.stdout,
        wandb_run_id=saved.get("wandb_run_id"),
        diagnostics=state.tracker.diagnostics,
        on_event=events.write,
    )
    state.tracker.init_backends(sinks)
    if is_restart:
        previous = run_dir.status()
        if previous.get("state") == "running":  # and this process has its lock
            previous = dead(previous, run_dir.path)
        if previous.get("state") == "died":
            logger.warning("%s: %s; continuing from step %d", run_dir.path, previous["reason"], step)
        details: dict[str, Any] = {"checkpoint": None}
        if found is not None:
            changed = changed_settings(saved["config"], saved.get("environment", {}), plan.config, environment(info))
            pairs = {key: change._asdict() for key, change in changed.items()}
            details = {"checkpoint": found[0].name, "changed": pairs}
        state.tracker.log_restart(step, **details)
        ended = {key: previous.get(key) for key in ("state", "reason", "last_step")}
        events.write({"event": "restart", "global_step": step, **details, "previous": ended})
    # After what says that the settings changed: the record is true, wherever this process is killed.
    if launch.config_path is not None:
        run_dir.describe(plan.config, launch.config_path, info, state_width=width_of(state.model))
    run_dir.write_status("running", reason="", step=step, wandb_run_id=wandb_id(sinks))
    return wandb_id(sinks)


def _say_over(run_dir: RunDir, position: Position, length: Length, info: RankInfo) -> None:
    text = "%s: the run is at step %d, train.%s = %d: nothing is left to do; set it higher to continue"
    logger.info(text, run_dir.path, position.step, "tokens" if length.is_in_tokens else "steps", length.total)
    if run_dir.status().get("state") == "running":  # its process was killed after the last checkpoint
        run_dir.leave_status(info, FINISHED, reason="all steps are done", step=position.step)


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
            check = importlib.import_module("trainer.extensions.contract_check").check_before_run
            contract = check(plan, model, device, step=step)
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


def _place(plan: Plan, given: str | None, info: RankInfo, stack: ExitStack) -> tuple[RunDir, Found | None, Any]:
    """The run's directory, the checkpoint to resume from, and (on rank 0) the store of its checkpoints: rank 0 decides.

    A directory that exists is locked first: what another run is writing there looks like damage.
    """
    config = plan.config
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": plan.place(config.run.dir)})})
    answer: tuple[str, tuple[str, dict[str, Any]] | None] | None = None
    run_dir: RunDir | None = None
    claimed: Any = None
    with raise_on_all_ranks(world_size=info.world_size):
        if info.is_main:
            resume = effective_resume(plan.resume)
            try:
                run_dir = choose_run_dir(config, given, resume)
                if run_dir.path.exists() and not run_dir.is_new:
                    stack.enter_context(run_dir.lock())
                if config.checkpoint.remote is None and not is_url(resume):
                    found = checkpoint.find(run_dir.checkpoints, resume)
                else:
                    stores = importlib.import_module("trainer.extensions.remote")
                    ready = partial(_make_ready, run_dir, stack)
                    found, claimed = stores.find_checkpoint(config, run_dir, resume, ready)
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


def _start(plan: Plan, state: TrainState, run_dir: RunDir) -> Position:
    """The position of a new run, with the weights that `[model] weights` names."""
    if effective_resume(plan.config.checkpoint.resume) == "auto":
        reached = run_dir.status().get("last_step")
        if isinstance(reached, int) and reached > 0:
            text = "--resume auto: %s was at step %d and has no checkpoint; starting again at step 0"
            logger.warning(text, run_dir.path, reached)
        else:
            logger.info("--resume auto: no checkpoint found; starting at step 0")
    begin_from_weights(plan, state.model)
    return Position.of(state)
