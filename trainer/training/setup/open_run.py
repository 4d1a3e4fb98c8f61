"""Opens a run: wraps the model for the ranks, opens the record, starts reading and puts the parts together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer.data.inspection.fingerprint import FINGERPRINT_KEY, Fingerprint
from trainer.data.loader import Loader
from trainer.distributed.agree import most_of_ranks
from trainer.distributed.env import RankInfo
from trainer.distributed.watchdog import start_watchdog
from trainer.ledger.probe import CarryProbe
from trainer.metrics.best_effort import Diagnostics
from trainer.metrics.rank_reduction import Reporter
from trainer.metrics.sinks.events import EventWriter
from trainer.metrics.sinks.stdout import Output
from trainer.objective.compose import Loss
from trainer.training.checkpointing.saver import Saver
from trainer.training.checkpointing.train_state import Position, TrainState
from trainer.training.checkpointing.tree import pack
from trainer.training.evaluation.sampler import Sampler
from trainer.training.messages import announce
from trainer.training.progress import Progress
from trainer.training.run import Run
from trainer.training.run_dir import RunDir, StatusKeeper, environment
from trainer.training.setup.data import EvalSet, max_tokens_per_micro
from trainer.training.setup.evaluation import make_details, make_evaluator
from trainer.training.setup.parts import (
    autocast_context,
    in_cells,
    model_and_loss,
)
from trainer.training.setup.plan import Plan
from trainer.training.setup.sharding import average_over_ranks
from trainer.training.setup.sinks import make_sinks, wandb_id
from trainer.training.signals import StopRequest
from trainer.training.step.batch_growth import BatchGrowth
from trainer.training.step.carry import StepProbe
from trainer.training.step.components import coincidence
from trainer.training.step.microbatch import accepted_inputs
from trainer.training.step.schedule import make_schedule
from trainer.training.step.step import StepSettings, TrainStep
from trainer.training.step.window import WindowReader
from trainer.training.step_profile import StepProfile

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def open_run(
    plan: Plan,
    state: TrainState,
    position: Position,
    info: RankInfo,
    device: torch.device,
    run_dir: RunDir,
    *,
    stop: StopRequest,
    stack: ExitStack,
    mesh: DeviceMesh | None = None,
    stdout: Output | None = None,
    fingerprint: Fingerprint | None = None,
    eval_sets: Sequence[EvalSet] = (),
    source: str | None = None,
    wandb_run_id: str | None = None,
    verdict: Callable[[], str] | None = None,
    on_published: Callable[[Path], None] | None = None,
) -> Run:
    """The run, ready for its first step. Every rank must call it: wrapping the model communicates.

    Args:
        stack: closes what is opened here.
        mesh: over which the model's parameters are sharded.
        stdout: for payloads; None: the standard output as it is.
        fingerprint: of the data, for the checkpoints; None: a resume cannot tell whether the data changed.
        eval_sets: what an evaluation reads.
        source: name of the checkpoint that it continues from; None without one.
        wandb_run_id: of the wandb run that is continued; None for a new one.
        verdict: gives the words on the run's health that stand beside the progress bar.
        on_published: see `Saver`.
    """
    config = plan.config
    events: EventWriter | None = None
    if info.is_main:
        events = EventWriter(run_dir.events)
        stack.callback(state.tracker.diagnostics.best_effort("end of events.jsonl").run, events.close)
        state.tracker.diagnostics.on_event = events.write
        wandb_run_id = _open_record(
            plan,
            state,
            position,
            run_dir,
            events,
            stdout=stdout or sys.stdout,
            source=source,
            wandb_run_id=wandb_run_id,
        )
        announce(plan, state, device, run_dir)
    stack.callback(state.tracker.close)
    diagnostics = state.tracker.diagnostics
    if config.train.compile and mesh is None:
        state.model.compile()
    # What a row is run through; everything that keeps or shows the model has the model itself.
    cell_model, loss = model_and_loss(state.model, config, device)
    row_model = in_cells(cell_model, config)
    train_step = _train_step(plan, state, row_model, loss, info, device, diagnostics, mesh)
    pack(position.data_state, "data")  # one that a checkpoint cannot keep is refused before the first step
    saver = Saver(
        directory=run_dir.checkpoints,
        table=config.checkpoint,
        info=info,
        state=state,
        device=device,
        shared={
            "wandb_run_id": wandb_run_id,
            "config": config.model_dump(mode="json"),
            "environment": environment(info),
            FINGERPRINT_KEY: None if fingerprint is None else fingerprint.to_state(),
        },
        last_saved=position.step if source is not None else -1,
        diagnostics=diagnostics,
        on_published=on_published,
    )
    watchdog = start_watchdog(
        info,
        timeout_sec=config.distributed.timeout_sec,
        log=run_dir.log_file(info.rank),
        on_end=lambda reason: run_dir.leave_status(info, "failed", reason=reason, step=position.step),
        groups=mesh.get_all_groups() if mesh is not None else (),
    )
    if watchdog is not None:
        stack.callback(watchdog.close)
    details = make_details(plan, diagnostics)
    in_lockstep = mesh is not None
    probe = _probe(plan, state, row_model, loss, info, device, in_lockstep=in_lockstep)
    parts: dict[str, Reporter | None] = {
        "counters": position.unlogged,
        "step_details": details,
        "ledger metrics": state.ledger,
        "carry probe": probe,
        "gns": state.gns,
        "per_layer": state.per_layer,
    }
    reporters = {name: part for name, part in parts.items() if part is not None}
    loader = Loader(
        state.dataset,
        device=device,
        prefetch=config.data.prefetch,
        guard=diagnostics.best_effort("data metrics"),
    )
    stack.callback(loader.close)
    progress = Progress(
        is_shown=info.is_main and sys.stderr.isatty(),
        total=plan.length.total,
        done=position.reached,
        name=config.run.name,
        verdict=verdict,
    )
    # A guard of its own: a bar that failed is taken off the screen all the same.
    stack.callback(diagnostics.best_effort("end of the progress bar").run, progress.hide)
    return Run(
        config=config,
        info=info,
        device=device,
        position=position,
        windows=WindowReader(
            loader,
            accepted=accepted_inputs(state.model),
            data_state=position.data_state,
            info=info,
            device=device,
            is_resumed=source is not None,
            burns_in=config.ledger.burn_in > 0,
            on_window=None if config.micro_batches.is_known_ahead else state.dataset.window_begins,
        ),
        train_step=train_step,
        length=plan.length,
        micro_batches=config.micro_batches,
        num_micros=config.micro_batches.first,
        growth=_growth(plan, state, info, diagnostics),
        schedule=make_schedule(config, plan.length),
        details=details,
        probe=probe,
        reporters=reporters,
        coincidence_at=partial(coincidence, state.dataset, [source.concentration for source in plan.sources])
        if config.gns.components_every
        else None,
        metric_keys=tuple(key for reporter in reporters.values() for key in reporter.metric_keys),
        diagnostics=diagnostics,
        tracker=state.tracker,
        spikes=state.spikes,
        evaluator=make_evaluator(
            plan, state.model, cell_model, loss, info, device, diagnostics, eval_sets, in_lockstep=in_lockstep
        )
        if config.eval.every
        else None,
        sampler=_sampler(plan, state, device, events) if config.sample.every and (events or in_lockstep) else None,
        saver=saver,
        stop=stop,
        watchdog=watchdog,
        events=events,
        progress=progress,
        profile=_profile(plan, state, position, device, run_dir, stack)
        if info.is_main and config.metrics.profile
        else None,
        status=StatusKeeper(run_dir, wandb_run_id) if info.is_main else None,
    )


def _open_record(
    plan: Plan,
    state: TrainState,
    position: Position,
    run_dir: RunDir,
    events: EventWriter,
    *,
    stdout: Output,
    source: str | None,
    wandb_run_id: str | None,
) -> str | None:
    """Open the sinks, say in them if the run restarts, and mark it as running (rank 0).

    Returns:
        The id of the wandb run; None without one.
    """
    # Without a checkpoint too: the record of an earlier attempt is continued, and its steps are repeated.
    is_restart = run_dir.metrics.exists() or source is not None
    sinks = make_sinks(
        plan.config,
        run_dir,
        stdout=stdout,
        wandb_run_id=wandb_run_id,
        diagnostics=state.tracker.diagnostics,
        on_event=events.write,
    )
    state.tracker.init_backends(sinks)
    if is_restart:
        state.tracker.log_restart(position.step, checkpoint=source)
        events.write({"event": "restart", "global_step": position.step, "checkpoint": source})
    run_dir.write_status("running", reason="", step=position.step, wandb_run_id=wandb_id(sinks))
    return wandb_id(sinks)


def _train_step(
    plan: Plan,
    state: TrainState,
    row_model: nn.Module,
    loss: Loss,
    info: RankInfo,
    device: torch.device,
    diagnostics: Diagnostics,
    mesh: DeviceMesh | None,
) -> TrainStep:
    table = plan.config.train
    model, averaging = average_over_ranks(row_model, state.model, plan.config, info, device, mesh)
    return TrainStep(
        model=model,
        ledger=state.ledger,
        objective=loss,
        optimizer=state.optimizer,
        gns=state.gns,
        per_layer=state.per_layer,
        scaler=state.scaler,
        settings=StepSettings(
            max_tokens_per_micro=max_tokens_per_micro(plan),
            clip_grad_norm=table.clip_grad_norm,
        ),
        averaging=averaging,
        world_size=info.world_size,
        device=device,
        autocast=autocast_context(plan.config, device),
        diagnostics=diagnostics,
    )


def _growth(plan: Plan, state: TrainState, info: RankInfo, diagnostics: Diagnostics) -> BatchGrowth | None:
    batches = plan.config.micro_batches
    if batches.is_constant:
        return None
    return BatchGrowth(
        batches,
        micro_tokens=plan.facts.tokens_per_micro,
        noise=state.gns,
        guard=diagnostics.best_effort("gns"),
        world_size=info.world_size,
    )


def _probe(
    plan: Plan,
    state: TrainState,
    row_model: nn.Module,
    loss: Loss,
    info: RankInfo,
    device: torch.device,
    *,
    in_lockstep: bool,
) -> StepProbe | None:
    table = plan.config.ledger
    if state.ledger is None or not table.probe_every:
        return None
    probe = CarryProbe(
        row_model,
        token_loss=lambda output, targets: loss(output, targets).token_loss,
        cells=table.probe_cells,
        cell_tokens=plan.config.row_tokens,
        agree=(lambda number: most_of_ranks(number, device=device, world_size=info.world_size)[0])
        if in_lockstep
        else None,
        autocast=autocast_context(plan.config, device),
    )
    return StepProbe(probe, ledger=state.ledger, tracker=state.tracker, device=device)


def _profile(
    plan: Plan, state: TrainState, position: Position, device: torch.device, run_dir: RunDir, stack: ExitStack
) -> StepProfile:
    profile = StepProfile(
        run_dir.path,
        num_steps=plan.config.metrics.profile,
        start=position.step,
        device=device,
        tracker=state.tracker,
        guard=state.tracker.diagnostics.best_effort("profile"),
    )
    stack.callback(profile.close)
    return profile


def _sampler(plan: Plan, state: TrainState, device: torch.device, events: EventWriter | None) -> Sampler:
    return Sampler(
        model=state.model,
        tokenizer=plan.tokenizer,
        table=plan.config.sample,
        seed=plan.config.run.seed,
        cell=plan.config.data.seq_len,
        device=device,
        autocast=autocast_context(plan.config, device),
        send=[events.write, state.tracker.log_event] if events is not None else [],
    )
