"""The sources of the blend: resolved before the process group starts, and the data sets that read them, made by each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from trainer.config.data_tables import DataTable, ScheduleTable, SourceTable, Weight
from trainer.config.load import load_dataset_file
from trainer.config.rules import largest_batch, least_steps, mixing_of, reads_lanes, tokens_per_micro
from trainer.config.schema import RunConfig
from trainer.data.blend import BlendDataset, BlendSource, UnreadSource
from trainer.data.documents import IdBounds, ReadOptions
from trainer.data.formats import is_import_path
from trainer.data.groups import CutOptions
from trainer.data.lanes import LaneBlend
from trainer.data.layout import Stream, discover_direct, discover_nested, refuse_unheeded
from trainer.data.mixing import MixOptions, StreamMixingDataset
from trainer.data.shard_source import ShardSource, StreamSource
from trainer.data.tokenizer import Tokenizer
from trainer.data.weights import ConstantWeight, ScheduledWeight, WeightSpec, compose_weights, first_all_zero
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.files import did_you_mean, is_url
from trainer.import_path import NO_PARTS, Parts, refuse_arguments, resolve_target, users_code

if TYPE_CHECKING:
    from trainer.training.setup.plan import Plan

MAX_INCLUDE_DEPTH = 16
Stores = Callable[[], tuple[Any, Any]]
"""What gives the reader of sources that are URLs, and its cache."""


@dataclass(frozen=True)
class Source:
    """One leaf of the blend."""

    name: str
    """Names on the way down, joined by `.`."""
    table: SourceTable
    weight: WeightSpec
    streams: list[Stream]
    """Empty for a target; of weight 0, perhaps too."""
    copies: tuple[Any, ...] = ()
    """Local copies of what URLs name; they stay while this exists."""
    tokens: Any = None
    """What its streams' `tokens` lie in, likewise."""

    @property
    def is_off(self) -> bool:
        """Whether its weight is 0 from beginning to end: nothing of it is read."""
        return self.weight.zero_from() == 0


def resolve_sources(config: RunConfig, config_path: Path, num_shards: int, parts: Parts = NO_PARTS) -> list[Source]:
    """Every leaf source, with its weight and streams.

    Raises:
        UserError: an included file has mistakes or includes itself, two schedules lie on one path, a source has no
            streams, or all weights are zero at some time of the run.
    """
    stores, including = partial(_stores, config.data, parts), (config_path.resolve(),)
    leaves = [*_leaves(config.data.source, config_path, "", ConstantWeight(1.0), including, stores)]
    micro_tokens = tokens_per_micro(config, leaf_tables(leaves), num_shards)
    _refuse_unknown_steps(config, leaves)
    # What `auto` may come to: a gap would end the run. A length in tokens has the same number of batches for every m.
    batches = (config.micro_batches if config.train.tokens else config.micro_batches.fastest()).by_steps(micro_tokens)
    num_batches = batches.batches_before(least_steps(config, micro_tokens) + 1)
    gap = first_all_zero([leaf.weight for leaf in leaves], micro_batches=batches, num_batches=num_batches)
    if gap is not None:
        first, last = gap
        until = "the end" if last is None or last >= num_batches - 1 else f"batch {last}"
        problem = f"all weights are zero from batch {first} to {until} (the run has {num_batches} batches a rank)"
        raise UserError("data.source.weight", problem, "give a source a weight above 0 there")
    return leaves


def resolve_eval_sources(config: RunConfig, parts: Parts = NO_PARTS) -> list[Source]:
    """The validation sets of `[[eval.source]]`, with their streams.

    Raises:
        UserError: a set has no streams.
    """
    tables, stores = [each.as_source() for each in config.eval.source], partial(_stores, config.data, parts)
    return [
        Source(table.name, table, ConstantWeight(1.0), *_streams(table, f"eval source {table.name}", stores))
        for table in tables
    ]


def _refuse_unknown_steps(config: RunConfig, leaves: list[Source]) -> None:
    """Refuse weights by step where nobody knows ahead which step a micro-batch will belong to.

    The loader reads ahead, and the batch that it reads must not depend on how far.
    """
    by_step = next((leaf.name for leaf in leaves if leaf.weight.unit == "step"), None)
    if by_step is None or config.micro_batches.is_known_ahead:
        return
    is_auto = config.micro_batches.auto is not None
    planned = '"auto"' if is_auto else 'a schedule with unit = "tokens"'
    problem = f"source {by_step} has a weight by steps, and with {planned} nobody knows ahead which step a batch is of"
    fix = 'give that weight unit = "batch"' + ("" if is_auto else ', or micro_batches unit = "steps"')
    raise UserError("train.micro_batches", problem, fix)


def leaf_tables(sources: list[Source]) -> list[SourceTable]:
    """The tables of the leaves under their full names, as the rules of the config want them."""
    return [source.table.model_copy(update={"name": source.name}) for source in sources]


def _leaves(
    tables: list[SourceTable], path: Path, prefix: str, outer: WeightSpec, including: tuple[Path, ...], stores: Stores
) -> Iterator[Source]:
    """The leaves of the tables in a file `path`, whose weights are multiplied with `outer`."""
    for table in tables:
        name = f"{prefix}{table.name}"
        own = weight_spec(table.weight, f"{name}.weight")
        weight = compose_weights(outer, own, path_a=f"the weight of {prefix.rstrip('.')}", path_b=f"{name}.weight")
        if table.include is None:
            leaf = Source(name, table, weight, [])
            try:
                file = str(path) if prefix else ""  # of the config itself, `located` knows the line
                streams, copies = _streams(table, f"source {name}", stores, file=file)
                leaf = replace(leaf, streams=streams, copies=copies)
            except UserError:
                if not leaf.is_off:  # whose data may be gone
                    raise
            yield leaf
            continue
        included = path.parent / table.include
        if included.resolve() in including or len(including) > MAX_INCLUDE_DEPTH:
            raise UserError(f"{name}.include", f"{table.include} includes itself", "break the circle", where=str(path))
        nested = load_dataset_file(included).source
        yield from _leaves(nested, included, f"{name}.", weight, (*including, included.resolve()), stores)


def weight_spec(weight: Weight, path: str) -> WeightSpec:
    """A config's weight as the value that the blend evaluates."""
    if isinstance(weight, ScheduleTable):
        return ScheduledWeight(weight.schedule, weight.points, scale=weight.scale, unit=weight.unit, path=path)
    return ConstantWeight(float(weight), path)


def _streams(
    table: SourceTable, source: str, stores: Stores, *, file: str = ""
) -> tuple[list[Stream], tuple[Any, ...]]:
    """The streams of a source, which messages name `source`, and the local copies of what URLs name. `file`: an included file
    that it is in."""
    key = f"{source}: {'paths' if table.root is None else 'root'}"
    try:
        if table.root is not None and is_url(table.root):
            reader, cache = stores()
            streams, copy = reader.stored_nested(table.root, table.modalities, format=table.format, cache=cache)
            return streams, (copy,)
        if table.root is not None:
            return discover_nested(table.root, table.modalities, format=table.format), ()
        if table.paths is not None and any(map(is_url, table.paths)):
            reader, cache = stores()
            found: tuple[list[Stream], tuple[Any, ...]]
            found = reader.stored_direct(table.paths, format=table.format, cache=cache)
            return found
        if table.paths is not None:
            return discover_direct(table.paths, format=table.format), ()
    except UserError as error:
        problem, fix = error.problem if error.key == "paths" else f"{error.key}: {error.problem}", error.fix
        if table.root is not None and not is_url(table.root) and not Path(table.root).exists():
            made = f"make it (train data build pytext --out {table.root}, or train data build text), or set root to your data"
            fix = did_you_mean(str(table.root)) or made
        raise UserError(key, problem, fix, where=file) from None
    return [], ()


def _stores(data: DataTable, parts: Parts) -> tuple[Any, Any]:
    reader = parts.need("sources in a store", "paths")
    return reader, reader.Cache(data.cache_dir)


def check_reading(
    sources: Sequence[Source], eval_sources: Sequence[Source], tokenizer: Tokenizer, eod: int | None
) -> None:
    """Refuse options of sources that change nothing, or cannot be right.

    Raises:
        UserError: a format of the user's own cannot be imported; no file of a source heeds `dtype`, `eod`, `text_split` or
            `column`; or an `eod` is outside the vocabulary.
    """
    if eod is not None:
        IdBounds.of("data", tokenizer).check_eod(eod, "data.eod")
    named = [(f"source {source.name}", source) for source in sources]
    named += [(f"eval source {source.name}", source) for source in eval_sources]
    for name, source in named:
        table = source.table
        given = {"dtype": table.dtype, "eod": table.eod, "text_split": table.text_split, "column": table.column}
        if is_import_path(table.format):
            resolve_target(table.format, "format")
        refuse_unheeded(source.streams, table.format, given, source=name)
        # In a format of the user's own, eod means what its function makes of it.
        if table.eod is not None and not is_import_path(table.format):
            IdBounds.of(name, tokenizer).check_eod(table.eod, f"{name}: eod")


def evaluated_rows(plan: Plan) -> int:
    """Rows of a micro-batch of an evaluation: as many as the largest has that is trained on."""
    tables = [source.table for source in plan.sources]
    return max(map(largest_batch, [plan.config.data.mixing, *(mixing_of(plan.config, table) for table in tables)]))


def make_dataset(plan: Plan, source: Source, info: RankInfo) -> StreamSource:
    """The training part of a source."""
    kind = ShardSource if reads_lanes(plan.config) else StreamMixingDataset
    return kind(source.streams, *reading(plan, source), shard=info.rank, num_shards=info.world_size)


def make_held_out(plan: Plan, source: Source, info: RankInfo, *, is_whole: bool = False, **options: Any) -> ShardSource:
    """What is evaluated on of a source, read once: the held-out documents, or (`is_whole`) all. `options`: of `ShardSource`."""
    how = reading(plan, source, is_holdout=True, is_whole=is_whole)
    return ShardSource(source.streams, *how, shard=info.rank, num_shards=info.world_size, **options)


def reading(
    plan: Plan, source: Source, *, is_holdout: bool = False, is_whole: bool = False
) -> tuple[CutOptions, ReadOptions, MixOptions]:
    """How a source is cut, read and mixed; see `make_dataset` and `make_held_out`."""
    config = plan.config
    mix = MixOptions.of(mixing_of(config, source.table), seed=config.run.seed)
    cut = CutOptions(source.name, config.row_tokens, config.max_group_rows, "train", config.eval.holdout_fraction)
    if is_holdout:  # evaluations run cell by cell, once
        mix = replace(mix, repeat=False)
        cut = replace(cut, seq_len=config.data.seq_len, max_group_cells=config.data.max_group_cells, split="holdout")
    if is_whole:
        cut = replace(cut, split="train", holdout_fraction=0.0)
    return cut, ReadOptions.of(source.table, tokenizer=plan.tokenizer, text_eod=config.data.eod), mix


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
    config = plan.config
    options: dict[str, Any] = {
        "seed": config.run.seed,
        "micro_batches": config.micro_batches,
        "per_source": config.metrics.per_source,
        "times": True,
        "history_every": config.ledger.probe_every,
        "history_tokens": config.ledger.probe_cells * config.row_tokens,
    }
    if not reads_lanes(config):
        return BlendDataset(blended, **options)
    return LaneBlend(
        blended,
        rows=config.data.mixing.batch_size,
        row_tokens=config.row_tokens,
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
