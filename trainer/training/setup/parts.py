"""The parts of a run, made from its plan: model, ledgers, optimizer, loss, strategy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer.config.schema import ModelTable, RunConfig
from trainer.distributed.env import RankInfo
from trainer.distributed.strategy import Strategy, shard_units, strategy_for
from trainer.import_path import users_code
from trainer.ledger.ledger import Ledger
from trainer.metrics.logger import get_logger
from trainer.metrics.tracker import MetricsTracker
from trainer.model.protocol import ModelOutput, extras_of, output_layer
from trainer.objective.loss import Loss, Objective
from trainer.options import DEFAULT_CAPACITY, LedgerOptions
from trainer.training.checkpointing.train_state import DataShard, TrainState
from trainer.training.setup.plan import Plan, build_model, own_loss, width_of
from trainer.training.setup.sources import evaluated_rows, make_blend, plan_lanes
from trainer.training.step.optimizer import build_optimizer

logger = get_logger(__name__)
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_state(plan: Plan, info: RankInfo, device: torch.device, strategy: Strategy | None = None) -> TrainState:
    """Everything that has a state on this rank, before the first step and without the noise scale.

    Without a `strategy`, every rank has all parameters. A UserError if a custom part is unusable.
    """
    config = plan.config
    torch.manual_seed(config.run.seed)  # the same weights on every rank
    model = make_model(plan)
    # Before the parameters get their memory on the device.
    (strategy or Strategy()).shard(model, partial(prepared_units, model, config))
    model = model.to(device)
    flops = getattr(model, "flops_per_token", None)  # for MFU; a custom model need not say
    return TrainState(
        model=model,
        shards=make_shards(plan, info, model, device),
        optimizer=build_optimizer(model, config.optimizer, plan.parts),
        scaler=torch.amp.GradScaler(device.type, enabled=config.train.precision == "fp16"),
        tracker=MetricsTracker(
            config.metrics,
            num_devices=info.world_size,
            device=device,
            flops_per_token=0.0 if flops is None else flops(config.data.seq_len),
            rank=info.rank,
        ),
    )


def make_model(plan: Plan, table: ModelTable | None = None) -> nn.Module:
    """The model of a plan, or of another table, as `[train]` runs it."""
    config = plan.config
    model = build_model(table or config.model, plan.vocab_size, seq_len=config.data.seq_len, parts=plan.parts)
    if config.train.activation_checkpointing == "block":
        plan.parts.need("recomputed blocks", "train.activation_checkpointing")(model)
    return model


def make_shards(plan: Plan, info: RankInfo, model: nn.Module, device: torch.device) -> list[DataShard]:
    """This rank's data shards, each with its own ledger: a reader keeps its documents."""
    shards, width = info.data_shards(plan.facts.data_shards), width_of(model)
    lanes, options = plan_lanes(plan, width, device), plan.config.ledger
    rows = plan.config.data.mixing.batch_size
    if lanes.sets:
        logger.info("full rows: %s", lanes.words(rows))
        others = any(source.table.target is not None for source in plan.sources)
        capacity = options.capacity or lanes.num(rows) + others * DEFAULT_CAPACITY
        options = options.model_copy(update={"capacity": capacity})
    ledgers: list[Ledger | None] = [None] * len(shards)
    if width:
        ledgers = [Ledger(options, state_width=width, device=device) for _ in shards]
    pairs = zip(shards, ledgers, strict=True)
    return [DataShard(shard.rank, make_blend(plan, shard, model, lanes), ledger) for shard, ledger in pairs]


def make_eval_ledger(plan: Plan, model: nn.Module, device: torch.device) -> Callable[[], Ledger] | None:
    """Makes the empty ledger of a set that is evaluated: a slot for each row, never swept."""
    width = width_of(model)
    if not width:
        return None
    rows, dtype = evaluated_rows(plan), plan.config.ledger.dtype
    options = LedgerOptions(wipe_mode="none", capacity=rows, dtype=dtype)
    return partial(Ledger, options, state_width=width, device=device)


def model_and_loss(
    model: nn.Module, plan: Plan, device: torch.device, *, vocab_size: int = 0
) -> tuple[nn.Module, Loss]:
    """The model as it runs a row, and its loss, which computes the logits with `chunk_tokens`.

    A UserError if a custom loss cannot be made, or if the model does more to its logits than an
    output layer: with `chunk_tokens`, this is tried on the `device`.
    """
    table, own, key = plan.config.objective, None, "objective.target"
    if table.target is not None:
        with users_code(key):
            own = own_loss(table.target, table.args, key)()
            trained = own.to(device).parameters() if isinstance(own, nn.Module) else ()
            if any(each.requires_grad for each in trained):
                name = type(own).__name__
                raise TypeError(f"made a {name} with parameters, which no optimizer would train")
    objective = Objective(table, own=own, vocab_size=vocab_size)
    if table.chunk_tokens == 0:  # all logits exist at once
        return model, objective
    in_chunks = plan.parts.need("loss in chunks", "objective.chunk_tokens")
    made: tuple[nn.Module, Loss]
    made = in_chunks(model, objective, table.chunk_tokens, device=device, seq_len=plan.config.data.seq_len)
    return made


def autocast_context(config: RunConfig, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Makes the context in which forward and loss run."""
    dtype = AUTOCAST[config.train.precision]
    return nullcontext if dtype is None else lambda: torch.autocast(device.type, dtype=dtype)


def max_tokens_per_micro(plan: Plan) -> int:
    """The most tokens of a micro-batch. It scales the loss, for which any constant works."""
    return plan.facts.tokens_per_micro // plan.facts.data_shards or plan.config.data.seq_len


def make_strategy(config: RunConfig, info: RankInfo, device: torch.device) -> Strategy:
    """The strategy of a run. Every rank must call it. A UserError as in `strategy_for`."""
    dtype = torch.bfloat16 if config.train.precision == "bf16" else None
    return strategy_for(config.distributed, info, device, param_dtype=dtype)


def prepared_units(model: nn.Module, config: RunConfig) -> Sequence[nn.Module]:
    """Prepare a model for sharding. Returns the modules that are gathered one at a time."""
    units = shard_units(model)
    if config.objective.chunk_tokens:  # the loss uses the output layer after the model's forward
        units = [unit for unit in units if unit is not output_layer(model)]
    if config.model.target is None:
        # That a block returns a view matters only if its result is written to; the families do not.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    model.register_forward_hook(_with_known_fields)
    return units


def _with_known_fields(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """FSDP finds tensors only in tuples, lists and dicts; a model may return any object."""
    if isinstance(output, tuple):
        return output
    return ModelOutput(output.logits, output.state, *extras_of(output))
