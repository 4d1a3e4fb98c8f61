"""A run, and how it is opened from its plan: what it continues, state, record and parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn

from trainer.data.fingerprint import Fingerprint
from trainer.data.loader import Loader, Reading, accepted_inputs
from trainer.distributed.env import RankInfo, gather_from_ranks, raise_on_all_ranks
from trainer.distributed.strategy import compile_blocks
from trainer.distributed.watchdog import Watchdog, start_watchdog
from trainer.ending import StopRequest
from trainer.errors import UserError
from trainer.files import allow_open_files, is_count
from trainer.import_path import resolve_target, users_code
from trainer.metrics.aggregate import Operations, rank_operations
from trainer.metrics.catalog import plain_names
from trainer.metrics.gradient_noise import GradientNoiseScale
from trainer.metrics.logger import get_logger, is_terminal
from trainer.metrics.tracker import MetricsTracker
from trainer.objective import Loss
from trainer.on_device import memory_of
from trainer.options import MicroBatches
from trainer.training import MISSING, NO_PARTS, Found, Graphs, Parts, Uploads, need
from trainer.training.build import (
    autocast_context,
    make_state,
    make_strategy,
    model_and_loss,
    recorded_sets,
)
from trainer.training.checkpoint import loading
from trainer.training.core_extensions import ModelMetrics, Replicas
from trainer.training.evaluator import EvalSet, Evaluator, eval_sets, make_details
from trainer.training.extension import Extension, Extensions, RunView
from trainer.training.optimizer import Length, Schedule, make_schedule
from trainer.training.plan import Plan, make_auxiliary
from trainer.training.record import begin_record, check_data, open_record, place_run
from trainer.training.run_dir import FINISHED, RunDir, refuse_unlike
from trainer.training.saved_state import Saver, restore
from trainer.training.step import TrainStep
from trainer.training.tensor_files import pack
from trainer.training.train_state import Position
from trainer.wording import error_text, few, short_repr

logger = get_logger(__name__)


@dataclass(frozen=True)
class Launch:
    """How a run is started, in addition to its config."""

    stop: StopRequest = field(default_factory=StopRequest)
    config_path: Path | None = None  # None: neither config nor env.json is written
    run_dir: str | None = None
    parts: Parts = NO_PARTS
    stdout: TextIO | None = None  # for payloads


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Run:
    """The parts of a run, made by `open_run`. Only `position` and their own state change."""

    view: RunView
    """What extensions see: plan, ranks, model, record."""
    position: Position
    length: Length
    schedule: Schedule
    micro_batches: MicroBatches  # of each data shard in a step
    periods: Set[int]  # of evaluations, saves, extensions: the next step waits for multiples
    stop: StopRequest
    tracker: MetricsTracker
    operations: Operations  # how metrics combine over ranks
    reading: Reading
    train_step: TrainStep
    extensions: Extensions
    evaluator: Evaluator | None
    saver: Saver
    watchdog: Watchdog


def open_run(
    plan: Plan, launch: Launch, info: RankInfo, device: torch.device, stack: ExitStack, after_group: ExitStack
) -> Run | None:
    """Make the run, ready for its first step; None if its last one is done. Collective.

    `stack` closes the parts that are opened here; `after_group`, closed after the process group,
    waits for uploads while no rank waits."""
    refuse_unlike(plan.config, info)
    run_dir, found, uploads = place_run(plan, launch.run_dir, info, stack)
    # Before the model is built, which may take minutes.
    fingerprint = check_data(plan, found and found[1], info)
    run_dir.data = fingerprint.content
    view, sets = build(plan, run_dir, found, info, device, stack)
    if _end_if_over(view):
        if uploads is not None and run_dir.has_saved():
            uploads.begin(run_dir, view.position.step, view.diagnostics, is_over=True)
            after_group.callback(uploads.wait, launch.stop)
        return None
    contract = _check_contract(view)
    # The record is written from here on: a run refused earlier has left it as it was.
    begin_record(view, stack)
    stack.push(partial(_leave_reason, view))
    position = view.position
    # For a stop that waits for nothing, such as a second Ctrl-C.
    launch.stop.on_end = lambda reason: run_dir.leave_reason(info, reason, step=position.step)
    if uploads is not None:
        uploads.begin(run_dir, position.step, view.diagnostics)
        after_group.callback(uploads.wait, launch.stop)
    open_record(view, stack, launch.config_path, launch.stdout)
    if info.is_main and plan.parts.messages is not None:
        plan.parts.messages.begun(view)
    run = assemble(view, sets, launch.stop, stack, fingerprint, uploads)
    if contract is not None:
        view.event(contract)
    return run


def build(
    plan: Plan, run_dir: RunDir, found: Found | None, info: RankInfo, device: torch.device, stack: ExitStack
) -> tuple[RunView, Sequence[EvalSet]]:
    """Make what has a state, restored if a checkpoint was `found`; and what evaluations read."""
    # The same lanes on all ranks, whatever their hosts: a checkpoint has those of rank 0.
    limits = gather_from_ranks((memory_of(device), allow_open_files()), world_size=info.world_size)
    memory, files = map(min, zip(*limits, strict=True))
    plan = replace(plan, limits=(memory, files))
    strategy = make_strategy(plan, info, device)
    with raise_on_all_ranks(world_size=info.world_size):
        if found is not None:
            with loading(found[0], "config"):
                plan = replace(plan, recorded_sets=recorded_sets(plan, found[1]))
        state = make_state(plan, info, device, strategy)
    if plan.config.gns.enabled:
        group = dist.group.WORLD if info.world_size > 1 else None
        state.gns = GradientNoiseScale(state.model, process_group=group)
        state.gns.shards_per_rank = len(state.shards)
        stack.callback(state.tracker.diagnostics.best_effort("end of gns").run, state.gns.close)
    with raise_on_all_ranks(world_size=info.world_size):
        sets = eval_sets(plan, info, device, state.model)
        auxiliary = make_auxiliary(plan.config.objective, state.model, plan.parts)
        if found is None:
            if plan.config.model.weights is not None:
                models = need(plan.parts.models, "model.weights")
                models.load_weights(state.model, plan.config.model.weights, plan.config.data.tokenizer)
            position = Position.of(state)
        else:
            position = restore(*found, plan, state, info)
    view = RunView(
        plan=plan,
        config=plan.config,
        info=info,
        device=device,
        strategy=strategy,
        state=state,
        run_dir=run_dir,
        recorder=position.unlogged[0],
        first_step=position.step,
        position=position,
        found=found,
        auxiliary=auxiliary,
    )
    return view, sets


def assemble(
    view: RunView,
    sets: Sequence[EvalSet],
    stop: StopRequest,
    stack: ExitStack,
    fingerprint: Fingerprint,
    uploads: Uploads | None,
) -> Run:
    """The parts of the loop, and the run that they make up."""
    # No part refers to the run, so that a finished run is freed, and the process group with it.
    plan, config, state, info, device = view.plan, view.config, view.state, view.info, view.device
    row_model, loss = model_and_loss(state.model, plan, device)
    if config.train.compile:  # not earlier: the few tokens of a check would be compiled for, too
        logger.info("blocks are compiled in the first step, which takes some seconds more")
        compile_blocks(state.model)
    step_model = view.strategy.wrap(row_model, state.model)
    reading = _start_reading(view, stack)
    extensions = Extensions(view.diagnostics, device=device, world_size=info.world_size)
    stack.callback(extensions.close)
    train_step = _make_train_step(view, step_model, loss, extensions)
    run_dir, position = view.run_dir, view.position
    view.watchdog = start_watchdog(
        info,
        timeout_sec=config.distributed.timeout_sec,
        log=run_dir.log_file(info.rank),
        # Called from another thread when this one hangs: nothing here may wait for it.
        on_end=lambda reason: run_dir.abandon(info, reason, step=position.step),
        reading=lambda: "; ".join(loader.reading for loader in reading.loaders),
        signs=lambda: train_step.ready_at,
        groups=view.strategy.groups,
    )
    stack.callback(view.watchdog.close)
    if config.eval.every:
        place = info, device, view.strategy, view.diagnostics
        view.evaluator = Evaluator(plan, state.model, row_model, loss, view.auxiliary, *place, sets)
    extensions.add(_load_extensions(view))
    if view.found is not None:
        path, saved = view.found
        for each in sets:
            before = saved.get("evaluated", {}).get(each.name, each.read)
            if each.read != before:
                text = "%s: evaluations read %s, and %s before: do not compare their numbers"
                logger.warning(text, each.name or "held-out documents", each.read, before)
        # After all are added: the states of those that are off now are kept for a later resume.
        with loading(path, "extensions"):
            extensions.load_state_dict(saved["extensions"])
    own_keys = [*state.shards[0].dataset.metric_keys, *extensions.metric_keys]
    operations = agreed_operations(own_keys, world_size=info.world_size)
    for recorder in position.unlogged:  # of the checkpoint, also by what is off now
        counts = recorder.state_dict()
        recorder.load_state_dict({key: counts[key] for key in counts if key in operations})
    return Run(
        view=view,
        position=position,
        length=plan.length,
        schedule=make_schedule(config, plan.length),
        micro_batches=config.micro_batches,
        periods={config.eval.every, config.checkpoint.every, *extensions.periods} - {0},
        stop=stop,
        tracker=state.tracker,
        operations=operations,
        reading=reading,
        train_step=train_step,
        extensions=extensions,
        evaluator=view.evaluator,
        saver=Saver(view, extensions, fingerprint, uploads),
        watchdog=view.watchdog,
    )


def _leave_reason(view: RunView, _type: object, error: BaseException | None, _trace: object) -> None:
    """Write to status.json why the run ended, if it was refused or failed before it could train."""
    if error is not None:
        reason = error.message if isinstance(error, UserError) else error_text(error)
        view.run_dir.leave_reason(view.info, reason, step=view.position.step)


def agreed_operations(own_keys: Iterable[str], *, world_size: int) -> Operations:
    """How metrics combine over ranks, the same on each; warns if ranks disagree. Collective.

    A rank without a metric adds nothing to it; of two rows of the catalog the lower rank's counts.
    `own_keys`: of this rank's parts, beyond the plain names of the catalog.
    """
    # The names of all metrics that may come, so that every vector has the same length.
    by_rank = gather_from_ranks(rank_operations([*plain_names(), *own_keys]), world_size=world_size)
    agreed = {key: how for own in reversed(by_rank) for key, how in own.items()}
    for rank, own in enumerate(by_rank):
        other = sorted(key for key in agreed if own.get(key) != agreed[key])
        if other:
            text = "the ranks report unlike metrics: rank %d has no %s, or another catalog row"
            logger.warning(text, rank, few(other))
    return dict(sorted(agreed.items()))


def _start_reading(view: RunView, stack: ExitStack) -> Reading:
    """Start the loaders of this rank's data shards."""
    plan, state, position = view.plan, view.state, view.position
    # Refuses a state that a checkpoint cannot keep before the first step, not at the first save.
    pack(position.data_states, "data")
    loaders = []
    for shard in state.shards:
        loader = Loader(
            shard.dataset,
            device=view.device,
            accepted=accepted_inputs(state.model),
            prefetch=plan.config.data.prefetch,
            guard=view.diagnostics.best_effort("data metrics"),
            full_tokens=plan.facts.tokens_per_micro // plan.facts.data_shards,
        )
        loaders.append(loader)
        stack.callback(loader.close)
    return Reading(loaders, position.data_states, info=view.info, device=view.device, is_resumed=position.step > 0)


def _make_train_step(view: RunView, step_model: nn.Module, loss: Loss, extensions: Extensions) -> TrainStep:
    """The part that runs the steps. `step_model`: the model as its strategy runs it."""
    plan, state, config, auxiliary = view.plan, view.state, view.config, view.auxiliary
    if auxiliary.losses:
        weights = [f"{name} with weight {each.weight:g}" for name, each in auxiliary.losses.items()]
        logger.info("objective.losses: %s", ", ".join(weights))
    return TrainStep(
        model=step_model,
        ledgers=[shard.ledger for shard in state.shards if shard.ledger is not None],
        objective=loss,
        auxiliary=auxiliary,
        optimizer=state.optimizer,
        gns=state.gns,
        # Any constant works: it scales the loss.
        max_tokens_per_micro=plan.facts.tokens_per_micro // plan.facts.data_shards or config.data.seq_len,
        clip_grad_norm=config.train.clip_grad_norm,
        world_size=view.info.world_size,
        shards=[shard.number for shard in state.shards],
        seed=config.run.seed,
        device=view.device,
        autocast=autocast_context(config, view.device),
        strategy=view.strategy,
        extensions=extensions,
        diagnostics=view.diagnostics,
        lane_sets=state.shards[0].dataset.lane_sets,
        graphs=_make_graphs(view),
    )


def _make_graphs(view: RunView) -> Graphs | None:
    """Runs the forward and backward of a micro-batch as a CUDA graph; None: nothing does."""
    asked, models = view.config.train.cuda_graph, view.plan.parts.models
    if view.device.type != "cuda" or not asked:
        return None
    if models is None and asked == "auto":
        logger.info("the step runs without CUDA graphs: %s", MISSING)
        return None
    return need(models, "train.cuda_graph").make_graphs(view.plan, view.device, view.strategy, view.auxiliary)


def _load_extensions(view: RunView) -> dict[str, Extension]:
    """The extensions of a run, by name. One that is off is not imported.

    A UserError on all ranks if one cannot be made.
    """
    config, auxiliary = view.config, view.auxiliary
    asked = {  # those beyond the core: whether they are on, and the key that says so
        "per_layer": (config.metrics.per_layer, "metrics.per_layer"),
        "ema": (config.train.ema, "train.ema"),
        "best": (config.checkpoint.keep_best, "checkpoint.keep_best"),
        "spikes": (config.train.spike_sigma, "train.spike_sigma"),
        "sample": (config.sample.every, "sample.every"),
        "profile": (view.info.is_main and config.metrics.profile, "metrics.profile"),
        "progress": (view.info.is_main and "progress" in view.plan.parts.extensions and is_terminal(), "stderr"),
    }
    details = make_details(view.plan, view.diagnostics, auxiliary, has_loss=False)
    found: dict[str, Extension] = {"step_details": details}
    if auxiliary.metric_keys:
        found["model metrics"] = ModelMetrics(view)
    if view.info.world_size > 1 and view.plan.layout is None and config.metrics.compare_replicas:
        found["replicas"] = Replicas(view)
    with raise_on_all_ranks(world_size=view.info.world_size):
        for name, (is_on, key) in asked.items():
            if is_on:
                path = need(view.plan.parts.extensions.get(name), key)
                with users_code(key, "cannot be made", "set it off"):
                    found[name] = resolve_target(path, key)(view)
        for number, table in enumerate(config.extension):
            with users_code(f"extension {table.target}"):
                made = resolve_target(table.target, "extension.target")(view, **table.args)
                if not isinstance(made, Extension):
                    raise TypeError(f"must make an Extension, got {short_repr(made)}")
                counts, keys = map(is_count, (made.num_sums, made.boundary_every)), made.metric_keys
                if isinstance(keys, str) or not all([*counts, *(isinstance(key, str) for key in keys)]):
                    raise TypeError("num_sums and boundary_every must be counts, metric_keys a tuple of texts")
            same = sum(each.target == table.target for each in config.extension[:number])
            found[f"{table.target} ({same})"] = made
    return found


def _end_if_over(view: RunView) -> bool:
    """Note the last step, if known. Whether it is done: `done` replaces `running`, `stopped`."""
    run_dir, position, length, unit = view.run_dir, view.position, view.plan.length, "tokens"
    if not length.is_in_tokens:
        unit, position.last_step = "steps", length.total
    elif position.reached >= length.total:
        position.last_step = position.step
    if position.boundary_is_due or position.last_step is None or position.step < position.last_step:
        return False
    text = "%s: the run is at step %d, train.%s = %d: nothing is left to do; set it higher to continue"
    logger.info(text, run_dir.path, position.step, unit, length.total)
    if run_dir.status().get("state") in ("running", "stopped"):  # after the last checkpoint
        run_dir.leave_status(view.info, FINISHED, reason="all steps are done", step=position.step)
    return True


def _check_contract(view: RunView) -> dict[str, Any] | None:
    """Check a custom model against its contract (rank 0). Returns the event of it, if any.

    Also on a resume, since its code may have changed. If the model is in shards, another is built.
    """
    contract: dict[str, Any] | None = None
    plan, model = view.plan, None if view.strategy.is_sharded else view.model
    with raise_on_all_ranks(world_size=view.info.world_size):
        if view.info.is_main and not plan.has_built_in_model:
            if plan.parts.models is not None:
                contract = plan.parts.models.check_before_run(plan, model, view.device, step=view.first_step)
            elif plan.config.model.contract:
                logger.warning("the model was not checked against its contract: %s", MISSING)
    return contract
