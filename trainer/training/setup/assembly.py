"""The parts of a run, made from its plan. Together with `main` the only place where things are assembled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.config.rules import largest_batch, mixing_of
from trainer.config.schema import ObjectiveTable, RunConfig
from trainer.data.blending.blend import BlendDataset, BlendSource
from trainer.data.loader import Loader
from trainer.data.mixing.dataset import StreamMixingDataset
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.import_path import resolve_target
from trainer.ledger.ledger import Ledger
from trainer.objective.components import CoordSettings
from trainer.objective.compose import Objective
from trainer.training.setup.plan import Plan
from trainer.training.setup.sources import Source

# Devices that work on their own while the host goes on; on others there is nothing to gain.
LATE_DEVICES = frozenset({"cuda"})
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_dataset(plan: Plan, source: Source, info: RankInfo, *, is_holdout: bool) -> StreamMixingDataset:
    """One source's data set: the training part, or the held-out part read once from its beginning."""
    config, mixing = plan.config, mixing_of(plan.config, source.table)
    return StreamMixingDataset(
        source.streams,
        name=source.name,
        tokenizer=plan.tokenizer,
        seq_len=config.data.seq_len,
        num_streams_mixed=mixing.num_streams_mixed,
        pick_mode="round_robin" if is_holdout else mixing.pick_mode,
        batching_mode="per_stream" if is_holdout else mixing.batching_mode,
        batch_size=mixing.batch_size,
        batch_size_by_modality=mixing.batch_size_by_modality,
        max_group_cells=config.data.max_group_cells,
        pack=config.data.pack,
        repeat=mixing.repeat and not is_holdout,
        seed=config.run.seed,
        rank=info.rank,
        world_size=info.world_size,
        split="holdout" if is_holdout else "train",
        holdout_fraction=config.eval.holdout_fraction,
        format=source.table.format,
        dtype=source.table.dtype,
        eod=source.table.eod,
    )


def make_blend(plan: Plan, info: RankInfo) -> BlendDataset:
    """All sources, mixed by their weights.

    Raises:
        UserError: a target does not give an iterable.
    """
    blended = []
    for source in plan.sources:
        if source.table.target is None:
            dataset: Any = make_dataset(plan, source, info, is_holdout=False)
        else:
            dataset = _make_target(plan, source, info)
        blended.append(BlendSource(source.name, dataset, source.weight))
    return BlendDataset(
        blended,
        seed=plan.config.run.seed,
        micro_batches=plan.config.train.micro_batches,
        per_source=plan.config.metrics.per_source,
    )


def _make_target(plan: Plan, source: Source, info: RankInfo) -> Any:
    key = f"source {source.name}: target"
    assert source.table.target is not None
    target = resolve_target(source.table.target, key)
    given = {
        "rank": info.rank,
        "world_size": info.world_size,
        "seed": plan.config.run.seed,
        "seq_len": plan.config.data.seq_len,
    }
    try:
        dataset = target(**given, **source.table.args)
    except TypeError as error:
        raise UserError(
            key, f"cannot be called with {', '.join(given)} and the keys of args: {error}", "see its signature"
        ) from error
    if not hasattr(dataset, "__iter__"):
        raise UserError(
            key, f"gave a {type(dataset).__name__}, which cannot be iterated", "return an iterable of dicts"
        )
    return dataset


def holdout_batches(plan: Plan, info: RankInfo, device: torch.device) -> Callable[[], Iterator[dict[str, Any]]]:
    """What makes an iterator of the held-out micro-batches of one evaluation: the sources in turn, from the beginning.

    Raises:
        UserError: no document of a source is held out.
    """
    own = [source for source in plan.sources if source.table.target is None]
    datasets = [make_dataset(plan, source, info, is_holdout=True) for source in own]
    beginnings = [dataset.state_dict() for dataset in datasets]

    def batches() -> Iterator[dict[str, Any]]:
        for dataset, beginning in zip(datasets, beginnings, strict=True):
            dataset.load_state_dict(beginning)
        loaders = [iter(Loader(dataset, device=device, prefetch=0)) for dataset in datasets]
        for turn in itertools.count():
            alive = [loaded for loader in loaders if (loaded := next(loader, None)) is not None]
            for position, loaded in enumerate(alive):
                if turn * len(alive) + position >= plan.config.eval.batches:
                    return
                yield loaded.batch
            if not alive:
                return

    next(batches(), None)
    return batches


def make_ledger(plan: Plan, info: RankInfo, model: nn.Module, device: torch.device) -> Ledger | None:
    """The training ledger; None for a model without state."""
    table, width = plan.config.ledger, state_width(model)
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
        ownership="exchange" if plan.facts.ownership == "exchange" else "reader",
        rank=info.rank,
        world_size=info.world_size,
    )


def settles_late(config: RunConfig, device: torch.device) -> bool:
    """Whether steps are settled during the next one. With fp16 they cannot be: torch's loss scaling reads its scale."""
    return device.type in LATE_DEVICES and config.train.precision != "fp16"


def make_eval_ledger(plan: Plan, model: nn.Module, device: torch.device) -> Callable[[], Ledger] | None:
    """What makes an evaluation's own, empty ledger: as large as its groups in flight, never swept."""
    if state_width(model) == 0:
        return None
    capacity = max(plan.facts.groups_in_flight, 1)
    return lambda: Ledger(state_width=state_width(model), capacity=capacity, wipe_mode="none", device=device)


def state_width(model: nn.Module) -> int:
    """Numbers in one group's state, as the model says."""
    width = model.state_width
    assert isinstance(width, int)
    return width


def make_objective(table: ObjectiveTable) -> Objective:
    """The loss of `[objective]`."""
    coord = table.coord
    settings = None if coord is None else CoordSettings(**coord.model_dump())
    return Objective(z_loss=table.z_loss, coord=settings)


def autocast_context(config: RunConfig, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Makes the context in which forward and loss run."""
    dtype = AUTOCAST[config.train.precision]
    if dtype is None:
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=dtype)


def wrap_ddp(model: nn.Module, info: RankInfo, device: torch.device) -> nn.Module:
    """DDP around the model; the model itself on a single rank."""
    if info.world_size == 1:
        return model
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )


def max_tokens_per_micro(plan: Plan) -> int:
    """The most tokens that a micro-batch of the configured sources can have (what scales the loss; any constant works)."""
    sizes = [largest_batch(mixing_of(plan.config, s.table)) for s in plan.sources if s.table.target is None]
    return max(sizes, default=1) * plan.config.data.seq_len
