"""The plan of a run, before the process group starts: sources, checks, how its model is built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config.data_tables import DataTable, ScheduleTable, SourceTable
from trainer.config.rules import Facts, check_rules, data_shards, least_steps, tokens_per_micro
from trainer.config.schema import ModelTable, ObjectiveTable, RunConfig
from trainer.data.documents import IdBounds
from trainer.data.formats import is_import_path
from trainer.data.layout import Stream, discover_direct, discover_nested, refuse_unheeded
from trainer.data.tokenizer import Tokenizer, load_tokenizer, prompt_ids
from trainer.data.weights import ConstantWeight, ScheduledWeight, first_all_zero
from trainer.distributed.env import RankInfo
from trainer.distributed.strategy import Layout, layout_for
from trainer.errors import UserError
from trainer.files import read_json
from trainer.import_path import refuse_arguments, resolve_target, users_code, with_own
from trainer.metrics.logger import get_logger
from trainer.model.families import DEFAULT, FAMILIES, Family
from trainer.model.recurrence import HAS_TRITON
from trainer.objective import Auxiliary
from trainer.training import NO_PARTS, Parts, need
from trainer.training.optimizer import Length, make_schedule

logger = get_logger(__name__)


@dataclass(frozen=True)
class Source:
    """A source of the blend, or a validation set."""

    name: str
    table: SourceTable
    weight: ScheduledWeight
    streams: list[Stream]  # empty for a custom target; perhaps also with weight 0

    @property
    def is_off(self) -> bool:
        """As `SourceTable.is_off`."""
        return self.table.is_off


@dataclass(frozen=True)
class Plan:
    """Everything about a run that needs no process group."""

    config: RunConfig
    sources: list[Source]
    tokenizer: Tokenizer
    facts: Facts
    eval_sources: Sequence[Source] = ()  # the validation sets of `[[eval.source]]`
    parts: Parts = NO_PARTS  # the parts that a run may have beyond the core
    recorded_sets: Mapping[int, int] = field(default_factory=dict)  # of the checkpoint, see `build`
    limits: tuple[int, int] | None = None  # memory, open files: the least of any rank

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
        return weightless(self.config.model, self.vocab_size, self.config, self.parts)


def weightless(table: ModelTable, vocab_size: int, config: RunConfig | None, parts: Parts) -> nn.Module:
    """As `build_model`, without memory for the weights where the model can be built so."""
    build = partial(build_model, table, vocab_size, config=config, parts=parts)
    try:
        with torch.device("meta"):
            return build()
    except UserError:
        # A model that reads its weights while it is built; any other fault shows again.
        with torch.random.fork_rng(devices=[]):
            return build()


def width_of(model: nn.Module) -> int:
    """Numbers in one group's state, as the model declares it."""
    return int(model.state_width)  # type: ignore[arg-type]


def make_plan(config: RunConfig, world_size: int, *, parts: Parts = NO_PARTS) -> Plan:
    """Check the config. `parts` have messages about settings that cannot be meant."""
    # First of all, so that every rank and every check sees the same settings.
    config = _with_read_sizes(_for_this_device(config))
    sources = resolve_sources(config, data_shards(config, world_size))
    facts = check_rules(config, world_size)
    _check_modalities(config, sources)
    eval_sources = resolve_eval_sources(config)
    tokenizer = tokenizer_of(config.data, parts=parts)
    check_reading(sources, eval_sources, tokenizer, config.data.eod)
    resolve_builder(config.model, parts)
    make_schedule(config, Length.of(config, facts.tokens_per_micro))
    _check_tokens(config, tokenizer)
    if config.eval.target is not None:
        given = ("model", "tokenizer", "step", "device", "rank", "world_size")
        own_function("eval", config.eval.target, config.eval.args, given)
    if config.objective.target is not None:
        fix = "name what makes the loss, a function of output and targets"
        own_function("objective", config.objective.target, config.objective.args, fix=fix)
    plan = Plan(config, sources, tokenizer, facts, eval_sources, parts)
    if parts.messages is not None:
        parts.messages.planned(plan)
    return plan


def resolve_sources(config: RunConfig, num_shards: int) -> list[Source]:
    """Every source, with its weight and streams."""
    sources = [source_of(table) for table in config.data.source]
    micro_tokens = tokens_per_micro(config, num_shards)
    batches = config.micro_batches
    num_batches = batches.batches_before(least_steps(config, micro_tokens) + 1)
    # A gap would end the run, perhaps after days.
    gap = first_all_zero([source.weight for source in sources], batches, num_batches)
    if gap is not None:
        problem = f"all weights are zero at batch {gap}, of {num_batches} that a data shard has"
        raise UserError("data.source", problem, "give a source a weight above 0 there")
    return sources


def resolve_eval_sources(config: RunConfig) -> list[Source]:
    """The validation sets of `[[eval.source]]`."""
    tables = {each.name: each.as_source() for each in config.eval.source}
    weight = ConstantWeight(1.0)
    return [Source(name, each, weight, _streams(each, f"eval source {name}")) for name, each in tables.items()]


def source_of(table: SourceTable) -> Source:
    """A source, with its weight and streams. Raises UserError: no files, unless it is off."""
    assert table.include is None, "load_config replaces it"
    name, weight = table.name, table.weight
    spec: ScheduledWeight
    if isinstance(weight, ScheduleTable):
        spec = ScheduledWeight(weight.schedule, weight.points, scale=weight.scale, unit=weight.unit)
    else:
        spec = ConstantWeight(float(weight))
    try:
        return Source(name, table, spec, _streams(table, f"source {name}"))
    except UserError:
        off = Source(name, table, spec, [])
        if not off.is_off:  # whose data may be gone
            raise
        return off


def _streams(table: SourceTable, name: str) -> list[Stream]:
    """The streams of a source, called `name` in messages."""
    root, paths = table.root, table.paths
    key, given = f"{name}: paths", paths or []
    if root is not None:
        key, given = f"{name}: root", [root]
    for url in [each for each in given if "://" in each]:
        fix = "mount the store, or copy the data to a disk first (docs/mixing.md)"
        raise UserError(key, f"{url} is a URL, and data is read from files", fix)
    try:
        if root is not None:
            return discover_nested(root, table.modalities, format=table.format)
        return discover_direct(paths, format=table.format) if paths is not None else []
    except UserError as error:
        raise UserError(key, f"{error.key}: {error.problem}", error.fix) from None


def check_reading(
    sources: Sequence[Source], eval_sources: Sequence[Source], tokenizer: Tokenizer, eod: int | None
) -> None:
    """Refuse formats that cannot be imported, options without effect, and an `eod` out of range."""
    if eod is not None:
        IdBounds.of("data", tokenizer).check_eod(eod, "data.eod")
    named = [(f"source {source.name}", source) for source in sources]
    named += [(f"eval source {source.name}", source) for source in eval_sources]
    for name, source in named:
        table = source.table
        given = {key: getattr(table, key) for key in ("dtype", "eod", "text_split", "column", "loss_mask")}
        if is_import_path(table.format):
            resolve_target(table.format, f"{name}: format")
        refuse_unheeded(source.streams, table.format, given, source=name)
        # A custom format's function decides what eod means.
        if table.eod is not None and not is_import_path(table.format):
            IdBounds.of(name, tokenizer).check_eod(table.eod, f"{name}: eod")


def tokenizer_of(data: DataTable, *, parts: Parts) -> Tokenizer:
    """The tokenizer of `[data]`, or what reads numbers."""
    if data.features:
        return need(parts.data, "data.features").Series(data)
    if not data.tokenizer.endswith(".json"):
        return load_tokenizer(data.tokenizer, vocab_size=data.vocab_size)
    how: dict[str, Any] = data.model_dump(include={"vocab_size", "parse_special", "eod"})
    return need(parts.data, "data.tokenizer").load_tokenizer(data.tokenizer, **how)


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


def _with_read_sizes(config: RunConfig) -> RunConfig:
    """The config with the sizes of a model that is read (`from`), for the record."""
    table, found = config.model, dict[str, Any]()
    if table.target is None and isinstance(table.args.get("from"), str):
        with suppress(OSError, ValueError):  # refused where the model is built
            found = read_json(Path(table.args["from"], "config.json"))
    names = {"dim": "hidden_size", "num_layers": "num_hidden_layers"}
    read = {name: found[key] for name, key in names.items() if key in found}
    return config.model_copy(update={"model": table.model_copy(update=read)})


def _check_modalities(config: RunConfig, sources: list[Source]) -> None:
    """Refuse batch sizes for modalities that no stream has: they would change nothing."""
    # A custom target has no streams; nothing is known of a source that is off.
    sources = [source for source in sources if source.table.target is None]
    if not sources or any(source.is_off for source in sources):
        return
    known = {stream.modality for source in sources for stream in source.streams}
    asked = {"data.mixing.": config.data.mixing.batch_size_by_modality}
    for source in sources:
        asked[f"source {source.name}: mixing."] = source.table.mixing.batch_size_by_modality or {}
    for table, sizes in asked.items():
        if sizes.keys() - known:
            unknown, there = (", ".join(map(repr, sorted(names))) for names in (sizes.keys() - known, known))
            problem = f"no stream has the modality {unknown}; there are {there or 'none'}"
            raise UserError(f"{table}batch_size_by_modality", problem, "remove it, or name one that exists")


def build_model(
    table: ModelTable, vocab_size: int, *, config: RunConfig | None = None, parts: Parts = NO_PARTS
) -> nn.Module:
    """The model of `[model]`. A UserError if its target fails, or returns no trainable module.

    Args:
        config: says what is read; a model without `state_width` may take nothing else.
        parts: contain the families that the core does not have.
    """
    key, name, target, own = resolve_builder(table, parts)
    given = {"vocab_size": vocab_size, "dim": table.dim, "num_layers": table.num_layers, **own}
    given = with_own(given, table.args, "model.args", "set [model] dim and num_layers; the data say the vocabulary")
    fix = "see its signature"
    if table.target is None:
        fix = f"it takes {', '.join(inspect.signature(target).parameters)}"
    refuse_arguments(target, name, given, key="model.args", fix=fix)
    with users_code(key, f"{name} fails"):
        model, problem = target(**given), ""
        width = getattr(model, "state_width", 0)
    if not isinstance(model, nn.Module):
        problem = f"a {type(model).__name__}, not a module"
    elif not any(parameter.requires_grad for parameter in model.parameters()):
        problem = "a model without a parameter to train"
    elif any(isinstance(parameter, nn.UninitializedParameter) for parameter in model.parameters()):
        problem = "a model with parameters that have no shape yet"
    elif not isinstance(width, Integral) or width < 0:
        problem = f"a model with state_width {width!r}, not an integer from 0 on"
    if problem:
        fix = "return a trainer.model.protocol.SequenceModel (docs/models.md)"
        raise UserError(key, f"{name} gave {problem}", fix)
    if not hasattr(model, "state_width"):
        fix = "make it forward(tokens, state=None) -> trainer.model.protocol.ModelOutput (docs/models.md); "
        fix += "wrap a model of transformers (docs/models.md#models-of-transformers)"
        models = need(parts.models, key)
        with users_code(key, f"{name} gave a model without state_width, whose forward fails", fix):
            # Run once, to find the structure of its state.
            models.carry_flat(model, config=config, vocab_size=vocab_size)
    built: nn.Module = model
    return built


def own_function(
    table: str, target: str, args: Mapping[str, Any], given: Sequence[str] = (), fix: str = "see its signature"
) -> Callable[..., Any]:
    """A function of the user's own, with its `args`; each call gives it those `given`, too. A
    UserError if it takes others."""
    function = resolve_target(target, f"{table}.target")
    called = with_own(dict.fromkeys(given), args, f"{table}.args")
    refuse_arguments(function, target, called, key=f"{table}.target", fix=fix)
    return partial(function, **args)


def make_auxiliary(table: ObjectiveTable, model: nn.Module, parts: Parts) -> Auxiliary:
    """The losses and metrics of a model's output. A UserError if a named loss does not exist."""
    declares = getattr(model, "loss_keys", None) or getattr(model, "metric_keys", None)
    if table.components and not table.losses and not declares:
        return Auxiliary()
    key = "objective.losses" if table.losses else "model.target"
    if not declares and not table.components:
        key = "objective.token_ce"
    return need(parts.models, key).make_auxiliary(table, model)


def family_of(table: ModelTable) -> Family:
    """The family of a model that is no custom target. A UserError if there is none of this name."""
    name = table.family or DEFAULT
    if name not in FAMILIES:
        fix = f"choose one of {', '.join(FAMILIES)}, or name a target of your own"
        raise UserError("model.family", f"there is no {name!r}", fix)
    return FAMILIES[name]


def resolve_builder(table: ModelTable, parts: Parts) -> tuple[str, str, Any, Mapping[str, Any]]:
    """The model's builder: config key, name in messages, function, and its own arguments.

    A UserError if there is none, or it cannot be imported.
    """
    if table.target is not None:
        return "model.target", table.target, resolve_target(table.target, "model.target"), {}
    family, key = family_of(table), "model.family"
    path = family.builder if ":" in family.builder else need(parts.families.get(family.builder), key)
    return key, table.family or DEFAULT, resolve_target(path, key), family.args
