"""Evaluation on a sample of a set that is too large to be read whole.

The sample is the first N documents in a keyed order of all, each read from its beginning to a
depth. N and the depth follow from the budget and the lengths of all documents, not from which ones
are drawn: so each document is as likely to be read as any other, and sums over the sample are
those over the set in proportion.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.arrays import Ints, keyed_generator, weights_of
from trainer.data.documents import IdBounds, TokenArray, TokenTable, reader_of, table_from_pieces
from trainer.data.groups import CutOptions, OpenStream, build_groups, file_bytes
from trainer.data.layout import Stream
from trainer.data.loader import Carry, MicroBatch
from trainer.data.shard_source import ShardSource
from trainer.distributed.env import RankInfo
from trainer.files import remove_leftovers, write_file
from trainer.lab.moments import Moments
from trainer.metrics.sinks import strict
from trainer.objective import ObjectiveOutput
from trainer.on_device import to_device
from trainer.training.build import evaluated_rows, make_held_out
from trainer.training.evaluator import EvalRider, EvalSet, Evaluator
from trainer.training.plan import Plan, Source
from trainer.wording import counted

if TYPE_CHECKING:
    from trainer.training.open_run import Run
    from trainer.training.run_dir import RunDir

EVALUATIONS = "evaluations"  # in the run directory: a file for each step
COUNTED_BYTES = 2_000_000_000  # of a set's files whose documents are counted at the start
SHARE = 0.15
"""Cells that an evaluation may run by default, over those that a rank trains on between two.

A forward is a third of a step's work: about 5 % of the time on one rank, less on several."""
LEAST = 8  # documents, or files, that are drawn: the error needs as many

Document = tuple[str, str, int]  # source, stream and number in it
Sums = dict[int, tuple[Document, float, float]]  # group id -> the document, its loss, its targets


@dataclass(frozen=True)
class Sample:
    """The documents that were drawn, and what was drawn independently: each, or its file."""

    units: Mapping[int, int]  # group id -> the document, or its file, from 0; empty: all groups
    num_units: int
    share: float  # of all documents; 0: of some files alone, or only read to a depth
    weight: float = 1.0  # of the loss of a token in the loss
    names: Mapping[int, Document] = field(default_factory=dict)  # group id -> what was copied

    def error(self, losses: npt.NDArray[np.float64], tokens: npt.NDArray[np.float64]) -> float:
        """The error of the mean loss per token against the whole set's, by the sums of each unit:
        that of a ratio of sums, with the correction for a finite set. NaN if unknown."""
        moments = Moments.of(torch.from_numpy(losses), torch.from_numpy(tokens))
        return self.weight * moments.wide_error() * math.sqrt(1 - self.share)


class DocumentLosses(EvalRider):
    """The loss of each document of a set: for the record, and for the error of a sample's loss. It
    is the cross-entropy, or what replaces that."""

    def __init__(self, name: str, sample: Sample | None) -> None:
        self.key = f"eval/{name}/loss" if name else "eval_loss"
        self._sample = sample

    def begin(self, evaluator: Evaluator) -> None:
        """Forget the last evaluation."""
        self._guard, self._info = evaluator.guard, evaluator.info
        self._names: dict[int, Document] = {} if self._sample is None else dict(self._sample.names)
        self._waiting: list[tuple[list[int], Tensor]] = []
        self._num_rows = 0
        self.found: Sums = {}

    def micro_done(self, micro: MicroBatch, state: Tensor | None, result: ObjectiveOutput) -> None:
        """Note the loss and the number of targets of each document in the rows."""
        if result.token_loss is None:
            return
        losses, weights = result.token_loss.double(), weights_of(micro.targets).double()
        rows: Any = getattr(micro.located, "reads", ())  # none: a data set of the user's own
        if max(map(len, rows), default=0) <= 1:
            groups = [row[0][0].group_id if row else -1 for row in rows] or self._own_groups(micro)
            sums = torch.stack([losses.sum(1), weights.sum(1)], dim=1)
        else:  # documents begin within rows; targets without one have no loss
            groups = [of.group_id for row in rows for of, _, _ in row]
            places = to_device(micro.extras["segment_ids"].clip(0).ravel(), losses.device)
            columns = torch.stack([losses, weights], dim=-1).flatten(0, 1)  # [B T, 2]
            sums = columns.new_zeros(len(groups), 2).index_add_(0, places, columns)
        for of, _, _ in chain.from_iterable(rows):
            table = of.source.groups
            self._names.setdefault(of.group_id, (table.namespace, table.relative_path, of.document))
        self._waiting.append((groups, sums))

    def _own_groups(self, micro: MicroBatch) -> list[int]:
        """The groups of the user's own rows; of a row of none, a number below -1 of its own."""
        groups = (micro.carry or Carry.of_no_group(len(micro.targets))).group_ids
        rank, world_size = self._info.rank, self._info.world_size
        alone = -2 - rank - world_size * (self._num_rows + np.arange(len(groups)))
        self._num_rows += len(groups)
        found: list[int] = []
        for group in np.where(groups < 0, alone, groups).tolist():
            key = group if group < 0 else group * world_size + rank  # ranks may number theirs alike
            self._names[key] = "", f"rank {rank} of {world_size}" * (world_size > 1), group
            found.append(key)
        return found

    def part(self) -> Sums | None:
        """The sums of this rank's documents by group. Waits for the device."""
        return self._guard.run(self._part)

    def _part(self) -> Sums:
        totals: dict[int, Any] = {}  # [2] each
        for groups, sums in self._waiting:
            for group, own in zip(groups, sums.cpu().numpy(), strict=True):
                totals[group] = totals.get(group, 0.0) + own
        totals.pop(-1, None)  # rows that only fill a batch
        return {group: (self._names[group], float(nats), float(n)) for group, (nats, n) in totals.items() if n}

    def lines(self) -> Iterator[str]:
        """Those of a file: the key whose mean they make up, and where the document is."""
        for (source, stream, document), nats, tokens in sorted(self.found.values()):
            where = {"key": self.key, "source": source, "stream": stream, "document": document}
            yield json.dumps(strict({**where, "tokens": int(tokens), "nats": nats}), allow_nan=False) + "\n"

    def metrics(self, by_rank: Sequence[Any]) -> dict[str, float]:
        """Take in the losses of all ranks, for `lines`; the error of a sample's, if above 0."""
        for part in by_rank:  # all ranks have one, or the evaluation is off
            self.found |= part
        error = None if self._sample is None else self._guard.run(self._error, self._sample)
        return {"loss_se": error} if error is not None and error > 0 else {}

    def _error(self, sample: Sample) -> float:
        units = sample.units or {group: at for at, group in enumerate(self.found)}
        by_unit = np.zeros((2, sample.num_units or len(units)))
        for group, (_, *sums) in self.found.items():
            by_unit[:, units[group]] += sums
        return sample.error(*by_unit)


def record_losses(run: Run, step: int) -> None:
    """Write the losses of an evaluation's documents into the run directory (rank 0)."""
    if run.view.info.is_main and run.evaluator is not None and not run.evaluator.is_off:
        write = run.view.diagnostics.best_effort("losses of documents").run
        write(_record_losses, run.view.run_dir, step, run.evaluator.sets)


def _record_losses(run_dir: RunDir, step: int, sets: Sequence[EvalSet]) -> None:
    riders = [rider for each in sets for rider in each.riders if isinstance(rider, DocumentLosses)]
    lines = [line for rider in riders for line in rider.lines()]
    if lines:
        run_dir.check_owner()
        directory = run_dir.path / EVALUATIONS
        directory.mkdir(exist_ok=True)
        remove_leftovers(directory)  # of a process that was killed
        write_file(directory / f"step_{step:08d}.jsonl", "".join(lines))


def draw_sample(
    plan: Plan, name: str, read: Mapping[ShardSource, Source], info: RankInfo, num_batches: int, runs: int
) -> tuple[str, list[ShardSource], Sample | None]:
    """How much of a set is read, in words, the data sets of that, and the documents drawn; None:
    all is read. Equal on all ranks, and at a resume with as many shards and micro-batches.

    Args:
        read: the data sets of whole sources.
        num_batches: that an evaluation may run, in expectation; 0: as many as cost little.
        runs: of each cell but a document's first, by default.
    """
    seq_len, objective, rows = plan.config.data.seq_len, plan.config.objective, evaluated_rows(plan)
    unit = ("token", "row")[bool(plan.config.data.features)]
    # Cells; at least so many: batches that grow later only make the share smaller.
    steps = min(plan.config.eval.every, plan.facts.steps)
    budget = int(SHARE * steps * plan.config.micro_batches.least * rows)
    if plan.config.train.ema:  # the evaluation is repeated with the averages
        budget //= 2
    if num_batches:
        budget, runs = num_batches * rows * plan.facts.data_shards, 1
    generator = keyed_generator("evaluation", name)  # not by run.seed: runs read the same documents
    files = [(dataset, stream) for dataset in read for stream in dataset.streams]
    size = sum(file_bytes(stream) for _, stream in files)
    # Counting opens the files, which takes long for a large set: only the first of a keyed order.
    num_files = min(max(LEAST, len(files) * COUNTED_BYTES // max(size, 1)), len(files))
    order = generator.permutation(len(files))
    while True:
        looked_at = [files[at] for at in np.sort(order[:num_files])]
        owners, documents, tokens = _count(looked_at)
        if len(tokens) >= LEAST or num_files == len(files):
            break
        num_files = min(2 * num_files, len(files))  # too few of those are held out
    is_counted = num_files == len(files)
    cells = -(-tokens // seq_len)
    if not len(tokens) or (is_counted and (1 + runs * (cells - 1)).sum() <= budget):
        return f"all {counted(len(tokens), 'document')}, {counted(int(tokens.sum()), unit)}", [*read], None
    fewest = min(LEAST, len(tokens))
    # So that the fewest documents keep to the budget; but two cells show what the second gains.
    depth = max((budget // fewest - 1) // runs + 1, runs)
    cost = (1 + runs * (np.minimum(cells, depth) - 1)).mean()
    num = int(np.clip(budget / cost, fewest, len(tokens)))
    chosen = np.sort(generator.permutation(len(tokens))[:num])
    sizes = np.minimum(tokens[chosen], depth * seq_len)
    words = f"{num:,} of {counted(len(tokens), 'document')}, {int(sizes.sum()):,} of {int(tokens.sum()):,} {unit}s"
    units, share = np.arange(num), num / len(tokens)
    if cells.max() > depth:
        words += f", each to a depth of {depth * seq_len:,} {unit}s"
        share = 0.0  # what is behind was not read of any
    if not is_counted:
        words += f", in {num_files:,} files"
        units, share = np.unique(owners[chosen], return_inverse=True)[1], 0.0
    drawn = [(*looked_at[owners[at]], int(documents[at])) for at in chosen]
    copied, groups = _copied(plan, read, info, drawn, depth)
    weight = objective.token_ce if "token_ce" in objective.components else 1.0
    of_group = dict(zip(groups, units.tolist(), strict=True))
    paths = [(owner.name, stream.relative_path, document) for owner, stream, document in drawn]
    names = dict(zip(groups, paths, strict=True))
    return words, copied, Sample(of_group, int(units.max()) + 1, share, weight, names)


def _count(files: Sequence[tuple[ShardSource, Stream]]) -> tuple[Ints, Ints, Ints]:
    """All documents with a token: numbers of the file and in the file, and tokens; [n] each."""
    found: list[tuple[Ints, ...]] = [(np.zeros(0, np.int64),) * 3]
    for at, (dataset, stream) in enumerate(files):
        opened = dataset.open(stream)  # no evaluation cuts documents: a group is one
        found.append((np.full(opened.groups.num_groups, at), opened.groups.documents, opened.num_tokens()))
    owners, documents, tokens = map(np.concatenate, zip(*found, strict=True))
    return owners, documents, tokens


def _copied(
    plan: Plan,
    read: Mapping[ShardSource, Source],
    info: RankInfo,
    drawn: Sequence[tuple[ShardSource, Stream, int]],
    depth: int,
) -> tuple[list[ShardSource], list[int]]:
    """Data sets of copies of the documents (data set, stream, number), and their ids in order.

    Evaluations then open no file, and fill batches whatever files the documents are from.
    """
    seq_len = plan.config.data.seq_len
    made: list[ShardSource] = []
    refuse_unfit = getattr(plan.tokenizer, "refuse_unfit", None)  # of series
    group_ids = np.zeros(len(drawn), np.int64)
    for dataset, source in read.items():
        reader = reader_of(plan.tokenizer, dataset.loss_mask)
        pieces: defaultdict[str, list[TokenArray]] = defaultdict(list)  # by modality
        places: defaultdict[str, list[int]] = defaultdict(list)
        for at, (owner, stream, document) in enumerate(drawn):
            if owner is dataset:
                documents = dataset.open(stream).documents
                stop = min(int(documents.lengths[document]), depth * seq_len)
                piece = TokenTable.read(documents, document, 0, stop)  # with the marks of a mask
                if refuse_unfit is not None:
                    refuse_unfit(stream.path, document, 0, piece)
                elif reader is None:  # files may be of several types, which have none in common
                    IdBounds.of(stream.path, plan.tokenizer).check(piece, int(documents.starts[document]))
                    piece = piece.astype(np.int64)
                pieces[stream.modality].append(piece)
                places[stream.modality].append(at)
        in_memory = {}
        for modality, own in pieces.items():
            path, numbers = f"documents drawn of {modality}", np.arange(len(own))
            if reader is None:
                table = table_from_pieces(own, plan.tokenizer.vocab_size, where=path)
            else:
                table = reader.table(own, where=path)
            groups = build_groups(table.lengths, numbers, path, CutOptions(source.name, seq_len))
            in_memory[path] = OpenStream(Stream(0, path, path, modality), table, groups, seq_len, len(table.tokens))
            group_ids[places[modality]] = groups.ids_of(numbers)
        if in_memory:
            part = replace(source, streams=[each.stream for each in in_memory.values()])
            made.append(make_held_out(plan, part, info, in_memory=in_memory))
    return made, group_ids.tolist()
