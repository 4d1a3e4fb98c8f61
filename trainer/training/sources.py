"""The sources of the blend, resolved before the process group starts, and their data sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from trainer.config.data_tables import ScheduleTable, SourceTable, Weight
from trainer.config.load import load_dataset_file
from trainer.config.rules import largest_batch, least_steps, mixing_of, reads_lanes, tokens_per_micro
from trainer.config.schema import LedgerTable, RunConfig
from trainer.data.blend import BlendDataset, BlendSource, UnreadSource
from trainer.data.documents import IdBounds, ReadOptions
from trainer.data.formats import is_import_path
from trainer.data.groups import CutOptions
from trainer.data.lanes import (
    LaneBlend,
    LaneLimit,
    count_documents,
    document_limits,
    documents_drawn_from,
    num_sets,
    streams_open,
)
from trainer.data.layout import Stream, discover_direct, discover_nested, refuse_unheeded
from trainer.data.mixing import MixOptions, StreamMixingDataset
from trainer.data.shard_source import ShardSource, StreamSource
from trainer.data.tokenizer import Tokenizer
from trainer.data.weights import ConstantWeight, ScheduledWeight, WeightSpec, compose_weights, first_all_zero
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.files import allow_open_files, is_url
from trainer.import_path import resolve_target
from trainer.metrics.best_effort import BestEffort
from trainer.on_device import memory_of
from trainer.training import need
from trainer.wording import counted

if TYPE_CHECKING:
    from trainer.training.plan import Plan

MAX_INCLUDE_DEPTH = 16
LANE_SETS = "lane_sets"  # in state.json: by the micro-batches of a step
STATES_SHARE = 1 / 16  # of the memory, for the states of all lanes


@dataclass(frozen=True)
class Source:
    """One leaf of the blend."""

    name: str  # names of the enclosing sources and its own, joined by `.`
    table: SourceTable
    weight: WeightSpec
    streams: list[Stream]  # empty for a custom target; perhaps also with weight 0

    @property
    def is_off(self) -> bool:
        """Whether its weight is always 0, so that nothing of it is read."""
        return self.weight.zero_from() == 0


def resolve_sources(config: RunConfig, config_path: Path, num_shards: int) -> list[Source]:
    """Every leaf source, with its weight and streams."""
    including = (config_path.resolve(),)
    leaves = [*_leaves(config.data.source, config_path, "", ConstantWeight(1.0), including)]
    micro_tokens = tokens_per_micro(config, leaf_tables(leaves), num_shards)
    batches = config.micro_batches
    num_batches = batches.batches_before(least_steps(config, micro_tokens) + 1)
    # A gap would end the run, perhaps after days.
    weights = [leaf.weight for leaf in leaves]
    gap = first_all_zero(weights, batches, num_batches)
    if gap is not None:
        problem = f"all weights are zero from batch {gap} on (the run has {num_batches} batches a rank)"
        raise UserError("data.source.weight", problem, "give a source a weight above 0 there")
    return leaves


def resolve_eval_sources(config: RunConfig) -> list[Source]:
    """The validation sets of `[[eval.source]]`."""
    tables = {each.name: each.as_source() for each in config.eval.source}
    weight = ConstantWeight(1.0)
    return [Source(name, each, weight, _streams(each, f"eval source {name}")) for name, each in tables.items()]


def leaf_tables(sources: list[Source]) -> list[SourceTable]:
    """The tables of the leaves under their full names, for the rules of the config."""
    return [source.table.model_copy(update={"name": source.name}) for source in sources]


def _leaves(
    tables: list[SourceTable], path: Path, prefix: str, outer: WeightSpec, including: tuple[Path, ...]
) -> Iterator[Source]:
    """The leaves of the tables in a file `path`, whose weights are multiplied by `outer`."""
    for table in tables:
        name = f"{prefix}{table.name}"
        own = weight_spec(table.weight, f"{name}.weight")
        above = f"the weight of {prefix.rstrip('.')}"
        weight = compose_weights(outer, own, path_a=above, path_b=f"{name}.weight")
        if table.include is None:
            leaf = Source(name, table, weight, [])
            try:
                # `located` knows the line of a mistake in the config itself.
                file = str(path) if prefix else ""
                leaf = replace(leaf, streams=_streams(table, f"source {name}", file=file))
            except UserError:
                if not leaf.is_off:  # whose data may be gone
                    raise
            yield leaf
            continue
        included = path.parent / table.include
        if included.resolve() in including or len(including) > MAX_INCLUDE_DEPTH:
            problem = f"{table.include} includes itself"
            raise UserError(f"{name}.include", problem, "break the circle", where=str(path))
        nested = load_dataset_file(included).source
        yield from _leaves(nested, included, f"{name}.", weight, (*including, included.resolve()))


def weight_spec(weight: Weight, path: str) -> WeightSpec:
    """A config's weight as the value that the blend evaluates."""
    if isinstance(weight, ScheduleTable):
        return ScheduledWeight(weight.schedule, weight.points, scale=weight.scale, unit=weight.unit, path=path)
    return ConstantWeight(float(weight), path)


def _streams(table: SourceTable, name: str, *, file: str = "") -> list[Stream]:
    """The streams of a source, called `name` in messages. `file`: an included file that it is in."""
    root, paths = table.root, table.paths
    key, given = f"{name}: paths", paths or []
    if root is not None:
        key, given = f"{name}: root", [root]
    for url in filter(is_url, given):
        fix = "mount the store, or copy the data to a disk first (docs/mixing.md)"
        raise UserError(key, f"{url} is a URL, and data is read from files", fix, where=file)
    try:
        if root is not None:
            return discover_nested(root, table.modalities, format=table.format)
        return discover_direct(paths, format=table.format) if paths is not None else []
    except UserError as error:
        raise UserError(key, f"{error.key}: {error.problem}", error.fix, where=file) from None


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
        given = {name: getattr(table, name) for name in ("dtype", "eod", "text_split", "column")}
        if is_import_path(table.format):
            resolve_target(table.format, "format")
        refuse_unheeded(source.streams, table.format, given, source=name)
        # A custom format's function decides what eod means.
        if table.eod is not None and not is_import_path(table.format):
            IdBounds.of(name, tokenizer).check_eod(table.eod, f"{name}: eod")


def evaluated_rows(plan: Plan) -> int:
    """Rows of a micro-batch of an evaluation: those of the largest one that is trained on."""
    tables = [plan.config.data.mixing, *(mixing_of(plan.config, source.table) for source in plan.sources)]
    return max(map(largest_batch, tables))


def state_bytes(table: LedgerTable, state_width: int) -> int:
    """Memory of one state."""
    return state_width * (2 if table.dtype == "bfloat16" else 4)


class Lanes(NamedTuple):
    """The lanes of full rows."""

    sets: dict[int, int]  # of B lanes each, by the micro-batches of a step; empty: rows are not full
    reason: str = ""  # why there are no more
    documents: float = 0.0  # to draw from; see `documents_drawn_from`

    def words(self, rows: int) -> str:
        """For people."""
        texts = []
        for m, number in sorted(self.sets.items()):
            text = f"{counted(number, 'set')} of {rows} lanes per data shard"
            if number >= m:
                text += f": the next row of a document comes {counted(number // m, 'step')} later"
            else:
                text += f": the {m} micro-batches of a step continue each other's documents, "
                text += "which biases its gradient; the noise scale can compare ranks alone"
            texts.append(f"with m = {m} {text}" if len(self.sets) > 1 else text)
        text = "; ".join(texts)
        return f"{text} ({self.reason})" if self.reason else text

    def num(self, rows: int) -> int:
        """Lanes of a data shard at most."""
        return max(self.sets.values(), default=0) * rows


def plan_lanes(plan: Plan, state_width: int, device: torch.device) -> Lanes:
    """How many sets of lanes each data shard has. A UserError if a file is damaged."""
    config, facts = plan.config, plan.facts
    if not reads_lanes(config):
        return Lanes({})
    own = [source for source in plan.sources if source.streams and not source.is_off]
    if not own:  # data sets of the user's own alone
        return Lanes({})
    shares = _largest_shares([source.weight for source in own])
    documents = {each.name: count_documents(each.streams, *reading(plan, each)[:2]) for each in own}
    by_name = dict(zip(documents, shares, strict=True))
    limits = document_limits(documents, by_name, facts.data_shards)
    if state_width:
        needed = state_bytes(config.ledger, state_width) * facts.shards_per_rank
        memory = STATES_SHARE * memory_of(device)
        reason = f"a lane's state takes {needed / 1e6:.3g} MB, and {memory / 1e6:,.0f} MB are for states"
        limits.append(LaneLimit(memory / needed, reason))
    # A lane's document; and of each source the streams that are open, and a cache of twice as many.
    files = allow_open_files()
    handles = (1 + 3 * len(own)) * facts.shards_per_rank
    limits.append(LaneLimit(0.8 * files / handles, f"a process may have {files:,} files open"))
    if config.ledger.capacity:
        limits.append(LaneLimit(config.ledger.capacity, f"ledger.capacity is {config.ledger.capacity:,}"))
    found, why = dict(plan.lane_sets), ""
    if found:
        why = "as in the checkpoint"
    for m in {m for _, m in config.micro_batches.points} - found.keys():
        found[m], reason = num_sets(m, config.data.mixing.batch_size, config.data.mixing.spread, limits)
        why = why or reason
    return Lanes(found, why, documents_drawn_from(documents, by_name))


def recorded_sets(plan: Plan, saved: Mapping[str, Any] | None) -> dict[int, int]:
    """The sets of lanes of a checkpoint that was made with the same settings; {} if there is none.

    Another machine has another memory, and may open other numbers of files: it must not count anew.
    """
    if saved is None or saved["data_shards"] != plan.facts.data_shards:
        return {}
    now, before = plan.config.model_dump(mode="json"), saved["config"]
    pairs = [(each["data"]["mixing"], each["train"]["micro_batches"], each["ledger"]) for each in (now, before)]
    return dict(saved.get(LANE_SETS, ())) if pairs[0] == pairs[1] else {}


def _largest_shares(weights: Sequence[WeightSpec]) -> list[float]:
    """The largest share that each source has at any point of a schedule."""
    points = np.array(sorted({x for weight in weights for x in weight.points}), np.int64)
    at = np.array([weight.evaluate_many(points) for weight in weights])
    sums = at.sum(axis=0)
    largest: list[float] = np.divide(at, sums, out=np.zeros_like(at), where=sums > 0).max(axis=1).tolist()
    return largest


def make_dataset(plan: Plan, source: Source, info: RankInfo, lanes: int = 0) -> StreamSource:
    """The training part of a source, for so many lanes."""
    kind = ShardSource if reads_lanes(plan.config) else StreamMixingDataset
    cut, read, mix = reading(plan, source)
    if lanes and not mix.num_streams_mixed:
        mix = replace(mix, num_streams_mixed=streams_open(source.streams, lanes, read))
    return kind(source.streams, cut, read, mix, shard=info.rank, num_shards=info.world_size)


def make_held_out(plan: Plan, source: Source, info: RankInfo, *, is_whole: bool = False, **options: Any) -> ShardSource:
    """The held-out documents of a source, or (`is_whole`) all, read once."""
    how = reading(plan, source, is_holdout=True, is_whole=is_whole)
    return ShardSource(source.streams, *how, shard=info.rank, num_shards=info.world_size, **options)


def reading(
    plan: Plan, source: Source, *, is_holdout: bool = False, is_whole: bool = False
) -> tuple[CutOptions, ReadOptions, MixOptions]:
    """How a source is cut, read and mixed; see `make_dataset` and `make_held_out`."""
    config, data = plan.config, plan.config.data
    mix = MixOptions.of(mixing_of(config, source.table), seed=config.run.seed)
    cut = CutOptions(source.name, data.seq_len, data.max_group_cells, "train", config.eval.holdout_fraction)
    if is_holdout:  # evaluations read each document once and whole
        mix, cut = replace(mix, repeat=False), replace(cut, max_group_cells=0, split="holdout")
    if is_whole:  # validation sets are read as they are
        cut = replace(cut, split="train", holdout_fraction=0.0)
    return cut, ReadOptions.of(source.table, tokenizer=plan.tokenizer, text_eod=data.eod), mix


def runs_on(plan: Plan, model: nn.Module | None) -> bool:
    """Whether documents begin within rows. A `model` of None is built, if it decides."""
    align = plan.config.data.align
    if align == "auto" and reads_lanes(plan.config):
        return bool(getattr(model or plan.weightless_model(), "resets_in_one_pass", False))
    return align == "stream"


def make_blend(
    plan: Plan,
    info: RankInfo,
    model: nn.Module | None = None,
    lanes: Lanes = Lanes({}),  # noqa: B008 - immutable
    guards: Callable[[str], BestEffort] = BestEffort,
) -> BlendDataset:
    """All sources, mixed by their weights. `model`: see `runs_on`."""
    blended, num_lanes = [], lanes.num(plan.config.data.mixing.batch_size)
    for source in plan.sources:
        if source.is_off:
            dataset: Any = UnreadSource()  # keeps its place in the states of the blend
        elif source.table.target is None:  # files, read by the core
            dataset = make_dataset(plan, source, info, num_lanes)
        else:
            dataset = need(plan.parts.data, f"source {source.name}: target").own_batches(plan, source, info)
        blended.append(BlendSource(source.name, dataset, source.weight))
    config = plan.config
    options: dict[str, Any] = {
        "seed": config.run.seed,
        "micro_batches": config.micro_batches,
        "per_source": config.metrics.per_source,
        "times": True,
        "guards": guards,
    }
    if not reads_lanes(config):
        return BlendDataset(blended, **options)
    return LaneBlend(
        blended,
        rows=config.data.mixing.batch_size,
        row_tokens=config.data.seq_len,
        runs_on=runs_on(plan, model),
        tokenizer=plan.tokenizer,
        lane_sets=lanes.sets,
        documents=lanes.documents,
        **options,
    )
