"""The plan of a run, before the process group starts, and the parts that are made from it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config.data_tables import DataTable
from trainer.config.rules import Facts, check_rules, data_shards
from trainer.config.schema import ModelTable, ObjectiveTable, RunConfig
from trainer.data.tokenizer import Tokenizer, load_tokenizer, prompt_ids
from trainer.distributed.env import RankInfo
from trainer.distributed.strategy import Layout, Strategy, layout_for, shard_units, strategy_for
from trainer.errors import UserError
from trainer.import_path import refuse_arguments, resolve_target, users_code
from trainer.ledger.ledger import Ledger
from trainer.metrics.best_effort import BestEffort
from trainer.metrics.logger import get_logger
from trainer.metrics.tracker import MetricsTracker
from trainer.model.families import DEFAULT, FAMILIES, Family
from trainer.model.protocol import ModelOutput, extras_of, output_layer
from trainer.model.recurrence import HAS_TRITON
from trainer.objective.loss import Auxiliary, Loss, Objective
from trainer.options import DEFAULT_CAPACITY
from trainer.training import NO_PARTS, Parts, need
from trainer.training.checkpointing.train_state import DataShard, TrainState
from trainer.training.optimizer import Length, build_optimizer, make_schedule
from trainer.training.sources import (
    Source,
    check_reading,
    leaf_tables,
    make_blend,
    plan_lanes,
    resolve_eval_sources,
    resolve_sources,
)

logger = get_logger(__name__)
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Plan:
    """Everything about a run that needs no process group."""

    config: RunConfig
    sources: list[Source]
    tokenizer: Tokenizer
    facts: Facts
    eval_sources: Sequence[Source] = ()  # the validation sets of `[[eval.source]]`
    parts: Parts = NO_PARTS  # the parts that a run may have beyond the core
    lane_sets: Mapping[int, int] = field(default_factory=dict)
    """Those of the checkpoint that is resumed; see `recorded_sets`."""

    @property
    def vocab_size(self) -> int:
        """Token ids of the model, the one that begins a document included."""
        return self.tokenizer.vocab_size

    @property
    def length(self) -> Length:
        """How long the run is."""
        return Length.of(self.config, self.facts.tokens_per_micro)

    @property
    def has_built_in_model(self) -> bool:
        """Whether the model is a family of this package, covered by its tests."""
        return self.config.model.target is None and family_of(self.config.model).is_own

    @property
    def layout(self) -> Layout | None:
        """How the ranks share the model; None if each holds all of it."""
        return layout_for(self.config.distributed, RankInfo(world_size=self.facts.world_size))

    def weightless_model(self) -> nn.Module:
        """As `weightless`."""
        return weightless(self.config.model, self.vocab_size, self.config.data.seq_len, self.parts)


def weightless(table: ModelTable, vocab_size: int, seq_len: int, parts: Parts) -> nn.Module:
    """As `build_model`, without memory for the weights where the model can be built so."""
    build = partial(build_model, table, vocab_size, seq_len=seq_len, parts=parts)
    try:
        with torch.device("meta"):
            return build()
    except UserError:
        # A model that reads its weights while it is built; any other fault shows again.
        with torch.random.fork_rng(devices=[]):
            return build()


def width_of(model: nn.Module) -> int:
    """Numbers in one group's state, as the model declares it."""
    width = model.state_width
    assert isinstance(width, int)
    return width


def make_plan(config: RunConfig, config_path: Path, world_size: int, *, parts: Parts = NO_PARTS) -> Plan:
    """Check the config. `parts` have messages about settings that cannot be meant."""
    # First of all, so that every rank and every check sees the same settings.
    config = _for_this_device(config)
    num_shards = data_shards(config, world_size)
    sources = resolve_sources(config, config_path, num_shards)
    facts = check_rules(config, leaf_tables(sources), world_size)
    if config.train.tokens:  # forecasts use the number of full steps
        config = config.model_copy(update={"train": config.train.model_copy(update={"steps": facts.steps})})
    _check_modalities(config, sources)
    eval_sources = resolve_eval_sources(config)
    tokenizer = tokenizer_of(config.data)
    check_reading(sources, eval_sources, tokenizer, config.data.eod)
    resolve_builder(config.model, parts)
    make_schedule(config, Length.of(config, facts.tokens_per_micro))
    _check_tokens(config, tokenizer)
    if config.eval.target is not None:
        resolve_target(config.eval.target, "eval.target")
    if config.objective.target is not None:
        own_loss(config.objective.target, config.objective.args, "objective.target")
    plan = Plan(config, sources, tokenizer, facts, eval_sources, parts)
    if parts.messages is not None:
        parts.messages.planned(plan)
    return plan


def tokenizer_of(data: DataTable, name: str = "") -> Tokenizer:
    """The tokenizer of `[data]`. `name`: where its file is by now."""
    how: dict[str, Any] = data.model_dump(include={"vocab_size", "parse_special", "eod"})
    return load_tokenizer(name or data.tokenizer, **how)


def _check_tokens(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Refuse rows too short for a family, and a prompt or bins that are not in the vocabulary."""
    least = 1
    if config.model.target is None:
        least = family_of(config.model).least_tokens
    if config.data.seq_len < least:
        problem = f"rows of {config.data.seq_len} tokens are too short for {config.model.family}"
        raise UserError("data.seq_len", problem, f"set it to {least} or more")
    if config.sample.every:
        prompt_ids(tokenizer, config.sample.prompt, "sample.prompt")
    coord = config.objective.coord
    if coord is not None and coord.first_token + coord.num_bins > tokenizer.vocab_size:
        last = coord.first_token + coord.num_bins - 1
        problem = f"its last bin is token {last}, beyond the vocabulary of {tokenizer.vocab_size}"
        raise UserError("objective.coord", problem, "lower first_token or num_bins")


def _for_this_device(config: RunConfig) -> RunConfig:
    """The config with `train.precision` and `train.compile` decided where they are "auto"."""
    is_cuda = config.train.device != "cpu" and torch.cuda.is_available()
    update: dict[str, Any] = {}
    if config.train.precision == "auto":
        # False: emulated bf16 is slower than fp32.
        has_bf16 = is_cuda and torch.cuda.is_bf16_supported(False)
        update["precision"] = "bf16" if has_bf16 else "fp32"
    if config.train.compile == "auto":
        is_own = config.model.target is None and family_of(config.model).is_own
        update["compile"] = is_cuda and HAS_TRITON and is_own
    return config.model_copy(update={"train": config.train.model_copy(update=update)})


def _check_modalities(config: RunConfig, sources: list[Source]) -> None:
    """Refuse batch sizes for modalities that no stream has: they would change nothing."""
    # A custom target has no streams; nothing is known of a source that is off.
    sources = [source for source in sources if source.table.target is None]
    if not sources or any(source.is_off for source in sources):
        return
    asked = {*config.data.mixing.batch_size_by_modality}
    asked |= {name for source in sources for name in source.table.mixing.batch_size_by_modality or {}}
    known = {stream.modality for source in sources for stream in source.streams}
    if asked - known:
        unknown, there = (", ".join(map(repr, sorted(names))) for names in (asked - known, known))
        problem = f"no stream has the modality {unknown}; there are {there or 'none'}"
        raise UserError("data.mixing.batch_size_by_modality", problem, "remove it, or name one that exists")


def build_model(
    table: ModelTable, vocab_size: int, *, seq_len: int | None = None, parts: Parts = NO_PARTS
) -> nn.Module:
    """The model of `[model]`. A UserError if its target fails, or returns no trainable module.

    Args:
        seq_len: tokens of a cell; a model without `state_width` may take rows of no other length.
        parts: contain the families that the core does not have.
    """
    key, name, target, own = resolve_builder(table, parts)
    given = {"vocab_size": vocab_size, "dim": table.dim, "num_layers": table.num_layers, **own}
    twice = ", ".join(sorted(given.keys() & table.args.keys()))
    if twice:
        fix = "set [model] dim and num_layers; the data say the vocabulary"
        raise UserError("model.args", f"names {twice}, which the run gives itself", fix)
    given |= table.args  # after the check that they name nothing twice
    fix = "see its signature"
    if table.target is None:
        fix = f"it takes {', '.join(inspect.signature(target).parameters)}"
    refuse_arguments(target, name, given, key="model.args", fix=fix)
    with users_code(key, f"{name} fails"):
        model = target(**given)
    width, problem = getattr(model, "state_width", 0), ""
    if not isinstance(model, nn.Module):
        problem = f"a {type(model).__name__}, not a module"
    elif not any(parameter.requires_grad for parameter in model.parameters()):
        problem = "a model without a parameter to train"
    elif not isinstance(width, int) or width < 0:
        problem = f"a model with state_width {width}, not an integer from 0 on"
    if problem:
        fix = "return a trainer.model.protocol.SequenceModel (docs/models.md)"
        raise UserError(key, f"{name} gave {problem}", fix)
    if not hasattr(model, "state_width"):
        fix = "make it forward(tokens, state=None) -> trainer.model.protocol.ModelOutput (docs/models.md); "
        fix += "wrap a model of transformers (docs/models.md#models-of-transformers)"
        models = need(parts.models, key)
        with users_code(key, f"{name} gave a model without state_width, whose forward fails", fix):
            # Run once, to find the structure of its state.
            models.carry_flat(model, lengths=() if seq_len is None else (seq_len,))
    built: nn.Module = model
    return built


def own_loss(target: str, args: Mapping[str, Any], key: str) -> Callable[..., Any]:
    """A custom function with its arguments. A UserError if it does not take them."""
    function = resolve_target(target, key)
    refuse_arguments(function, target, args, key=key)
    return partial(function, **args)


def make_auxiliary(table: ObjectiveTable, model: nn.Module, parts: Parts) -> Auxiliary:
    """The losses and metrics of a model's output. A UserError if a named loss does not exist."""
    declares = getattr(model, "loss_keys", None) or getattr(model, "metric_keys", None)
    if table.components and not table.losses and not declares:
        return Auxiliary()
    key = "objective.losses" if table.losses else "model.target"
    return need(parts.models, key).make_auxiliary(table, model)


def family_of(table: ModelTable) -> Family:
    """The family of a model that is no custom target. A UserError if there is none of this name."""
    name = table.family or DEFAULT
    if name not in FAMILIES:
        fix = f"choose one of {', '.join(FAMILIES)}, or name a target of your own"
        raise UserError("model.family", f"there is no {name!r}", fix)
    return FAMILIES[name]


def resolve_builder(table: ModelTable, parts: Parts) -> tuple[str, str, Any, Mapping[str, Any]]:
    """The model's builder: config key, name in messages, function, and its own arguments."""
    if table.target is not None:
        return "model.target", table.target, resolve_target(table.target, "model.target"), {}
    family, key, builder = family_of(table), "model.family", family_of(table).builder
    path = builder if ":" in builder else need(parts.families.get(builder), key)
    return key, table.family or DEFAULT, resolve_target(path, key), family.args


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
    tracker = MetricsTracker(
        config.metrics,
        num_devices=info.world_size,
        device=device,
        flops_per_token=0.0 if flops is None else flops(config.data.seq_len),
        rank=info.rank,
    )
    return TrainState(
        model=model,
        shards=make_shards(plan, info, model, device, tracker.diagnostics.best_effort),
        optimizer=build_optimizer(model, config.optimizer, plan.parts),
        scaler=torch.amp.GradScaler(device.type, enabled=config.train.precision == "fp16"),
        tracker=tracker,
    )


def make_model(plan: Plan, table: ModelTable | None = None) -> nn.Module:
    """The model of a plan, or of another table, as `[train]` runs it."""
    config = plan.config
    model = build_model(table or config.model, plan.vocab_size, seq_len=config.data.seq_len, parts=plan.parts)
    if config.train.activation_checkpointing == "block":
        need(plan.parts.models, "train.activation_checkpointing").recompute_blocks(model)
    return model


def make_shards(
    plan: Plan, info: RankInfo, model: nn.Module, device: torch.device, guards: Callable[[str], BestEffort]
) -> list[DataShard]:
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
    return [DataShard(shard.rank, make_blend(plan, shard, model, lanes, guards), ledger) for shard, ledger in pairs]


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
    return need(plan.parts.models, "objective.chunk_tokens").in_chunks(plan, model, objective, device)


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
