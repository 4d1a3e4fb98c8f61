"""Evaluation on an unbiased sample of a set that is too large to be read whole.

Documents are drawn in proportion to their tokens, copied, and weighted by 1 / probability.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.arrays import Ints
from trainer.data.batch import MicroBatch
from trainer.data.documents import TokenTable, table_from_pieces
from trainer.data.groups import GroupTable, OpenStream, file_bytes
from trainer.data.layout import Stream
from trainer.data.shard_source import ShardSource
from trainer.distributed.env import RankInfo
from trainer.metrics.aggregate import FEWEST_UNITS, Moments, widened
from trainer.metrics.logger import get_logger
from trainer.training.evaluator import EvalRider, Evaluator, RowResults
from trainer.training.setup.plan import Plan
from trainer.training.setup.sources import Source, make_held_out
from trainer.wording import counted

logger = get_logger(__name__)
COUNTED_BYTES = 2_000_000_000  # of a set's files whose documents are counted when a run starts, at most
FORWARDS = 3  # the work of a training step, in forward passes
LEAST = 8  # documents, or files, that are drawn by chance: the error needs as many


class Drawn(NamedTuple):
    """Some of a population of N, drawn without replacement."""

    chosen: Ints  # ascending, int64 [n]
    chances: npt.NDArray[np.float64]  # the probability that each was drawn, [n]
    spread: float  # sum of the squared probabilities below 1, over the population


def chances_of(sizes: npt.NDArray[Any], num: int) -> npt.NDArray[np.float64]:
    """The probability of each in a population to be among `num` drawn by size; sizes > 0; float64 [N].

    Those that are too large for that are always drawn: 1.
    """
    certain = np.full(len(sizes), num >= len(sizes))
    while not certain.all():
        left = num - np.count_nonzero(certain)
        chances = np.where(certain, 1.0, left * sizes / sizes[~certain].sum())
        if ((chances >= 1) == certain).all():
            return chances
        certain = chances >= 1
    return np.ones(len(sizes))


def draw_by_size(sizes: npt.NDArray[Any], num: int, generator: np.random.Generator) -> Drawn:
    """Draw `num` in proportion to their sizes: systematically, along a random order (Hartley and Rao 1962)."""
    chances = chances_of(sizes, num)
    order = generator.permutation(len(sizes))
    is_open = chances < 1
    ends = np.cumsum(np.where(is_open, chances, 0.0)[order])
    left = round(float(ends[-1]))
    hits = generator.random() + np.arange(left)
    places = np.searchsorted(
        ends * (left / max(float(ends[-1]), 1e-9)), np.minimum(hits, left * (1 - 1e-12)), side="right"
    )
    chosen = np.sort(np.concatenate([np.flatnonzero(~is_open), order[places]]))
    return Drawn(chosen, chances[chosen], float(np.square(chances[is_open]).sum()))


@dataclass(frozen=True)
class Sample:
    """The documents that were drawn of a set, n of them, with probabilities in proportion to their tokens; of a document that
    `max_group_cells` cuts, each part is drawn by itself.

    Their sums are weighted by 1 / probability, so that those of all metrics have the sums over the whole set as expectations.
    """

    groups: Mapping[int, int]  # group id -> number of the document, from 0
    tokens: Ints  # of each, int64 [n]
    chances: npt.NDArray[np.float64]  # of each to be drawn, [n]; 1: always
    spread: float  # see `Drawn`
    # The file of each, numbers from 0, [n], if documents were drawn from some of the files alone.
    files: Ints | None = None
    file_chances: npt.NDArray[np.float64] | float = 1.0  # the probability that its file was drawn, [n]
    documents: Ints | None = None  # of which document each is, numbers from 0, [n]; None: each is one

    def parts(self, micro: MicroBatch) -> Iterator[tuple[slice, MicroBatch, float]]:
        """The rows of a micro-batch one by one, each with its weight, without masked ones."""
        assert micro.carry is not None
        for row, group in enumerate(micro.carry.group_ids.tolist()):
            if (document := self.groups.get(group)) is not None:
                rows = slice(row, row + 1)
                yield rows, micro.rows(rows), float(self.weights[document])

    @cached_property
    def weights(self) -> npt.NDArray[np.float64]:
        """The factors on the sums of each document, [n]."""
        return 1 / (self.chances * self.file_chances)

    @cached_property
    def units(self) -> list[tuple[int, ...] | None]:
        """The file or document that each is a part of, if others may be too: they are no independent draws."""
        found = self.files if self.files is not None else self.documents
        if found is None:
            return [None] * len(self.tokens)
        is_shared = (np.bincount(found)[found] > 1) | (self.files is not None)
        units: list[tuple[int, ...] | None] = [(int(unit),) for unit in found]
        for number in np.flatnonzero(~is_shared):
            units[number] = None
        return units

    def error(self, losses: npt.NDArray[np.float64]) -> float | None:
        """The error of the mean loss per token against the whole set's, `widened`; None if unknown.

        Of documents, Hartley and Rao's (1962), with the correction for a finite set: 0 for those
        that are always drawn. Of documents in drawn files, that of a ratio of sums over the files
        (see `Moments`). `losses`: the sum over each document's tokens, [n].
        """
        means, parts = losses / self.tokens, self.tokens * self.weights
        if self.files is not None:
            totals = [torch.from_numpy(np.bincount(self.files, weights)) for weights in (parts * means, parts)]
            error = Moments.of(*totals).wide_error()
            return None if math.isnan(error) else error
        is_open = self.chances < 1
        means, chances, num = means[is_open], self.chances[is_open], np.count_nonzero(is_open)
        if num < FEWEST_UNITS:
            return None
        means = means - means.mean()
        squares = means @ means
        # Over pairs i < j: (1 - chance_i - chance_j + spread / n) (mean_i - mean_j)^2.
        pairs = (1 + self.spread / num) * num * squares
        pairs -= num * (chances @ np.square(means)) + chances.sum() * squares
        share = parts[is_open].sum() / parts.sum()
        return widened(float(share * np.sqrt(np.maximum(pairs, 0.0) / (num * num * (num - 1)))), float(num - 1))


class SampledLosses(EvalRider):
    """The error of the loss of a sample."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample

    def begin(self, evaluator: Evaluator) -> None:
        """Forget the last evaluation."""
        self._guard = evaluator.guard
        self._by_rows = [name for name, each in evaluator.auxiliary.losses.items() if each.by == "rows"]
        self._sums: list[tuple[int, Tensor]] = []

    def micro_done(self, micro: MicroBatch, state: Tensor | None, results: RowResults) -> None:
        """Note each row's document, its loss, and those by rows."""
        assert micro.carry is not None
        groups = micro.carry.group_ids.tolist()
        for rows, each in results:
            parts = [each.parts[name] for name in self._by_rows if name in each.parts]
            nothing = each.loss_sum.new_zeros((), dtype=torch.float64)
            num_rows = parts[0].num_tokens.double() if parts else nothing
            sums = [each.loss_sum.double(), sum((part.sum.double() for part in parts), nothing), num_rows]
            self._sums.append((self.sample.groups[groups[rows.start]], torch.stack(sums)))

    def part(self) -> npt.NDArray[np.float64] | None:
        """The loss of each document's rows on this rank, their losses by rows, and their number, [3, n].
        Waits for the device."""
        return self._guard.run(self._by_document)

    def _by_document(self) -> npt.NDArray[np.float64]:
        values = (
            torch.stack([value for _, value in self._sums], dim=1).cpu().numpy() if self._sums else np.zeros((3, 0))
        )
        documents = np.array([document for document, _ in self._sums], dtype=np.int64)
        return np.array([np.bincount(documents, row, minlength=len(self.sample.tokens)) for row in values], np.float64)

    def metrics(self, by_rank: Sequence[Any]) -> dict[str, float]:
        """The error, if it is known."""
        error = self._guard.run(self._error, by_rank)
        return {} if error is None else {"loss_se": error}

    def _error(self, by_rank: Sequence[Any]) -> float | None:
        losses, by_rows, num_rows = np.sum([part for part in by_rank if part is not None], axis=0)
        weights = self.sample.weights
        if (all_rows := weights @ num_rows) > 0:  # the mean of these is another ratio: its residuals, as if of tokens
            mean = weights @ by_rows / all_rows
            losses = losses + (by_rows - mean * num_rows) * (weights @ self.sample.tokens / all_rows)
        return self.sample.error(losses)


class _Documents(NamedTuple):
    """n documents, or parts of at most `max_group_cells` cells, as they are read."""

    files: list[tuple[int, Stream]]  # the index of a data set, and a stream of it
    of_file: Ints  # index of `files`, ascending, [n]
    group: Ints  # number in the file, [n]
    document: Ints  # number among all that were counted, [n]; parts of a document share it
    tokens: Ints  # [n]

    @property
    def num_whole(self) -> int:
        """How many documents they are, whatever their parts."""
        return len(np.unique(self.document))

    def runs(self, seq_len: int, runs: int) -> Ints:
        """Cells to run for each, if every cell but a document's first is run `runs` times; [n]."""
        return 1 + runs * (-(-self.tokens // seq_len) - 1)

    def describe(self) -> str:
        """How many, if all are read."""
        tokens = counted(int(self.tokens.sum()), "token")
        return f"all {counted(self.num_whole, 'document')}, {tokens}"


def _count(datasets: Sequence[ShardSource], files: list[tuple[int, Stream]]) -> _Documents:
    """All documents of these files, which are opened for it."""
    found: list[tuple[Ints, ...]] = [(np.zeros(0, np.int64),) * 4]
    num_whole = 0
    for at, (index, stream) in enumerate(files):
        opened = datasets[index].open(stream)
        groups = opened.groups
        is_first = groups.first_cells == 0
        document, num = num_whole + np.cumsum(is_first) - 1, groups.num_groups
        found.append((np.full(num, at), np.arange(num), document, opened.num_tokens()))
        num_whole += int(np.count_nonzero(is_first))
    return _Documents(files, *map(np.concatenate, zip(*found, strict=True)))


def draw_sample(
    plan: Plan,
    sources: Sequence[Source],
    datasets: Sequence[ShardSource],
    budget: int,
    trained: int,
    runs: int,
    info: RankInfo,
    generator: np.random.Generator,
) -> tuple[str, tuple[list[ShardSource], SampledLosses] | None]:
    """How much of a set is read, in words, and the drawn documents; None: all. Equal on all ranks and at every resume.

    Args:
        datasets: of the sources.
        budget: cells that an evaluation may run, in expectation; but `LEAST` documents are read, or all of the set where
            so few are left besides those that always are.
        trained: cells that a rank trains on between two evaluations, for a warning.
        runs: of each cell but a document's first.
    """
    seq_len = plan.config.data.seq_len
    files = [(index, stream) for index, dataset in enumerate(datasets) for stream in dataset.streams]
    sizes = np.array([max(file_bytes(stream), 1) for _, stream in files], dtype=np.int64)
    num_files = max(LEAST, int(len(files) * COUNTED_BYTES / sizes.sum()))
    drawn = draw_by_size(sizes, num_files, generator)
    # Counting opens the files, which takes long for a large set: only of some that are drawn first.
    documents = _count(datasets, [files[at] for at in drawn.chosen])
    is_counted = len(drawn.chosen) == len(files)
    num_runs = documents.runs(seq_len, runs)
    covered = {documents.files[at][0] for at in np.unique(documents.of_file)}
    # All of a set says which data set has no document.
    is_whole = len(documents.tokens) <= LEAST or num_runs.sum() <= budget or len(covered) < len(datasets)
    if len(documents.tokens) == 0 or (is_counted and is_whole):
        return _warned(plan, documents.describe(), num_runs, trained), None
    num_all, num_whole = len(documents.tokens), documents.num_whole
    file_chances = drawn.chances[documents.of_file]
    represented = documents.tokens / file_chances

    def cost(num: int) -> int:
        return ceil(chances_of(represented, num) @ num_runs)

    num = min(max(LEAST, bisect_right(range(num_all + 1), budget, key=cost, lo=1) - 1), num_all)
    while num < num_all and (missing := LEAST + np.count_nonzero(chances_of(represented, num) == 1) - num) > 0:
        num = min(num + int(missing), num_all)  # of those that are always drawn there are perhaps more now
    if num == num_all and is_counted:
        return _warned(plan, documents.describe(), num_runs, trained), None
    chosen, chances, spread = draw_by_size(represented, num, generator)
    taken = _Documents(documents.files, *(column[chosen] for column in documents[1:]))
    parts = counted(num_whole, "document")
    if num_whole != num_all:
        parts = f"{num_all:,} parts of {parts}"
    read = f"{num:,} of {parts}, {int(taken.tokens.sum()):,} of {int(documents.tokens.sum()):,} tokens"
    copied, groups = _copied(plan, sources, info, datasets, taken)
    sample = Sample(groups, taken.tokens, chances, spread, documents=taken.document)
    if not is_counted:
        read += f", in {len(drawn.chosen):,} of {len(files):,} files"
        sample = replace(sample, files=taken.of_file, file_chances=file_chances[chosen])
    return _warned(plan, read, num_runs[chosen], trained), (copied, SampledLosses(sample))


def _warned(plan: Plan, read: str, num_runs: Ints, trained: int) -> str:
    """`read`; warns first if these cells take longer than the training between evaluations."""
    times = int(num_runs.sum()) / plan.facts.data_shards / (FORWARDS * trained)
    if times > 1 and plan.facts.steps > 1:  # a run's, not that of `train eval`
        text = "eval.every: an evaluation reads %s, %.1f times the work of the steps between; raise it"
        logger.warning(text, read, times)
    return read


def _copied(
    plan: Plan, sources: Sequence[Source], info: RankInfo, datasets: Sequence[ShardSource], documents: _Documents
) -> tuple[list[ShardSource], dict[int, int]]:
    """Data sets of copies of the documents, which fill batches whatever files they are from; group id -> document."""
    made: list[ShardSource] = []
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
            made.append(make_held_out(plan, part, info, in_memory=in_memory))
    return made, numbers


def _copy(dataset: ShardSource, documents: _Documents, those: Sequence[int], stream: Stream, plan: Plan) -> OpenStream:
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
    numbers = np.arange(len(tokens))
    groups = GroupTable(dataset.name, stream.relative_path, numbers, first, num_cells)
    copied = TokenTable(table.tokens, begins, first * seq_len + tokens)
    return OpenStream(stream, copied, groups, seq_len, len(table.tokens))
