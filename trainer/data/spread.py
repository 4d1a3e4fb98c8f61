"""How many sets of lanes full rows have: enough that the rows of a step, and of the steps that
follow, are of different documents.

A shard reads its k-th micro-batch from set k mod g, each of B lanes. With g = c m, where m
micro-batches make a step, the next row of a document comes c steps later: c is the spread. More
lanes than a source has documents would put copies of one document into a step, so that few
documents, or little memory for the states of the lanes, make g smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.data.documents import ReadOptions
from trainer.data.formats import is_read_whole
from trainer.data.groups import CutOptions, file_bytes, open_stream
from trainer.data.layout import Stream
from trainer.errors import UserError
from trainer.hashing import keyed_generator

DOCUMENTS_PER_LANE = 4
"""Documents of a source for each lane that its share gives it, at least."""
COUNTED_FILES = 16
"""Files that are opened to count documents; of more, the number is estimated by their bytes."""
MOST_OPEN = 256
OPEN_BYTES = 1 << 30
FEWEST_OPEN = 4


@dataclass(frozen=True)
class LaneLimit:
    """So many lanes a shard can have, and what limits them."""

    lanes: float
    reason: str


def num_sets(m: int, rows: int, spread: int, limits: Iterable[LaneLimit]) -> tuple[int, str]:
    """Sets of `rows` lanes for steps of m micro-batches, and what limits them ("" if nothing).

    The largest of spread * m, half of that, ..., m, and the divisors of m that the limits allow; 1
    if they allow none.
    """
    limit = min(limits, key=lambda each: each.lanes, default=LaneLimit(math.inf, ""))
    wanted = [(spread >> at) * m for at in range(spread.bit_length())]
    wanted += [m // parts for parts in range(2, m + 1) if m % parts == 0]
    found = next((number for number in wanted if number * rows <= limit.lanes), 1)
    return found, limit.reason if found < wanted[0] else ""


def count_documents(streams: Sequence[Stream], cut: CutOptions, read: ReadOptions) -> float:
    """Documents of a source in an epoch, over all shards; exact for up to `COUNTED_FILES` files.

    Of more, some are drawn and opened: the others have as many documents by the byte, at least one
    each. Raises UserError: a file is damaged.
    """
    sizes = np.array([file_bytes(stream) for stream in streams], np.int64)
    order = keyed_generator("count", cut.namespace).permutation(len(streams))
    drawn, others = order[:COUNTED_FILES], order[COUNTED_FILES:]
    counts = []
    for at in drawn:
        try:
            counts.append(len(np.unique(open_stream(streams[at], read, cut).groups.documents)))
        except UserError as error:
            error.where = f"source {cut.namespace}"
            raise
    by_byte = sum(counts) / max(int(sizes[drawn].sum()), 1)
    if max(counts) <= 1:  # each file is a document
        by_byte = 0.0
    kept = 1.0 - cut.holdout_fraction
    return sum(counts) + float(np.maximum(sizes[others] * by_byte, kept).sum())


def documents_drawn_from(documents: Mapping[str, float], shares: Mapping[str, float]) -> float:
    """So many documents of a single source would vary as much: 1 / sum(share^2 / documents)."""
    found = sum(shares[name] ** 2 / count for name, count in documents.items() if count)
    return 1.0 / found if found else 0.0


def document_limits(documents: Mapping[str, float], shares: Mapping[str, float], num_shards: int) -> list[LaneLimit]:
    """By source, from its documents in an epoch and the largest share of the tokens that it gets."""
    found = []
    for name, count in documents.items():
        if shares[name] > 0:
            lanes = count / (DOCUMENTS_PER_LANE * num_shards * shares[name])
            found.append(LaneLimit(lanes, f"the source {name} has about {count:,.0f} documents"))
    return found


def streams_open(streams: Sequence[Stream], lanes: int, read: ReadOptions) -> int:
    """How many streams of a source are open at once by default: one for each lane.

    At most `MOST_OPEN`, and of files that are read whole at their opening `OPEN_BYTES` (others cost
    their index, about a hundredth of their size), but at least `FEWEST_OPEN`.
    """
    costs = []
    for each in streams:
        is_whole = not each.tokens and is_read_whole(each.path, read)
        costs.append(file_bytes(each) * (1.0 if is_whole else 0.01))
    by_cost = OPEN_BYTES / max(sum(costs) / len(costs), 1.0)
    return min(len(streams), max(FEWEST_OPEN, int(min(lanes, MOST_OPEN, by_cost))))
