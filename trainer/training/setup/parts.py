"""The parts of a run, made from its plan: model, ledger, optimizer and what else has a state."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from trainer.config.rules import check_state_rules, largest_batch
from trainer.config.schema import ModelTable, ObjectiveTable, RunConfig
from trainer.distributed.env import RankInfo
from trainer.distributed.strategy import Strategy
from trainer.ledger.ledger import Ledger
from trainer.ledger.snapshot import Owners
from trainer.metrics.tracker import MetricsTracker
from trainer.model.wrappers import Cellwise, Headless, output_layer, recompute_blocks, refuse_more_than_a_head
from trainer.objective.chunked import ChunkedObjective
from trainer.objective.loss import CoordSettings, Loss, Objective
from trainer.training.checkpointing.train_state import TrainState
from trainer.training.setup.data import make_blend
from trainer.training.setup.plan import Plan, build_model, width_of
from trainer.training.setup.plausible import refuse_unmet
from trainer.training.setup.sharding import shard_model
from trainer.training.step.optimizer import build_optimizer

STATE_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_state(plan: Plan, info: RankInfo, device: torch.device, strategy: Strategy | None = None) -> TrainState:
    """Everything of a run that has a state, on this rank, as it is before the first step, but for the noise scale.

    Args:
        strategy: None: every rank has all of the parameters.

    Raises:
        UserError: something of the user's cannot be used.
    """
    config = plan.config
    torch.manual_seed(config.run.seed)  # the same weights on every rank
    model = make_model(config, config.model, plan.vocab_size)
    shard_model(strategy or Strategy(), model, config)
    model = model.to(device)
    check_state_rules(config, width_of(model))
    if not plan.has_built_in_model:  # whose needs were not known before
        refuse_unmet(plan.unmet_needs(device, model=model))
    torch.manual_seed(zlib.crc32(f"{config.run.seed}:{info.rank}".encode()))  # but dropout of its own
    flops = getattr(model, "flops_per_token", None)
    return TrainState(
        model=model,
        dataset=make_blend(plan, info),
        ledger=make_ledger(plan, info, model, device),
        optimizer=build_optimizer(model, config.optimizer),
        scaler=torch.amp.GradScaler(device.type, enabled=config.train.precision == "fp16"),
        tracker=MetricsTracker(
            log_interval=config.metrics.log_interval,
            smoothing_alpha=config.metrics.smoothing_alpha,
            num_devices=info.world_size,
            device=device,
            flops_per_token=flops(config.data.seq_len) if flops is not None else 0.0,
            peak_tflops=config.metrics.peak_tflops,
            rank=info.rank,
        ),
    )


def make_model(config: RunConfig, table: ModelTable, vocab_size: int) -> nn.Module:
    """The model of a table, as `[train]` has it run.

    Raises:
        UserError: it cannot be built, or its blocks are not known.
    """
    model = build_model(table, vocab_size, seq_len=config.data.seq_len)
    if config.train.activation_checkpointing == "block":
        recompute_blocks(model)
    return model


def make_ledger(plan: Plan, info: RankInfo, model: nn.Module, device: torch.device) -> Ledger | None:
    """The training ledger; None for a model without state."""
    table, width = plan.config.ledger, width_of(model)
    if width == 0:
        return None
    return Ledger(
        state_width=width,
        capacity=table.capacity,
        wipe_mode=table.wipe_mode,
        stale_threshold=table.stale_threshold,
        sweep_every=table.sweep_every,
        wipe_every=table.wipe_every,
        device=device,
        dtype=STATE_TYPES[table.dtype],
        placement=table.placement,
        owners=Owners("exchange" if plan.facts.ownership == "exchange" else "reader", info.rank, info.world_size),
    )


def make_eval_ledger(plan: Plan, model: nn.Module, device: torch.device) -> Callable[[], Ledger] | None:
    """What makes the own, empty ledger of a set that is evaluated: as large as its groups in flight, never swept."""
    if width_of(model) == 0:
        return None
    # All held-out parts together, or one [[eval.source]].
    mixing = plan.config.data.mixing
    capacity = max(plan.facts.groups_in_flight, mixing.num_streams_mixed * largest_batch(mixing))
    dtype = STATE_TYPES[plan.config.ledger.dtype]
    return lambda: Ledger(state_width=width_of(model), capacity=capacity, wipe_mode="none", device=device, dtype=dtype)


def make_objective(table: ObjectiveTable) -> Objective:
    """The loss of `[objective]`."""
    coord = table.coord
    settings = None if coord is None else CoordSettings(**coord.model_dump())
    return Objective(z_loss=table.z_loss, coord=settings)


def model_and_loss(model: nn.Module, config: RunConfig, device: torch.device | None) -> tuple[nn.Module, Loss]:
    """What a row is run through, and the loss of what comes out: with `chunk_tokens`, the loss computes the logits.

    Args:
        device: the model's; None: it has no numbers that could be compared.

    Raises:
        UserError: `chunk_tokens` is set for a model that does more to its logits than an output layer.
    """
    objective = make_objective(config.objective)
    if config.objective.chunk_tokens == 0:
        return model, objective
    head = output_layer(model)
    if device is not None:
        refuse_more_than_a_head(model, head, device, seq_len=config.data.seq_len)
    return Headless(model, head), ChunkedObjective(objective, head, chunk_tokens=config.objective.chunk_tokens)


def autocast_context(config: RunConfig, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Makes the context in which forward and loss run."""
    dtype = AUTOCAST[config.train.precision]
    if dtype is None:
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=dtype)


def in_cells(model: nn.Module, config: RunConfig) -> nn.Module:
    """The model as the training step calls it: in pieces, with `tbptt_cells` and `burn_in`. Everything else, checkpoints
    included, uses the model itself."""
    if config.train.tbptt_cells == 1 and config.ledger.burn_in == 0:
        return model
    return Cellwise(
        model,
        cell=config.data.seq_len,
        cells=config.train.tbptt_cells,
        burn_in=config.ledger.burn_in,
        recompute=config.train.activation_checkpointing == "cell",
    )
