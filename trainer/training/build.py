"""What is made from a plan: the data, the model, and everything else that has a state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from trainer.config.rules import largest_batch, mixing_of, reads_lanes
from trainer.config.schema import LedgerTable, ModelTable, RunConfig
from trainer.data.blend import BlendDataset, BlendSource, UnreadSource
from trainer.data.documents import ReadOptions
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
from trainer.data.shard_source import MixOptions, ShardSource, StreamSource
from trainer.data.weights import ScheduledWeight, positions
from trainer.distributed.env import RankInfo
from trainer.distributed.strategy import Replicated, Strategy
from trainer.errors import UserError
from trainer.files import allow_open_files
from trainer.import_path import users_code
from trainer.ledger.ledger import Ledger
from trainer.metrics.best_effort import BestEffort
from trainer.metrics.logger import get_logger
from trainer.metrics.tracker import MetricsTracker
from trainer.model.protocol import parameter_roles
from trainer.objective import Loss, Objective
from trainer.on_device import memory_of
from trainer.options import MicroBatches
from trainer.training import need
from trainer.training.optimizer import build_optimizer
from trainer.training.plan import Plan, Source, build_model, own_function, width_of
from trainer.training.train_state import DataShard, TrainState
from trainer.wording import counted

logger = get_logger(__name__)
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16}
LANE_SETS = "lane_sets"  # in state.json: by the micro-batches of a step
STATES_SHARE = 1 / 16  # of the memory, for the states of all lanes


def make_state(plan: Plan, info: RankInfo, device: torch.device, strategy: Strategy | None = None) -> TrainState:
    """Everything that has a state on this rank, before the first step and without the noise scale.

    Without a `strategy`, every rank has all parameters. A UserError if a custom part is unusable.
    """
    config = plan.config
    torch.manual_seed(config.run.seed)  # the same weights on every rank
    model = make_model(plan)
    roles = parameter_roles(model)
    # Before the parameters get their memory on the device.
    (strategy or Strategy()).shard(model)
    model = model.to(device)
    flops_of, flops = getattr(model, "flops_per_token", None), 0.0  # for MFU; a custom model need not say
    if flops_of is not None:
        with users_code("model.target", "its flops_per_token(seq_len) fails"):
            flops = float(flops_of(config.data.seq_len))
    tracker = MetricsTracker(
        config.metrics,
        num_devices=info.world_size,
        device=device,
        flops_per_token=flops,
        rank=info.rank,
    )
    return TrainState(
        model=model,
        shards=make_shards(plan, info, model, device, tracker.diagnostics.best_effort),
        optimizer=build_optimizer(model, config.optimizer, plan.parts, roles),
        tracker=tracker,
    )


def make_model(plan: Plan, table: ModelTable | None = None) -> nn.Module:
    """The model of a plan, or of another table, as `[train]` runs it."""
    config = plan.config
    model = build_model(table or config.model, plan.vocab_size, config=config, parts=plan.parts)
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
        say = (logger.info, logger.warning)[any(number < m for m, number in lanes.sets.items())]
        say("full rows: %s", lanes.words(rows))
        options = options.model_copy(update={"capacity": options.capacity or lanes.num(rows)})
    ledgers: list[Ledger | None] = [None] * len(shards)
    if width:
        ledgers = [Ledger(options, state_width=width, device=device) for _ in shards]
    pairs = zip(shards, ledgers, strict=True)
    return [DataShard(shard.rank, make_blend(plan, shard, model, lanes, guards), ledger) for shard, ledger in pairs]


def model_and_loss(model: nn.Module, plan: Plan, device: torch.device) -> tuple[nn.Module, Loss]:
    """The model as it runs a row, and its loss, which computes the logits with `chunk_tokens`.

    A UserError if a custom loss cannot be made, or if the model does more to its logits than an
    output layer: with `chunk_tokens`, this is tried on the `device`.
    """
    table, own = plan.config.objective, None
    if table.target is not None:
        with users_code("objective.target"):
            own = own_function("objective", table.target, table.args)()
            name = type(own).__name__
            if not callable(own):
                raise TypeError(f"made a {name}, no function of output and targets")
            trained = own.to(device).parameters() if isinstance(own, nn.Module) else ()
            if any(each.requires_grad for each in trained):
                raise TypeError(f"made a {name} with parameters, which no optimizer would train")
    objective = Objective(table, own=own, vocab_size=plan.vocab_size)
    if table.chunk_tokens == 0:  # all logits exist at once
        return model, objective
    return need(plan.parts.models, "objective.chunk_tokens").in_chunks(plan, model, objective, device)


def autocast_context(config: RunConfig, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Makes the context in which forward and loss run."""
    dtype = AUTOCAST[config.train.precision]
    return nullcontext if dtype is None else lambda: torch.autocast(device.type, dtype=dtype)


def make_strategy(plan: Plan, info: RankInfo, device: torch.device) -> Strategy:
    """The strategy of a run. Every rank must call it: it may make process groups."""
    if info.world_size == 1:
        return Strategy()
    if plan.layout is None:
        return Replicated(plan.config.distributed, world_size=info.world_size, device=device)
    return need(plan.parts.models, "distributed.strategy").Sharded(plan.layout, plan.config, device)


def evaluated_rows(plan: Plan) -> int:
    """Rows of a micro-batch of an evaluation: those of the largest one that is trained on."""
    return max(largest_batch(mixing_of(plan.config, source.table)) for source in plan.sources)


def state_bytes(table: LedgerTable, state_width: int) -> int:
    """Memory of one state."""
    return state_width * (2 if table.dtype == "bfloat16" else 4)


class Lanes(NamedTuple):
    """The lanes of full rows."""

    sets: dict[int, int]  # of B lanes, by the micro-batches of a step; empty: rows are not full
    reason: str = ""  # why there are no more
    documents: float = 0.0  # to draw from; see `documents_drawn_from`

    def words(self, rows: int) -> str:
        """For people."""
        texts = []
        for m, number in sorted(self.sets.items()):
            how = f"the next row of a document comes {counted(number // m, 'step')} later"
            if number < m:
                how = f"the {m} micro-batches of a step continue each other's documents, "
                how += "which biases its gradient: lower data.mixing.batch_size, or add data"
            when = f"with m = {m}, " * (len(self.sets) > 1)
            texts.append(f"{when}{counted(number, 'set')} of {rows} lanes per data shard: {how}")
        return "; ".join(texts) + f" ({self.reason})" * bool(self.reason)

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
    shares = _largest_shares([source.weight for source in own], config.micro_batches)
    documents = {each.name: count_documents(each.streams, *reading(plan, each)[:2]) for each in own}
    total, rows = sum(documents.values()), config.data.mixing.batch_size * facts.data_shards
    if 0 < total < rows:
        problem = f"{counted(total, 'document')} for {counted(rows, 'row')}: a step has several of one document"
        fix = f"set it to {int(total / facts.data_shards)}, or add data"
        if total < facts.data_shards:
            fix = "use fewer ranks or distributed.shards, or add data"
        logger.warning("%s", UserError("data.mixing.batch_size", problem, fix).message)
    by_name = dict(zip(documents, shares, strict=True))
    limits = document_limits(documents, by_name, facts.data_shards)
    memory_here, files = plan.limits or (memory_of(device), allow_open_files())
    if state_width:
        needed = state_bytes(config.ledger, state_width)
        memory = STATES_SHARE * memory_here / facts.shards_per_rank
        reason = f"a lane's state takes {needed / 1e6:.3g} MB, and a data shard has {memory / 1e6:,.0f} MB for them"
        limits.append(LaneLimit(memory / needed, reason))
    # A lane's document; and of each source the streams that are open, and a cache of twice as many.
    handles = (1 + 3 * len(own)) * facts.shards_per_rank
    limits.append(LaneLimit(0.8 * files / handles, f"a process may have {files:,} files open"))
    if config.ledger.capacity:
        limits.append(LaneLimit(config.ledger.capacity, f"ledger.capacity is {config.ledger.capacity:,}"))
    found, why = dict(plan.recorded_sets), ""
    if found:
        why = "as in the checkpoint"
    for m in {each.m for each in config.micro_batches.stretches} - found.keys():
        found[m], reason = num_sets(m, config.data.mixing.batch_size, config.data.mixing.spread, limits)
        why = why or reason
    return Lanes(found, why, documents_drawn_from(documents, by_name))


def recorded_sets(plan: Plan, saved: Mapping[str, Any]) -> dict[int, int]:
    """The sets of lanes by a checkpoint's state.json; {} if it is empty, or of other settings.

    Another machine has another memory, and may open other numbers of files: it must not count anew.
    """
    if saved.get("data_shards") != plan.facts.data_shards:
        return {}
    now, before = plan.config.model_dump(mode="json"), saved["config"]
    found = []
    for each in (now, before):
        weights = [(source["name"], source["weight"]) for source in each["data"]["source"]]
        found.append([weights, each["data"]["mixing"], each["train"]["micro_batches"], each["ledger"]])
    return dict(saved[LANE_SETS]) if found[0] == found[1] else {}


def _largest_shares(weights: Sequence[ScheduledWeight], micro_batches: MicroBatches) -> list[float]:
    """The largest share of each source at any point of a schedule, or before its jump there."""
    points = [(each.unit, x) for each in weights for x in each.points]
    found = {x for unit, x in points if unit == "batch"}
    found |= {micro_batches.batches_before(max(x, 1)) for unit, x in points if unit == "step"}
    batches = np.array(sorted({max(at - before, 0) for at in found for before in (0, 1)}))
    at = np.array([each.evaluate_many(positions(each.unit, batches, micro_batches)) for each in weights])
    sums = at.sum(axis=0)
    largest: list[float] = np.divide(at, sums, out=np.zeros_like(at), where=sums > 0).max(axis=1).tolist()
    return largest


def make_dataset(plan: Plan, source: Source, shard: RankInfo, lanes: int = 0) -> StreamSource[Any, Any]:
    """The training part of a source that a data shard reads, for so many lanes."""
    kind: Callable[..., StreamSource[Any, Any]] = ShardSource
    if not reads_lanes(plan.config):
        kind = need(plan.parts.data, "data.mixing.batching_mode").StreamMixingDataset
    cut, read, mix = reading(plan, source)
    if lanes and not mix.num_streams_mixed:
        mix = replace(mix, num_streams_mixed=streams_open(source.streams, lanes, read))
    return kind(source.streams, cut, read, mix, shard=shard.rank, num_shards=shard.world_size)


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
    field = source.table.loss_mask
    mask = field and need(plan.parts.data, f"source {source.name}: loss_mask").LossMask(field)
    return cut, ReadOptions.of(source.table, tokenizer=plan.tokenizer, text_eod=data.eod, loss_mask=mask), mix


def runs_on(plan: Plan, model: nn.Module | None) -> bool:
    """Whether documents begin within rows. A `model` of None is built, if it decides."""
    align = plan.config.data.align
    if align == "auto" and reads_lanes(plan.config):
        return bool(getattr(model or plan.weightless_model(), "resets_in_one_pass", False))
    return align == "stream"


def make_blend(
    plan: Plan,
    shard: RankInfo,
    model: nn.Module | None = None,
    lanes: Lanes = Lanes({}),  # noqa: B008 - immutable
    guards: Callable[[str], BestEffort] = BestEffort,
) -> BlendDataset:
    """All sources as a data shard reads them, mixed by their weights.

    `model`: see `runs_on`; `lanes`: see `plan_lanes`.
    """
    blended, num_lanes = [], lanes.num(plan.config.data.mixing.batch_size)
    for source in plan.sources:
        if source.is_off:
            dataset: Any = UnreadSource()  # keeps its place in the states of the blend
        elif source.table.target is None:  # files, read by the core
            dataset = make_dataset(plan, source, shard, num_lanes)
        else:
            dataset = need(plan.parts.data, f"source {source.name}: target").own_batches(plan, source, shard, model)
        blended.append(BlendSource(source.name, dataset, source.weight))
    config = plan.config
    options: dict[str, Any] = {
        "seed": config.run.seed,
        "micro_batches": config.micro_batches,
        "per_source": config.metrics.per_source,
        "times": True,
        "guards": guards,
    }
    if not reads_lanes(config) or not any(each.streams and not each.is_off for each in plan.sources):
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
