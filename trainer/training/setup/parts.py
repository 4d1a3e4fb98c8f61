"""The parts of a run, made from its plan: model, ledgers, optimizer, loss, strategy. Its data are made in `sources`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer.config.rules import check_state_rules
from trainer.config.schema import ModelTable, RunConfig
from trainer.distributed.env import RankInfo
from trainer.distributed.strategy import Strategy, bypassed, shard_units, strategy_for
from trainer.errors import raise_found
from trainer.import_path import users_code
from trainer.ledger.ledger import Ledger
from trainer.ledger.snapshot import Owners
from trainer.metrics.tracker import MetricsTracker
from trainer.model.protocol import ModelOutput, evaluating, extras_of, output_layer, run_few_tokens
from trainer.objective.loss import Loss, Objective
from trainer.options import LedgerOptions
from trainer.training.checkpointing.train_state import DataShard, TrainState
from trainer.training.setup.plan import Plan, build_model, own_loss, width_of
from trainer.training.setup.sources import evaluated_rows, make_blend
from trainer.training.step.optimizer import build_optimizer

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
    model = make_model(plan)
    (strategy or Strategy()).shard(model, partial(prepared_units, model, config))
    model = model.to(device)
    check_state_rules(config, model)
    if not plan.has_built_in_model:  # whose needs were not known before
        raise_found(plan.unmet_needs(device, model=model))
    flops = getattr(model, "flops_per_token", None)
    return TrainState(
        model=model,
        shards=make_shards(plan, info, model, device),
        optimizer=build_optimizer(model, config.optimizer),
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
    """The model of a plan, or of another table, as `[train]` has it run.

    Raises:
        UserError: it cannot be built, or its blocks are not known.
    """
    config = plan.config
    model = build_model(table or config.model, plan.vocab_size, seq_len=config.data.seq_len, parts=plan.parts)
    if config.train.activation_checkpointing == "block":
        plan.parts.need("recomputed blocks", "train.activation_checkpointing")(model)
    return model


def make_shards(plan: Plan, info: RankInfo, model: nn.Module, device: torch.device) -> list[DataShard]:
    """This rank's data shards, each with a ledger of its own unless states move between them."""
    shards = info.data_shards(plan.facts.data_shards)
    blends = [make_blend(plan, shard, model) for shard in shards]
    options, width = plan.config.ledger, width_of(model)
    ledgers: list[Ledger | None] = [None] * len(shards)
    if width and plan.facts.ownership == "exchange":
        options = options.model_copy(update={"capacity": len(shards) * options.capacity})
        owners = Owners("exchange", info.rank, info.world_size)
        ledgers = [Ledger(options, state_width=width, device=device, owners=owners)] * len(shards)
    elif width:
        readers = [Owners("reader", shard.rank, shard.world_size) for shard in shards]
        ledgers = [Ledger(options, state_width=width, device=device, owners=each) for each in readers]
    return [DataShard(*parts) for parts in zip([each.rank for each in shards], blends, ledgers, strict=True)]


def make_eval_ledger(plan: Plan, model: nn.Module, device: torch.device) -> Callable[[], Ledger] | None:
    """What makes the own, empty ledger of a set that is evaluated: a slot for each row, never swept."""
    width = width_of(model)
    options = LedgerOptions(wipe_mode="none", capacity=evaluated_rows(plan), dtype=plan.config.ledger.dtype)
    return (lambda: Ledger(options, state_width=width, device=device)) if width else None


def model_and_loss(
    model: nn.Module, plan: Plan, device: torch.device | None, *, vocab_size: int = 0
) -> tuple[nn.Module, Loss]:
    """What a row is run through, and the loss of what comes out: with `chunk_tokens`, the loss computes the logits.

    Raises:
        UserError: `chunk_tokens` is set for a model that does more to its logits than an output layer, which shows only if it
            is on a `device`, and has numbers; or a loss of the user's own cannot be made.
    """
    table, own = plan.config.objective, None
    if table.target is not None:
        with users_code(key := "objective.target"):
            own = own_loss(table.target, table.args, key)()
            if isinstance(own, nn.Module) and any(each.requires_grad for each in own.to(device).parameters()):
                raise TypeError(f"made a {type(own).__name__} with parameters, which no optimizer would train")
    objective = Objective(table, own=own, vocab_size=vocab_size)
    if table.chunk_tokens == 0:
        return model, objective
    in_chunks = plan.parts.need("loss in chunks", "objective.chunk_tokens")
    made: tuple[nn.Module, Loss]
    made = in_chunks(model, objective, table.chunk_tokens, device=device, seq_len=plan.config.data.seq_len)
    return made


def autocast_context(config: RunConfig, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Makes the context in which forward and loss run."""
    dtype = AUTOCAST[config.train.precision]
    return nullcontext if dtype is None else lambda: torch.autocast(device.type, dtype=dtype)


def in_cells(model: nn.Module, plan: Plan) -> nn.Module:
    """The model as the training step calls it: cell by cell, with `tbptt_cells`. Everything else, checkpoints included, uses
    the model itself."""
    train = plan.config.train
    if train.tbptt_cells == 1:
        return model
    recompute = train.activation_checkpointing == "cell"
    run_in_cells = plan.parts.need("cells of a row", "train.tbptt_cells")
    built: nn.Module
    built = run_in_cells(model, cell=plan.config.data.seq_len, cells=train.tbptt_cells, recompute=recompute)
    return built


def max_tokens_per_micro(plan: Plan) -> int:
    """The most tokens that a micro-batch of the configured sources can have (what scales the loss; any constant works)."""
    return plan.facts.tokens_per_micro // plan.facts.data_shards or plan.config.row_tokens


def make_strategy(config: RunConfig, info: RankInfo, device: torch.device) -> Strategy:
    """The strategy of a run. Every rank must call it. UserError: as `strategy_for`."""
    dtype = torch.bfloat16 if config.train.precision == "bf16" else None
    return strategy_for(config.distributed, info, device, param_dtype=dtype)


def prepared_units(model: nn.Module, config: RunConfig) -> Sequence[nn.Module]:
    """The modules whose parameters a sharded model gathers one module at a time; prepares it for that.

    Raises:
        UserError: its blocks are not known.
    """
    units = shard_units(model)
    if config.objective.chunk_tokens:  # the loss uses it after the model's forward
        units = [unit for unit in units if unit is not output_layer(model)]
    if config.model.target is None:
        # That a block returns a view matters to those who write into it; the families do not.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    model.register_forward_hook(_with_known_fields)
    return units


def _with_known_fields(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """FSDP looks for tensors in tuples, lists and dicts alone; a model may return any object with the fields."""
    return output if isinstance(output, tuple) else ModelOutput(output.logits, output.state, *extras_of(output))


def refuse_bypassed_units(strategy: Strategy, model: nn.Module, device: torch.device, *, seq_len: int) -> None:
    """Run a few tokens, and refuse a sharded model that uses a module's parts without calling the module: their parameters
    are not gathered. Every rank must call it."""
    if strategy.whole(model) is not None:
        return
    try:
        inspect.signature(model.forward).bind(tokens=None, state=None)
    except TypeError:  # it takes inputs that only the data have
        return
    fork = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    try:
        with evaluating(model), torch.no_grad(), fork:
            run_few_tokens(model, device, seq_len=seq_len)
    except RuntimeError as error:
        raise bypassed(error) or error from None
    finally:
        strategy.reshard(model)
