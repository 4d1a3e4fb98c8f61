"""`Depth` measures in an evaluation the loss against depth: the worth of the carried state by the
tokens that it has seen.

The depth of a target is the number of tokens of its document before it, counted from where the
state was zero. Each cell that continues a document is run a second time, from a zero state: the
target at place t of the cell then has a context of t + 1 tokens, as if the state were reset at
each cell. Those of a first cell have the same loss in both.

Losses are cross-entropies, or what replaces them. Their errors, and those of the paired difference,
are over documents as independent draws: the `Moments.wide_error` of a ratio of sums. Documents of a
drawn file are one unit, as are those of a packed row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.arrays import Flags, weights_of
from trainer.data.loader import MicroBatch
from trainer.lab.moments import Moments
from trainer.metrics.best_effort import BestEffort, SkipBatch
from trainer.objective import ObjectiveOutput
from trainer.training.evaluator import EvalRider, Evaluator

NUM_BUCKETS = 40  # [0, 1), [1, 2), [2, 4), ...: more than any document has
HELD_ON_DEVICE = 64  # micro-batches whose sums are fetched together
Floats = NDArray[np.float64]
Part = tuple[int, Floats, dict[int, Floats]]


def depths(tokens_before: Tensor, num_tokens: int, resets: Tensor | None) -> Tensor:
    """The depth of each target of rows before which their groups had so many tokens [B]; int64 [B,
    num_tokens]. `resets`: bool [B, num_tokens]; None: the model takes none."""
    places = torch.arange(num_tokens, device=tokens_before.device)  # of the row
    found = tokens_before[:, None] + places
    if resets is None:
        return found
    last = torch.where(resets, places, -1).cummax(1).values  # -1: none so far
    return torch.where(last < 0, found, places - last)


class Depth(EvalRider):
    """Measures one set."""

    def __init__(self, sample: Any, guard: BestEffort) -> None:
        self._sample = sample  # an `evaluation_sample.Sample`; None: the set is read whole
        self._guard = guard  # of the sums; a failure on any rank turns it off on all
        self._is_off = False  # the same on all ranks

    def begin(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._cell = 0
        self._by_group: dict[int, Floats] = {}
        self._waiting: list[tuple[list[int], Tensor]] = []

    def micro_done(self, micro: MicroBatch, state: Tensor | None, result: ObjectiveOutput) -> None:
        """Run the rows from zero if any continues a document, and note the sums of each."""
        from_zero, evaluator, carry = None, self._evaluator, micro.carry
        if self._is_off or evaluator.make_ledger is None:  # nothing is carried, on any rank
            return
        continues = np.zeros(len(micro.targets), np.bool_)
        if carry is not None:
            continues = (carry.cell_index > 0) & (carry.group_ids >= 0)
        # A model in shards runs on all ranks or on none.
        if evaluator.strategy.most(int(continues.any())):
            zeros = None if state is None else torch.zeros_like(state)
            logits = evaluator.model(**micro.inputs, state=zeros).logits
            from_zero = evaluator.objective(logits, micro.targets, meta=micro.located).token_loss
        if carry is not None:
            self._guard.run(self._add, micro, result.token_loss, from_zero, continues)

    def _add(self, micro: MicroBatch, token_loss: Tensor | None, from_zero: Tensor | None, continues: Flags) -> None:
        assert micro.carry is not None
        if token_loss is None:
            raise SkipBatch("the loss is not known per token")
        targets, losses = micro.targets, token_loss.double()
        is_continued = torch.from_numpy(continues).to(targets.device)[:, None]
        zero = losses
        if from_zero is not None:
            zero = torch.where(is_continued, from_zero.double(), losses)
        columns = torch.stack([weights_of(targets).double(), losses, zero], dim=-1)  # [B, T, 3]
        num_tokens = targets.shape[1]
        before = torch.from_numpy(micro.carry.tokens_before(num_tokens)).to(targets.device)
        depth = depths(before, num_tokens, micro.inputs.get("resets"))
        bucket = torch.frexp(depth.double()).exponent.long()  # at least 2 ** (exponent - 1), or 0
        bucket = bucket[:, :, None].expand(-1, -1, 3)
        sums = columns.new_zeros(len(targets), NUM_BUCKETS, 3).scatter_add_(1, bucket, columns)
        beyond = columns.sum(1) * is_continued  # [B, 3]
        groups = micro.carry.group_ids.tolist()
        self._waiting.append((groups, torch.cat([sums, beyond[:, None]], dim=1)))
        self._cell = num_tokens
        if len(self._waiting) == HELD_ON_DEVICE:  # fetching waits for the device
            self._fetch()

    def _fetch(self) -> None:
        # The sums of a group: float64 [NUM_BUCKETS + 1, 3]; the last row: beyond a cell.
        for groups, sums in self._waiting:
            for group, own in zip(groups, sums.cpu().numpy(), strict=True):
                if group >= 0:
                    self._by_group[group] = self._by_group.get(group, 0.0) + own
        self._waiting.clear()

    def part(self) -> Part | None:
        """Cell length, this rank's moments, and the sums of units that ranks share."""
        return self._guard.run(self._part)

    def _part(self) -> Part:
        self._fetch()
        alone: list[Floats] = []
        shared: dict[int, Floats] = {}
        units = None
        if self._sample is not None and not self._sample.share:  # documents of drawn files
            units = self._sample.units
        for group, sums in self._by_group.items():
            if units is None:
                alone.append(sums)
            elif group in units:  # or else a row that fills up a batch
                shared[units[group]] = shared.get(units[group], 0.0) + sums
        return self._cell, _moments(alone), shared

    def metrics(self, by_rank: Sequence[Any]) -> dict[str, float]:
        """`depth/<first depth of a bucket>/...`; empty if no document is longer than a cell."""
        self._is_off = self._is_off or any(part is None for part in by_rank)
        return {} if self._is_off else self._guard.run(self._metrics, by_rank) or {}

    def _metrics(self, by_rank: Sequence[Any]) -> dict[str, float]:
        cell = max(length for length, *_ in by_rank)
        units: dict[int, Any] = {}
        for unit, sums in itertools.chain(*(shared.items() for *_, shared in by_rank)):
            units[unit] = units.get(unit, 0) + sums
        of_units = _moments([units[unit] for unit in sorted(units)])
        total = np.sum([*(moments for _, moments, _ in by_rank), of_units], axis=0)
        beyond = total[NUM_BUCKETS]
        if not beyond[0, 0]:  # no document continues in a second cell
            return {}
        found = _numbers("depth/beyond_cell", beyond[2:], ["carry_gain"])
        for index in range(NUM_BUCKETS):
            if total[index, 0, 0]:
                start = 1 << index >> 1
                kinds = ["loss"]
                if 2 * start > cell:  # in a bucket of first cells alone, nothing is carried
                    kinds += ["loss_from_zero", "carry_gain"]
                found |= _numbers(f"depth/{start}", total[index], kinds)
        return found


def _moments(units: Sequence[Any]) -> Floats:
    """Per bucket `Moments` of carried, from zero, difference; float64 [NUM_BUCKETS + 1, 3, 6]."""
    # [units, buckets, (tokens, carried, from zero)]
    table = np.array(units, dtype=np.float64).reshape(-1, NUM_BUCKETS + 1, 3)
    tokens = table[:, :, :1]
    totals = np.concatenate([table[:, :, 1:], table[:, :, 2:] - table[:, :, 1:2]], axis=2)
    tokens = np.broadcast_to(tokens, totals.shape)
    moments = np.stack([tokens > 0, totals, tokens, totals**2, totals * tokens, tokens**2], axis=-1)
    return np.asarray(moments.sum(0), dtype=np.float64)


def _numbers(prefix: str, moments: Floats, names: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, each in zip(names, moments, strict=False):
        one = Moments(*each.tolist())
        found[f"{prefix}/{name}"] = one.mean()
        error = one.wide_error()
        if not math.isnan(error):
            found[f"{prefix}/{name}_se"] = error
    return found
