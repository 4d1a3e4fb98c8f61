"""What evaluates a run: made from its plan, for the run itself and for `train eval`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, zip_longest
from math import ceil
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from trainer.arrays import Ints
from trainer.config.rules import largest_batch, mixing_of
from trainer.data.batch import MicroBatch, accepted_inputs
from trainer.data.documents import TokenTable, table_from_pieces
from trainer.data.groups import GroupTable, OpenStream, chances_of, draw_by_size, file_bytes
from trainer.data.layout import Stream
from trainer.data.loader import Loader
from trainer.data.mixing import StreamMixingDataset
from trainer.data.tokenizer import token_bytes
from trainer.distributed.env import RankInfo
from trainer.hashing import keyed_generator
from trainer.import_path import resolve_target
from trainer.metrics.best_effort import Diagnostics
from trainer.metrics.logger import get_logger
from trainer.objective.auxiliary import Auxiliary
from trainer.objective.loss import Loss
from trainer.training.evaluator import EvalSet, Evaluator, OwnTask, Sample
from trainer.training.setup.parts import autocast_context, make_dataset, make_eval_ledger, make_objective
from trainer.training.setup.plan import Plan
from trainer.training.setup.sources import Source
from trainer.training.step.details import StepDetails
from trainer.wording import counted

logger = get_logger(__name__)
SHARE = 0.15
"""Cells that an evaluation may read by default, of those that one rank trains on between two evaluations. A forward is a third
of the work of a training step: about 5 % of its time on one rank, less on several."""
COUNTED_BYTES = 2_000_000_000
"""Of a set's files whose documents are counted when a run starts."""
LEAST = 4
"""Documents that are drawn, and files if they are: fewer say nothing of the error."""
ALL = 2**62
"""More micro-batches than any set has."""


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
        sets.append(_eval_set("", plan, own, table.batches, info, device))
    for each, source in zip(table.source, plan.eval_sources, strict=True):
        sets.append(_eval_set(each.name, plan, [source], each.batches or ALL, info, device))
    return sets


def _eval_set(
    name: str, plan: Plan, sources: Sequence[Source], num_batches: int, info: RankInfo, device: torch.device
) -> EvalSet:
    """A set: all documents of `sources`, or drawn ones. `num_batches`: 0: as many as cost little; `ALL` or more: all."""
    make = partial(make_dataset, plan, info=info, is_holdout=True, is_whole=bool(name))
    datasets = [make(source=source) for source in sources]
    read, sample = "all documents", None
    if num_batches < ALL and sources:
        rows = max(largest_batch(mixing_of(plan.config, source.table)) for source in sources)
        if num_batches:
            budget = num_batches * rows * info.world_size
        else:
            steps = min(plan.config.eval.every, plan.facts.steps)
            cells = plan.config.micro_batches.least * rows * plan.config.train.tbptt_cells
            budget = int(SHARE * steps * cells)
        data, generator = plan.config.data, keyed_generator("evaluation", name, plan.config.run.seed)
        whole = [make(source=source, pack=False) for source in sources]
        read, drawn = _draw(whole, budget, data.seq_len, data.pack, generator)
        if drawn is not None:
            datasets, groups = _copied(plan, sources, info, whole, drawn[0])
            sample = replace(drawn[1], groups=groups)
            logger.info("%s: each evaluation reads %s, drawn by run.seed", name or "held-out documents", read)
    beginnings = [dataset.state_dict() for dataset in datasets]

    def batches(accepted: frozenset[str] | None) -> Iterator[MicroBatch]:
        for dataset, beginning in zip(datasets, beginnings, strict=True):
            dataset.load_state_dict(beginning)
        # Generators, which have neither state nor metrics: an evaluation needs none.
        loaders = [Loader((batch for batch in each), device=device, accepted=accepted, prefetch=0) for each in datasets]
        return (micro for turn in zip_longest(*loaders) for micro in turn if micro is not None)

    next(batches(None), None)
    return EvalSet(name, batches, read, sample)


class _Documents(NamedTuple):
    """Documents, n of them, or parts of at most `max_group_cells` cells, as they are read."""

    files: list[tuple[int, Stream]]
    """The index of a data set, and a stream of it."""
    of_file: Ints
    """Index of `files`, ascending, [n]."""
    group: Ints
    """Of the file, without packing, [n]."""
    tokens: Ints
    """[n]."""


def _count(datasets: Sequence[StreamMixingDataset], files: list[tuple[int, Stream]]) -> tuple[_Documents, int]:
    """All documents of these files, and their number, whatever their parts."""
    found: list[tuple[Ints, ...]] = [(np.zeros(0, np.int64),) * 3]
    num_whole = 0
    for at, (index, stream) in enumerate(files):
        opened = datasets[index].open(stream)
        groups = opened.groups
        left = opened.documents.lengths[groups.documents] - groups.first_cells * opened.seq_len
        tokens = np.minimum(left, groups.num_cells * opened.seq_len)
        found.append((np.full(groups.num_groups, at), np.arange(groups.num_groups), tokens))
        num_whole += int(np.count_nonzero(groups.first_cells == 0))
    return _Documents(files, *map(np.concatenate, zip(*found, strict=True))), num_whole


def _draw(
    datasets: Sequence[StreamMixingDataset], budget: int, seq_len: int, is_packed: bool, generator: np.random.Generator
) -> tuple[str, tuple[_Documents, Sample] | None]:
    """How much of a set is read, in words, and what was drawn; None: all. Equal on all ranks and at every resume.

    Documents are counted by opening their files; of more than `COUNTED_BYTES` of files, only of some that are drawn first.

    Args:
        budget: cells that an evaluation may read, in expectation; but `LEAST` documents are read.
    """
    files = [(index, stream) for index, dataset in enumerate(datasets) for stream in dataset.streams]
    sizes = np.array([max(file_bytes(stream), 1) for _, stream in files], dtype=np.int64)
    drawn = draw_by_size(sizes, max(LEAST, int(len(files) * COUNTED_BYTES / sizes.sum())), generator)
    documents, num_whole = _count(datasets, [files[at] for at in drawn.chosen])
    cells, num_all = -(-documents.tokens // seq_len), len(documents.tokens)
    total = int(documents.tokens.sum())
    is_counted = len(drawn.chosen) == len(files)
    is_missed = len({documents.files[at][0] for at in np.unique(documents.of_file)}) < len(
        datasets
    )  # all of it says which
    is_cheap = (total / seq_len if is_packed else cells.sum()) <= budget or num_all <= LEAST
    what = counted(num_whole, "document")
    if num_all == 0 or (is_counted and (is_cheap or is_missed)):
        return f"all {what}, {counted(total, 'token')}", None
    file_chances = drawn.chances[documents.of_file]
    represented = documents.tokens / file_chances

    def cost(num: int) -> int:
        return ceil(chances_of(represented, num) @ cells)

    num = min(max(LEAST, bisect_right(range(num_all + 1), budget, key=cost, lo=1) - 1), num_all)
    chosen, chances, spread = draw_by_size(represented, num, generator)
    taken = _Documents(documents.files, *(column[chosen] for column in documents[1:]))
    parts = what if num_whole == num_all else f"{num_all:,} parts of {what}"
    read = f"{num:,} of {parts}, {int(taken.tokens.sum()):,} of {total:,} tokens"
    if is_counted:
        return read, (taken, Sample({}, taken.tokens, chances, spread))
    read += f", in {len(drawn.chosen):,} of {len(files):,} files"
    return read, (taken, Sample({}, taken.tokens, chances, spread, taken.of_file, file_chances[chosen]))


def _copied(
    plan: Plan,
    sources: Sequence[Source],
    info: RankInfo,
    datasets: Sequence[StreamMixingDataset],
    documents: _Documents,
) -> tuple[list[StreamMixingDataset], dict[int, int]]:
    """Data sets of copies of the documents, which fill batches whatever files they are from; group id -> document."""
    made: list[StreamMixingDataset] = []
    numbers: dict[int, int] = {}
    for index, source in enumerate(sources):
        by_modality: dict[str, list[int]] = {}
        for at, file in enumerate(documents.of_file.tolist()):
            dataset, stream = documents.files[file]
            if dataset == index:
                by_modality.setdefault(stream.modality, []).append(at)
        in_memory = {}
        for modality, those in by_modality.items():
            path = f"documents drawn of {modality}"
            copy = _copy(datasets[index], documents, those, Stream(0, path, path, modality), plan)
            in_memory[path] = copy
            ids = copy.groups.ids_of(np.arange(len(those))).tolist()
            numbers |= dict(zip(ids, those, strict=True))
        if in_memory:
            part = replace(source, streams=[each.stream for each in in_memory.values()])
            made.append(make_dataset(plan, part, info, is_holdout=True, is_whole=True, pack=False, in_memory=in_memory))
    return made, numbers


def _copy(
    dataset: StreamMixingDataset, documents: _Documents, those: Sequence[int], stream: Stream, plan: Plan
) -> OpenStream:
    """A stream of those documents in memory, each a group: its tokens, and the one before, which is its first input."""
    pieces, first_cells, seq_len = [], [], plan.config.data.seq_len
    for file, of_file in groupby(those, key=lambda at: int(documents.of_file[at])):
        opened = dataset.open(documents.files[file][1])
        for at in of_file:
            group = documents.group[at]
            first_cells.append(int(opened.groups.first_cells[group]))
            start = first_cells[-1] * seq_len
            stop = start + int(documents.tokens[at])
            pieces.append(opened.documents.read(int(opened.groups.documents[group]), max(start - 1, 0), stop))
    tokens, first = documents.tokens[those], np.array(first_cells)
    table = table_from_pieces(pieces, plan.tokenizer.vocab_size, where=stream.path)
    # Where a document would begin whose cell `first` is the copied one.
    begins = table.starts + (first > 0) - first * seq_len
    num_cells = -(-tokens // seq_len)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(num_cells)])
    no_segments = np.zeros(len(tokens) + 1, np.int64), np.zeros(0, np.int64)
    numbers = np.arange(len(tokens))
    groups = GroupTable(dataset.name, stream.relative_path, numbers, first, num_cells, offsets, *no_segments)
    return OpenStream(stream, TokenTable(table.tokens, begins, first * seq_len + tokens), groups, seq_len, 0)


def make_details(
    plan: Plan,
    diagnostics: Diagnostics,
    auxiliary: Auxiliary,
    *,
    model_metrics: Sequence[str] = (),
    bytes_of: torch.Tensor | None = None,
) -> StepDetails:
    """What is collected beside the loss, of logged steps and of evaluations."""
    objective, is_by_source = plan.config.objective, plan.config.metrics.per_source
    modalities = {stream.modality for source in plan.sources for stream in source.streams}
    return StepDetails(
        [*make_objective(objective).components, *auxiliary.losses],
        token_types=plan.tokenizer.token_type_names if objective.token_types else (),
        model_metrics=model_metrics,
        sources=[source.name for source in plan.sources] if is_by_source else (),
        modalities=sorted(modalities) if is_by_source else (),
        diagnostics=diagnostics,
        bytes_of=bytes_of,
    )


def make_evaluator(
    plan: Plan,
    model: nn.Module,
    cell_model: nn.Module,
    loss: Loss,
    auxiliary: Auxiliary,
    info: RankInfo,
    device: torch.device,
    diagnostics: Diagnostics,
    sets: Sequence[EvalSet],
    *,
    most: Callable[[int], int],
) -> Evaluator:
    """The evaluator of a run. A task of the user's own gets `model`; a row is run through `cell_model`, which with
    `chunk_tokens` has no output layer."""
    table, autocast = plan.config.eval, autocast_context(plan.config, device)
    task = None
    if table.target is not None:
        task = OwnTask(
            function=resolve_target(table.target, "eval.target"),
            args=table.args,
            model=model,
            tokenizer=plan.tokenizer,
            autocast=autocast,
            info=info,
            device=device,
            guard=diagnostics.best_effort("eval.target"),
        )
    sizes, problem = token_bytes(plan.tokenizer)
    if sizes is None:
        logger.info("evaluations report no bits per byte: %s", problem)
    return Evaluator(
        model=cell_model,
        accepted=accepted_inputs(model),
        objective=loss,
        auxiliary=auxiliary,
        sets=sets,
        task=task,
        make_ledger=make_eval_ledger(plan, model, device),
        details=make_details(
            plan,
            diagnostics,
            auxiliary,
            model_metrics=auxiliary.metric_keys,
            bytes_of=None if sizes is None else torch.from_numpy(sizes).to(device),
        ),
        guard=diagnostics.best_effort("evaluation"),
        autocast=autocast,
        most=most,
        world_size=info.world_size,
        device=device,
    )
