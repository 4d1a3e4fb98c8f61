"""The parts of a run, made from its plan: model, ledger, optimizer and what else has a state."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from trainer.config.rules import check_state_rules, largest_batch, mixing_of, reads_lanes
from trainer.config.schema import ModelTable, RunConfig
from trainer.data.blend import BlendDataset, BlendSource, UnreadSource
from trainer.data.documents import ReadOptions
from trainer.data.groups import CutOptions, OpenStream
from trainer.data.lanes import LaneBlend
from trainer.data.mixing import MixOptions, StreamMixingDataset
from trainer.data.shard_source import ShardSource, StreamSource
from trainer.distributed.env import RankInfo
from trainer.distributed.strategy import Replicated, Sharded, Strategy, bypassed, layout_for, shard_units
from trainer.errors import UserError, raise_found
from trainer.import_path import refuse_arguments, resolve_target, users_code
from trainer.ledger.ledger import Ledger
from trainer.ledger.snapshot import Owners
from trainer.metrics.logger import get_logger
from trainer.metrics.tracker import MetricsTracker
from trainer.model.protocol import ModelOutput, evaluating, extras_of
from trainer.model.wrappers import (
    Cellwise,
    Headless,
    output_layer,
    recompute_blocks,
    refuse_more_than_a_head,
    run_few_tokens,
)
from trainer.objective.chunked import ChunkedObjective
from trainer.objective.loss import Loss, Objective
from trainer.training.checkpointing.train_state import DataShard, TrainState
from trainer.training.setup.plan import Plan, build_model, own_loss, width_of
from trainer.training.setup.sources import Source
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
    model = make_model(plan)
    shard_model(strategy or Strategy(), model, config)
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
            log_interval=config.metrics.log_interval,
            smoothing_alpha=config.metrics.smoothing_alpha,
            num_devices=info.world_size,
            device=device,
            flops_per_token=flops(config.data.seq_len) if flops is not None else 0.0,
            peak_tflops=config.metrics.peak_tflops,
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
        recompute_blocks(model)
    return model


def make_shards(plan: Plan, info: RankInfo, model: nn.Module, device: torch.device) -> list[DataShard]:
    """This rank's data shards, each with a ledger of its own unless states move between them."""
    shards = info.data_shards(plan.facts.data_shards)
    blends = [make_blend(plan, shard, model) for shard in shards]
    ledgers: list[Ledger | None] = [None] * len(shards)
    if width_of(model) and plan.facts.ownership == "exchange":
        owners = Owners("exchange", info.rank, info.world_size)
        shared = make_ledger(plan, owners, model, device, capacity=len(shards) * plan.config.ledger.capacity)
        ledgers = [shared] * len(shards)
    elif width_of(model):
        owned = [Owners("reader", shard.rank, shard.world_size) for shard in shards]
        ledgers = [make_ledger(plan, each, model, device, capacity=plan.config.ledger.capacity) for each in owned]
    return [DataShard(each.rank, *parts) for each, parts in zip(shards, zip(blends, ledgers, strict=True), strict=True)]


def make_ledger(plan: Plan, owners: Owners, model: nn.Module, device: torch.device, *, capacity: int) -> Ledger:
    """A training ledger."""
    table = plan.config.ledger
    return Ledger(
        state_width=width_of(model),
        capacity=capacity,
        wipe_mode=table.wipe_mode,
        stale_threshold=table.stale_threshold,
        sweep_every=table.sweep_every,
        wipe_every=table.wipe_every,
        device=device,
        dtype=STATE_TYPES[table.dtype],
        owners=owners,
    )


def make_eval_ledger(plan: Plan, model: nn.Module, device: torch.device) -> Callable[[], Ledger] | None:
    """What makes the own, empty ledger of a set that is evaluated: a slot for each row, never swept."""
    if width_of(model) == 0:
        return None
    capacity, dtype = evaluated_rows(plan), STATE_TYPES[plan.config.ledger.dtype]
    return lambda: Ledger(state_width=width_of(model), capacity=capacity, wipe_mode="none", device=device, dtype=dtype)


def evaluated_rows(plan: Plan) -> int:
    """Rows of a micro-batch of an evaluation: as many as the largest has that is trained on."""
    tables = [source.table for source in plan.sources]
    return max(map(largest_batch, [plan.config.data.mixing, *(mixing_of(plan.config, table) for table in tables)]))


def model_and_loss(
    model: nn.Module, config: RunConfig, device: torch.device | None, *, vocab_size: int = 0
) -> tuple[nn.Module, Loss]:
    """What a row is run through, and the loss of what comes out: with `chunk_tokens`, the loss computes the logits.

    Raises:
        UserError: `chunk_tokens` is set for a model that does more to its logits than an output layer, which shows only if it
            is on a `device`, and has numbers; or a loss of the user's own cannot be made.
    """
    table, own = config.objective, None
    if table.target is not None:
        with users_code(key := "objective.target"):
            own = own_loss(table.target, table.args, key)()
            if isinstance(own, nn.Module) and any(each.requires_grad for each in own.to(device).parameters()):
                raise TypeError(f"made a {type(own).__name__} with parameters, which no optimizer would train")
    objective = Objective(
        token_ce=table.token_ce, z_loss=table.z_loss, coord=table.coord, own=own, vocab_size=vocab_size
    )
    if table.chunk_tokens == 0:
        return model, objective
    head = output_layer(model)
    if device is not None:
        refuse_more_than_a_head(model, head, device, seq_len=config.data.seq_len)
    return Headless(model, head), ChunkedObjective(objective, head, chunk_tokens=table.chunk_tokens)


def autocast_context(config: RunConfig, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Makes the context in which forward and loss run."""
    dtype = AUTOCAST[config.train.precision]
    return nullcontext if dtype is None else lambda: torch.autocast(device.type, dtype=dtype)


def in_cells(model: nn.Module, config: RunConfig) -> nn.Module:
    """The model as the training step calls it: cell by cell, with `tbptt_cells`. Everything else, checkpoints included, uses
    the model itself."""
    if config.train.tbptt_cells == 1:
        return model
    return Cellwise(
        model,
        cell=config.data.seq_len,
        cells=config.train.tbptt_cells,
        recompute=config.train.activation_checkpointing == "cell",
    )


def make_dataset(plan: Plan, source: Source, info: RankInfo) -> StreamSource:
    """The training part of a source."""
    kind = ShardSource if reads_lanes(plan.config) else StreamMixingDataset
    return kind(source.streams, *reading(plan, source), shard=info.rank, num_shards=info.world_size)


def make_held_out(
    plan: Plan,
    source: Source,
    info: RankInfo,
    *,
    is_whole: bool = False,
    in_memory: Mapping[str, OpenStream] = MappingProxyType({}),
) -> ShardSource:
    """What is evaluated on of a source, read once: the held-out documents, or (`is_whole`) all. `in_memory`: see
    `StreamOpener`."""
    how = reading(plan, source, is_holdout=True, is_whole=is_whole)
    return ShardSource(source.streams, *how, shard=info.rank, num_shards=info.world_size, in_memory=in_memory)


def reading(
    plan: Plan, source: Source, *, is_holdout: bool = False, is_whole: bool = False
) -> tuple[CutOptions, ReadOptions, MixOptions]:
    """How a source is cut, read and mixed; see `make_dataset` and `make_held_out`."""
    config, mixing = plan.config, mixing_of(plan.config, source.table)
    cut = CutOptions(
        namespace=source.name,
        seq_len=config.data.seq_len if is_holdout else config.row_tokens,
        max_group_cells=config.data.max_group_cells if is_holdout else config.max_group_rows,
        split="holdout" if is_holdout and not is_whole else "train",
        holdout_fraction=0.0 if is_whole else config.eval.holdout_fraction,
    )
    table = source.table
    read = ReadOptions(plan.tokenizer, table.dtype, table.eod, table.text_split, table.format, table.column)
    mix = MixOptions(
        num_streams_mixed=mixing.num_streams_mixed,
        pick_mode=mixing.pick_mode,
        batching_mode="per_stream" if mixing.batching_mode == "per_row" else mixing.batching_mode,
        batch_size=mixing.batch_size,
        batch_size_by_modality=mixing.batch_size_by_modality,
        repeat=mixing.repeat and not is_holdout,
        seed=config.run.seed,
    )
    return cut, read, mix


def runs_on(plan: Plan, model: nn.Module | None) -> bool:
    """Whether documents begin within rows. `model`: None: it is built without weights, if it decides."""
    align = plan.config.data.align
    if align == "auto" and reads_lanes(plan.config):
        return bool(getattr(model or plan.weightless_model(), "resets_in_one_pass", False))
    return align == "stream"


def alignment(plan: Plan, model: nn.Module | None) -> str:
    """How documents lie in full rows, and why; empty for other rows. `model`: see `runs_on`."""
    if not reads_lanes(plan.config):
        return ""
    if runs_on(plan, model):
        return "stream: documents begin within rows, and no position is padded"
    if plan.config.data.align == "document":
        return "document: each begins a row, as data.align says"
    name = type(model or plan.weightless_model()).__name__
    return f"document: each begins a row, since {name} does not declare resets_in_one_pass; with stream no row would be padded"


def make_blend(plan: Plan, info: RankInfo, model: nn.Module | None = None) -> BlendDataset:
    """All sources, mixed by their weights. `model`: see `runs_on`.

    Raises:
        UserError: a target does not give an iterable.
    """
    blended = []
    for source in plan.sources:
        if source.is_off:
            dataset: Any = UnreadSource()
        elif source.table.target is None:
            dataset = make_dataset(plan, source, info)
        else:
            dataset = _make_target(plan, source, info)
        blended.append(BlendSource(source.name, dataset, source.weight))
    options: dict[str, Any] = {
        "seed": plan.config.run.seed,
        "micro_batches": plan.config.micro_batches,
        "per_source": plan.config.metrics.per_source,
        "times": True,
        "history_every": plan.config.ledger.probe_every,
        "history_tokens": plan.config.ledger.probe_cells * plan.config.row_tokens,
    }
    if not reads_lanes(plan.config):
        return BlendDataset(blended, **options)
    return LaneBlend(
        blended,
        rows=plan.config.data.mixing.batch_size,
        row_tokens=plan.config.row_tokens,
        runs_on=runs_on(plan, model),
        tokenizer=plan.tokenizer,
        **options,
    )


def _make_target(plan: Plan, source: Source, info: RankInfo) -> Any:
    key = f"source {source.name}: target"
    assert source.table.target is not None
    target = resolve_target(source.table.target, key)
    given = {"rank": info.rank, "world_size": info.world_size, "seed": plan.config.run.seed}
    given |= {"seq_len": plan.config.row_tokens, **source.table.args}
    refuse_arguments(target, source.table.target, given, key=key)
    with users_code(key):
        dataset = target(**given)
    if not hasattr(dataset, "__iter__"):
        problem = f"gave a {type(dataset).__name__}, which cannot be iterated"
        raise UserError(key, problem, "return an iterable of dicts")
    own = plan.parts.need("own batches", key)  # which no other source needs
    return own(dataset, vocab_size=plan.vocab_size, key=f"source {source.name}: {source.table.target}")


def max_tokens_per_micro(plan: Plan) -> int:
    """The most tokens that a micro-batch of the configured sources can have (what scales the loss; any constant works)."""
    return plan.facts.tokens_per_micro // plan.facts.data_shards or plan.config.row_tokens


logger = get_logger(__name__)


def make_strategy(config: RunConfig, info: RankInfo, device: torch.device) -> Strategy:
    """The strategy of a run. Every rank must call it.

    Raises:
        UserError: as `layout_for`.
    """
    table = config.distributed
    if info.world_size == 1:
        if table.strategy != "ddp":
            logger.info('distributed.strategy = "%s": a single rank holds the whole model', table.strategy)
        return Strategy()
    layout = layout_for(table.strategy, table.replicas, info)
    if layout is None:
        return Replicated(world_size=info.world_size, device=device, find_unused=table.find_unused_parameters)
    if table.strategy == "hsdp" and layout.replicas == 1:
        text = 'distributed.strategy = "hsdp" with one replica is "fsdp": distributed.replicas = 0 makes one per node'
        logger.info(text)
    return Sharded(
        layout,
        device=device,
        reshard_after_forward=table.reshard_after_forward,
        keeps_whole=table.accumulate == "whole",
        param_dtype=torch.bfloat16 if config.train.precision == "bf16" else None,
    )


def shard_model(strategy: Strategy, model: nn.Module, config: RunConfig) -> None:
    """Leave this rank its part of the model, which each rank has built whole in host memory, with the same weights.

    Raises:
        UserError: its blocks are not known.
    """
    strategy.shard(model, lambda: _prepared_units(model, config))


def _prepared_units(model: nn.Module, config: RunConfig) -> Sequence[nn.Module]:
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
