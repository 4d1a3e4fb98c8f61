"""The parts of a run, put together on one rank."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.data.blending.blend import BlendDataset
from trainer.data.loader import Loader
from trainer.distributed.env import RankInfo
from trainer.ledger.ledger import Ledger
from trainer.metrics.best_effort import Diagnostics
from trainer.metrics.noise_scale.hooks import GradientNoiseScale
from trainer.metrics.rank_reduction import MetricPlan
from trainer.metrics.sinks.events import EventWriter
from trainer.metrics.spikes import SpikeDetector
from trainer.metrics.tracker import MetricsTracker
from trainer.training.checkpointing.saver import Saver
from trainer.training.evaluation.evaluator import Evaluator
from trainer.training.evaluation.sampler import Sampler
from trainer.training.progress import Progress
from trainer.training.run_dir import RunDir, environment
from trainer.training.run_state import Run
from trainer.training.setup.assembly import (
    autocast_context,
    holdout_batches,
    make_blend,
    make_eval_ledger,
    make_ledger,
    make_objective,
    max_tokens_per_micro,
    settles_late,
    wrap_ddp,
)
from trainer.training.setup.plan import Plan, build_model
from trainer.training.signals import StopRequest
from trainer.training.step.details import StepDetails, detail_keys
from trainer.training.step.microbatch import accepted_inputs
from trainer.training.step.optimizer import build_optimizer
from trainer.training.step.step import StepSettings, TrainStep
from trainer.training.step_end import RANK_TIMES


class EventRouter:
    """Takes events before it is known whether this rank writes any, and drops them where it does not."""

    def __init__(self) -> None:
        self.writer: EventWriter | None = None

    def __call__(self, event: dict[str, Any]) -> None:
        """Hand the event on."""
        if self.writer is not None:
            self.writer.write(event)


@dataclass
class Parts:
    """Everything of a run that exists before it is known where the run goes on."""

    plan: Plan
    info: RankInfo
    device: torch.device
    model: nn.Module
    dataset: BlendDataset
    ledger: Ledger | None
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    tracker: MetricsTracker
    diagnostics: Diagnostics
    events: EventRouter
    saver: Saver
    gns: GradientNoiseScale | None = None
    evaluator: Evaluator | None = None
    spikes: SpikeDetector | None = None
    wandb_run_id: str | None = None
    wrapped: nn.Module | None = None

    def close(self) -> None:
        """Let go of hooks and of DDP, whose reducer would otherwise outlive the process group."""
        if self.gns is not None:
            self.gns.close()
        self.wrapped = None


def build_parts(plan: Plan, info: RankInfo, device: torch.device, run_dir: RunDir) -> Parts:
    """Model, data, ledger, optimizer, tracker and saver of this rank. No collective is run.

    Raises:
        UserError: something of the user's cannot be used.
    """
    config = plan.config
    torch.manual_seed(config.run.seed)  # the same weights on every rank
    model = build_model(config.model, plan.vocab_size).to(device)
    torch.manual_seed(zlib.crc32(f"{config.run.seed}:{info.rank}".encode()))  # but dropout of its own
    ledger = make_ledger(plan, info, model, device)
    optimizer = build_optimizer(model, config.optimizer)
    scaler = torch.amp.GradScaler(device.type, enabled=config.train.precision == "fp16")
    events = EventRouter()
    versions = environment(info)
    flops = getattr(model, "flops_per_token", None)
    tracker = MetricsTracker(
        log_interval=config.metrics.log_interval,
        smoothing_alpha=config.metrics.smoothing_alpha,
        num_devices=info.world_size,
        device=device,
        flops_per_token=flops(config.data.seq_len) if flops is not None else 0.0,
        peak_tflops=config.metrics.peak_tflops,
        rank=info.rank,
    )
    parts = Parts(
        plan=plan,
        info=info,
        device=device,
        model=model,
        dataset=make_blend(plan, info),
        ledger=ledger,
        optimizer=optimizer,
        scaler=scaler,
        tracker=tracker,
        diagnostics=Diagnostics(on_event=events),
        events=events,
        saver=Saver(
            directory=run_dir.checkpoints,
            table=config.checkpoint,
            info=info,
            model=model,
            optimizer=optimizer,
            scaler=scaler,
            ledger=ledger,
            device=device,
            shared_state=lambda step: {**_shared_state(parts, step), "environment": versions},
        ),
    )
    if config.train.spike_sigma:
        parts.spikes = SpikeDetector(config.train.spike_sigma)
    if config.gns.enabled:
        group = dist.group.WORLD if info.world_size > 1 else None
        parts.gns = GradientNoiseScale(model, ema=config.gns.ema, process_group=group)
    if config.eval.every:
        parts.evaluator = _make_evaluator(parts)
    return parts


def build_run(
    parts: Parts,
    *,
    step: int,
    data_state: Any,
    events: EventWriter | None,
    stop: StopRequest,
    verdict: Callable[[], str] | None = None,
) -> Run:
    """Wrap the model for the ranks, hook the noise scale, start reading. Every rank must call it (DDP communicates)."""
    plan, config, info = parts.plan, parts.plan.config, parts.info
    if config.train.compile:
        parts.model.compile()
    parts.wrapped = wrap_ddp(parts.model, info, parts.device)
    objective = make_objective(config.objective)
    train_step = TrainStep(
        model=parts.wrapped,
        ledger=parts.ledger,
        objective=objective,
        optimizer=parts.optimizer,
        gns=parts.gns,
        scaler=parts.scaler,
        settings=StepSettings(
            micro_batches=config.train.micro_batches,
            max_tokens_per_micro=max_tokens_per_micro(plan),
            clip_grad_norm=config.train.clip_grad_norm,
            settles_late=settles_late(config, parts.device),
        ),
        world_size=info.world_size,
        device=parts.device,
        autocast=autocast_context(config, parts.device),
        details=_details_maker(parts),
    )
    pool_keys = list(parts.dataset.metric_ops)
    ledger_keys = list(parts.ledger.metric_keys) if parts.ledger is not None else []
    return Run(
        config=config,
        info=info,
        train_step=train_step,
        loader=Loader(parts.dataset, device=parts.device, prefetch=config.data.prefetch),
        ledger=parts.ledger,
        gns=parts.gns,
        tracker=parts.tracker,
        evaluator=parts.evaluator,
        saver=parts.saver,
        stop=stop,
        plan=MetricPlan.from_keys([*pool_keys, *ledger_keys, *_detail_keys(parts), *RANK_TIMES]),
        progress=Progress(
            is_shown=info.is_main and sys.stderr.isatty(),
            total=config.train.steps,
            done=step,
            name=config.run.name,
            verdict=verdict,
        ),
        accepted=accepted_inputs(parts.model),
        device=parts.device,
        events=events,
        sampler=_make_sampler(parts),
        spikes=parts.spikes,
        step=step,
        first_step=step,
        data_state=data_state,
    )


def _token_types(plan: Plan) -> tuple[str, ...]:
    return plan.tokenizer.token_type_names if plan.config.objective.token_types else ()


def _details_maker(parts: Parts) -> Callable[[bool], StepDetails]:
    return partial(
        StepDetails,
        token_types=_token_types(parts.plan),
        token_type_guard=parts.diagnostics.best_effort("token_type"),
        per_source=parts.plan.config.metrics.per_source,
        per_source_guard=parts.diagnostics.best_effort("per_source"),
        planned=frozenset(_detail_keys(parts)),
    )


def _detail_keys(parts: Parts) -> list[str]:
    plan = parts.plan
    per_source = plan.config.metrics.per_source
    return detail_keys(
        make_objective(plan.config.objective).components,
        _token_types(plan),
        [source.name for source in plan.sources] if per_source else [],
        sorted({stream.modality for source in plan.sources for stream in source.streams}) if per_source else [],
    )


def _make_evaluator(parts: Parts) -> Evaluator:
    plan = parts.plan
    return Evaluator(
        model=parts.model,
        accepted=accepted_inputs(parts.model),
        objective=make_objective(plan.config.objective),
        batches=holdout_batches(plan, parts.info, parts.device),
        make_ledger=make_eval_ledger(plan, parts.model, parts.device),
        details=_details_maker(parts),
        plan=MetricPlan.from_keys(_detail_keys(parts)),
        autocast=autocast_context(plan.config, parts.device),
        is_bytes=plan.config.data.tokenizer == "bytes",
        world_size=parts.info.world_size,
        device=parts.device,
    )


def _make_sampler(parts: Parts) -> Sampler | None:
    plan = parts.plan
    if not plan.config.sample.every or not parts.info.is_main:
        return None
    return Sampler(
        model=parts.model,
        tokenizer=plan.tokenizer,
        table=plan.config.sample,
        seed=plan.config.run.seed,
        cell=plan.config.data.seq_len,
        device=parts.device,
        autocast=autocast_context(plan.config, parts.device),
        guard=parts.diagnostics.best_effort("sample"),
        send=[parts.events, parts.tracker.log_event],
    )


def _shared_state(parts: Parts, step: int) -> dict[str, Any]:
    """What of a run is the same on all ranks and fits JSON."""
    return {
        "step": step,
        "world_size": parts.info.world_size,
        "tracker": parts.tracker.state_dict(),
        "gns": parts.gns.state_dict() if parts.gns is not None else None,
        "evaluation_is_due": parts.evaluator is not None and parts.evaluator.is_due,
        "spikes": parts.spikes.state_dict() if parts.spikes is not None else None,
        "wandb_run_id": parts.wandb_run_id,
        "config": parts.plan.config.model_dump(mode="json"),
    }
