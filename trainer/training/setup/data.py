"""The data of a run, made from its plan: the blend to train on, and the held-out documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import torch

from trainer.config.rules import largest_batch, mixing_of
from trainer.data.batch import MicroBatch
from trainer.data.blend import BlendDataset, BlendSource, UnreadSource
from trainer.data.documents import ReadOptions
from trainer.data.groups import CutOptions
from trainer.data.loader import Loader
from trainer.data.mixing import MixOptions, StreamMixingDataset
from trainer.data.own_batches import OwnBatches
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.import_path import format_error, resolve_target
from trainer.training.setup.plan import Plan
from trainer.training.setup.sources import Source


class EvalSet(NamedTuple):
    """What an evaluation reads.

    Attributes:
        name: of an `[[eval.source]]`; empty: the held-out documents.
        batches: makes an iterator of this rank's micro-batches for a model that takes such inputs (None: any), always the
            same ones: as many on every rank, since `per_stream` batching masks the rows of a rank whose part has ended.
    """

    name: str
    batches: Callable[[frozenset[str] | None], Iterator[MicroBatch]]


def make_dataset(
    plan: Plan, source: Source, info: RankInfo, *, is_holdout: bool, is_whole: bool = False
) -> StreamMixingDataset:
    """One source's data set: the training part, or what is evaluated on, read once from its beginning.

    Args:
        is_holdout: what is evaluated on.
        is_whole: that is all documents, not the held-out ones.
    """
    config, mixing = plan.config, mixing_of(plan.config, source.table)
    cut = CutOptions(
        namespace=source.name,
        seq_len=config.data.seq_len if is_holdout else config.row_tokens,
        max_group_cells=config.data.max_group_cells if is_holdout else config.max_group_rows,
        pack=config.data.pack,
        split="holdout" if is_holdout and not is_whole else "train",
        holdout_fraction=0.0 if is_whole else config.eval.holdout_fraction,
    )
    read = ReadOptions(
        plan.tokenizer, source.table.dtype, source.table.eod, source.table.text_split, source.table.format
    )
    mix = MixOptions(
        num_streams_mixed=mixing.num_streams_mixed,
        pick_mode="round_robin" if is_holdout else mixing.pick_mode,
        batching_mode="per_stream" if is_holdout else mixing.batching_mode,
        batch_size=mixing.batch_size,
        batch_size_by_modality=mixing.batch_size_by_modality,
        repeat=mixing.repeat and not is_holdout,
        tokens_before=0 if is_holdout else config.ledger.burn_in,
        seed=config.run.seed,
    )
    return StreamMixingDataset(source.streams, cut, read, mix, rank=info.rank, world_size=info.world_size)


def make_blend(plan: Plan, info: RankInfo) -> BlendDataset:
    """All sources, mixed by their weights.

    Raises:
        UserError: a target does not give an iterable.
    """
    blended = []
    for source in plan.sources:
        if source.is_off:
            dataset: Any = UnreadSource()
        elif source.table.target is None:
            dataset = make_dataset(plan, source, info, is_holdout=False)
        else:
            dataset = _make_target(plan, source, info)
        blended.append(BlendSource(source.name, dataset, source.weight))
    return BlendDataset(
        blended,
        seed=plan.config.run.seed,
        micro_batches=plan.config.micro_batches,
        per_source=plan.config.metrics.per_source,
        times=True,
        history_every=plan.config.ledger.probe_every,
        history_tokens=plan.config.ledger.probe_cells * plan.config.row_tokens,
    )


def _make_target(plan: Plan, source: Source, info: RankInfo) -> Any:
    key = f"source {source.name}: target"
    assert source.table.target is not None
    target = resolve_target(source.table.target, key)
    given = {
        "rank": info.rank,
        "world_size": info.world_size,
        "seed": plan.config.run.seed,
        "seq_len": plan.config.row_tokens,
    }
    try:
        dataset = target(**given, **source.table.args)
    except TypeError as error:
        raise UserError(
            key, f"cannot be called with {', '.join(given)} and the keys of args: {error}", "see its signature"
        ) from error
    except UserError:
        raise
    except Exception as error:
        raise UserError(key, f"fails: {format_error(error)}", "fix it there") from error
    if not hasattr(dataset, "__iter__"):
        raise UserError(
            key, f"gave a {type(dataset).__name__}, which cannot be iterated", "return an iterable of dicts"
        )
    return OwnBatches(dataset, vocab_size=plan.vocab_size, key=f"source {source.name}: {source.table.target}")


def eval_sets(plan: Plan, info: RankInfo, device: torch.device) -> list[EvalSet]:
    """The held-out documents, the sources in turn from the beginning, and each `[[eval.source]]`; empty without evaluations.

    Raises:
        UserError: no document of a source is held out; a set has no document.
    """
    table, sets = plan.config.eval, []
    if not table.every:
        return []
    if table.holdout_fraction > 0:
        own = [source for source in plan.sources if source.streams]
        datasets = [make_dataset(plan, source, info, is_holdout=True) for source in own]
        sets.append(_eval_set("", datasets, table.batches, device))
    for each, source in zip(table.source, plan.eval_sources, strict=True):
        dataset = make_dataset(plan, source, info, is_holdout=True, is_whole=True)
        sets.append(_eval_set(each.name, [dataset], each.batches or None, device))
    return sets


def _eval_set(name: str, datasets: list[StreamMixingDataset], limit: int | None, device: torch.device) -> EvalSet:
    beginnings = [dataset.state_dict() for dataset in datasets]

    def batches(accepted: frozenset[str] | None) -> Iterator[MicroBatch]:
        for dataset, beginning in zip(datasets, beginnings, strict=True):
            dataset.load_state_dict(beginning)
        # Generators, which have neither state nor metrics: an evaluation needs none.
        loaders = [Loader((batch for batch in each), device=device, accepted=accepted, prefetch=0) for each in datasets]
        in_turn = (micro for turn in zip_longest(*loaders) for micro in turn if micro is not None)
        return islice(in_turn, limit)

    next(batches(None), None)
    return EvalSet(name, batches)


def max_tokens_per_micro(plan: Plan) -> int:
    """The most tokens that a micro-batch of the configured sources can have (what scales the loss; any constant works)."""
    sizes = [largest_batch(mixing_of(plan.config, s.table)) for s in plan.sources if s.table.target is None]
    return max(sizes, default=1) * plan.config.row_tokens
