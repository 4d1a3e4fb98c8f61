"""`CarryProbe` measures the gain of carrying states and the cost of their age.

    probe = CarryProbe(model, token_loss=token_loss, cells=8, cell_tokens=seq_len)
    ...
    state = ledger.lookup(batch.group_ids, batch.cell_index)
    groups = {"group_ids": batch.group_ids, "cell_index": batch.cell_index}
    probe.measure({"tokens": batch.tokens}, batch.targets, **groups, tokens_before=batch.tokens_before,
                  state=state, age=ledger.lookup_age())
    ...forward, backward, store...
    numbers = reduce_over_ranks(probe.drain_metrics(), probe.metric_keys, device="cpu", world_size=1)

A stored state was made by the weights of earlier steps. The probe recomputes it from the group's
first token with the current weights, and evaluates the cell from zero, from the stored state and
from the fresh one. It has no gradient, runs in evaluation mode, leaves mode and generators as they
were, changes no state, and communicates only as a model in shards does.
It could go once stale states are shown to cost nothing.

`Depth` measures in an evaluation the loss against depth: the worth of the carried state by the
tokens that it has seen.

The depth of a target is the number of tokens of its document before it, counted from where the
state was zero: the beginning of the document, or of its part where `max_group_cells` cuts it. Each
cell that continues a document is run a second time, from a zero state: the target at place t of the
cell then has a context of t tokens, as if the state were reset at each cell. Those of a first cell
have the same loss in both.

Losses are cross-entropies, or what replaces them. Their errors, and those of the paired difference,
are over documents as independent draws: the `Moments.wide_error` of a ratio of sums, with the
weights 1 / probability of sampled documents (1 where the set is read whole). Parts of one document
are one unit, as are documents of a drawn file, and those of a packed row.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer.arrays import IGNORED, Flags, Ints
from trainer.data.batch import Carry, MicroBatch
from trainer.metrics.aggregate import Moments, Reported, SumCount
from trainer.metrics.best_effort import BestEffort, SkipBatch
from trainer.model.protocol import evaluating
from trainer.on_device import to_device
from trainer.options import PROBED_CELLS
from trainer.training.evaluator import EvalRider, Evaluator, RowResults
from trainer.training.extension import Extension
from trainer.training.setup.parts import autocast_context

if TYPE_CHECKING:
    from trainer.training.run import Run

# Means over the probed cells, each with its standard error as `<key>_se`.
SAMPLED_KEYS = ("ledger/state_age", "ledger/state_drift", "ledger/carry_gain", "ledger/stale_gap")
SHARE_KEY, TIME_KEY = "ledger/probe_share", "time/probe_sec"
_LOSSES = 3  # forwards that compare losses, besides those that read cells again
_SKIP = 1_000_000  # the answer of a rank that cannot measure a micro-batch: no rank then does
_KNOWN_INPUTS = {"tokens", "resets"}  # those that the probe can give for earlier cells too


class CarryProbe:
    """Measures one micro-batch between two drains.

    Cells that measure are those whose group began at most `cells` cells ago, all of which are read
    again, and for which a state was held. The rows keep their places and earlier cells the shape
    [B, T]: with a learning rate of 0, and cells that were read in batches of that shape, the same
    kernels give the same bits, and drift and gap are exactly 0. With dropout they are not, since
    stored states were made with it; under torch.compile, whose uncompiled form is run, a drift of
    the size of rounding remains.

    With `agree`, every rank must call `measure` with every micro-batch of a probed step. Call it
    outside of autocast: weights converted without a gradient must not be kept for the step.
    """

    metric_keys = (*SAMPLED_KEYS, SHARE_KEY)

    def __init__(
        self,
        model: nn.Module,  # that is trained, without DDP
        *,
        # logits [B, T, V], targets [B, T] -> losses [B, T], 0 where masked; None: not known, so
        # that neither gain nor gap is
        token_loss: Callable[[Tensor, Tensor], Tensor | None],
        cells: int,  # most that are read again before a probed one
        cell_tokens: int,  # T, which every cell before a probed one has
        # the largest of the ranks' numbers, if every rank must run as many forwards
        agree: Callable[[int], int] | None = None,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,  # of the forwards
    ) -> None:
        assert min(cells, cell_tokens) >= 1, (cells, cell_tokens)
        self._model, self._token_loss = model, token_loss
        self._cells, self._length = cells, cell_tokens
        self._agree, self._autocast = agree, autocast
        self._sampled: dict[str, Reported] = {}
        self._num_probed: float | Tensor = 0.0
        self._num_continuing = 0

    def measure(
        self,
        inputs: Mapping[str, Any],  # of the model but the state: `tokens` int64 [B, T] and others
        targets: Tensor,  # int64 [B, T]
        *,
        group_ids: Ints,  # int64 [B], as the ledger gets them, like `cell_index`
        cell_index: Ints,
        tokens_before: Tensor | None,  # int64 [B, n] of the row's earlier cells, right-aligned
        resets_before: Tensor | None = None,  # bool [B, n], where the state resets among them
        state: Tensor,  # [B, state_width], from the ledger
        age: Tensor,  # int64 [B] steps since it was stored; negative where no state was held
    ) -> None:
        """Measure a micro-batch that is about to be trained on; nothing if one was measured since
        the last drain. Raises SkipBatch: the batch does not have what is needed.

        Cells before are full, T tokens; those further back than n // T are not read again.
        """
        cells_before: Ints = np.where(np.asarray(group_ids) >= 0, np.asarray(cell_index), 0)
        try:  # reads nothing from the device
            is_exact = self._exact_rows(inputs, targets, tokens_before, cells_before)
        except SkipBatch:
            if self._agree is not None:
                self._agree(_SKIP)
            raise
        cells_read = np.where(is_exact, cells_before, 0)
        depth = own = int(cells_read.max(initial=0))
        if self._agree is not None:
            depth = self._agree(own)
        if depth == 0 or depth >= _SKIP:
            return
        with self._in_evaluation(targets.device):
            if own == 0:  # this rank runs as often as the others, and measures nothing
                for _ in range(depth + _LOSSES):
                    self._model(**inputs, state=state)
                return
            assert tokens_before is not None
            past = _Past(inputs, tokens_before, resets_before, self._length)
            fresh = torch.zeros_like(state)  # of rows that are not exact anything
            for back in range(depth, 0, -1):
                begun = to_device(cells_read > back, state.device)[:, None]  # the others begin later
                output = self._model(**past.inputs(back), state=torch.where(begun, fresh, 0.0))
                fresh = output.state.to(state.dtype)  # as the ledger would hand it on
            from_zero = self._loss(inputs, targets, torch.zeros_like(state))
            stored_loss = self._loss(inputs, targets, state)
            fresh_loss = self._loss(inputs, targets, fresh)
        is_probed = to_device(is_exact, age.device) & (age >= 0)
        tokens = (targets != IGNORED).sum(dim=1) * is_probed  # [B]
        norm_of = partial(torch.linalg.vector_norm, dim=1, dtype=torch.float64)
        distance, norm = norm_of(state.double() - fresh.double()), norm_of(fresh)
        # A model may return zeros for a state: equal ones have not drifted, and of others no ratio
        # is known.
        has_drift = is_probed & ((norm > 0) | (distance == 0))
        drift = distance / torch.where(norm > 0, norm, 1.0)
        age_key, drift_key, gain_key, gap_key = SAMPLED_KEYS
        self._sampled = {age_key: Moments.of(age, is_probed), drift_key: Moments.of(drift, has_drift)}
        if from_zero is not None and stored_loss is not None and fresh_loss is not None:
            self._sampled[gain_key] = Moments.of((from_zero - stored_loss).sum(dim=1), tokens)
            self._sampled[gap_key] = Moments.of((stored_loss - fresh_loss).sum(dim=1), tokens)
        self._num_probed = self._num_probed + is_probed.sum()

    def drain_metrics(self) -> dict[str, Reported]:
        """The numbers since the last drain; {} if nothing was measured."""
        drained = dict(self._sampled)
        if self._num_continuing:
            drained[SHARE_KEY] = SumCount(self._num_probed, self._num_continuing)
        self._sampled, self._num_probed, self._num_continuing = {}, 0.0, 0
        return drained

    def _exact_rows(
        self, inputs: Mapping[str, Any], targets: Tensor, tokens_before: Tensor | None, cells_before: Ints
    ) -> Flags:
        """Which rows can be read again from their group's beginning, bool [B]; none if some were
        since the last drain. Raises SkipBatch: the batch does not have what is needed."""
        if self._sampled or not cells_before.any():  # one micro-batch between two drains is enough
            return np.zeros(cells_before.shape, dtype=np.bool_)
        length = self._length
        # The cells before rows of another length would be cut in the wrong places, and the numbers
        # would still look right.
        if targets.shape[1] != length:
            raise SkipBatch(f"rows of {length} tokens are needed, got {targets.shape[1]}")
        if tokens_before is None:
            raise SkipBatch("the data set gives no tokens_before (docs/ledger.md)")
        given = tokens_before.shape[1]
        if given < length:
            raise SkipBatch(f"tokens_before has {given} tokens, less than a cell of {length}")
        unknown = sorted(inputs.keys() - _KNOWN_INPUTS)
        if unknown:
            raise SkipBatch(f"the model's input {', '.join(unknown)} is not known for earlier cells")
        self._num_continuing += int((cells_before > 0).sum())
        exact: Flags = (cells_before > 0) & (cells_before <= min(self._cells, given // length))
        return exact

    def _loss(self, inputs: Mapping[str, Any], targets: Tensor, state: Tensor) -> Tensor | None:
        found = self._token_loss(self._model(**inputs, state=state).logits, targets)
        return None if found is None else found.double()

    @contextmanager
    def _in_evaluation(self, device: torch.device) -> Iterator[None]:
        # Module by module: some may be in evaluation mode while the others train.
        modes = [(module, module.training) for module in self._model.modules()]
        fork = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with torch.no_grad(), fork, torch.compiler.set_stance("force_eager"), self._autocast():
            try:
                with evaluating(self._model):
                    yield
            finally:
                for module, mode in modes:
                    module.training = mode


class _Past:
    """The model's inputs for the cells of `length` tokens before a row, where earlier cells get the
    same ones as the row itself (`inputs`). `tokens`, `resets`: [B, n] before the row."""

    def __init__(self, inputs: Mapping[str, Any], tokens: Tensor, resets: Tensor | None, length: int) -> None:
        self._tokens, self._length, self._resets = tokens, length, None
        if "resets" in inputs:
            self._resets = resets
            if resets is None:
                self._resets = torch.zeros_like(tokens, dtype=torch.bool)

    def inputs(self, back: int) -> dict[str, Any]:
        """Those of the cell that is `back` cells before the row's."""
        given: dict[str, Any] = {"tokens": self._cell(self._tokens, back)}
        if self._resets is not None:
            given["resets"] = self._cell(self._resets, back)
        return given

    def _cell(self, values: Tensor, back: int) -> Tensor:
        stop = values.shape[1] - (back - 1) * self._length
        cell = values[:, max(stop - self._length, 0) : stop]
        # Before the first cell that is known no row has begun: nothing of the padding is read.
        return nn.functional.pad(cell, (self._length - cell.shape[1], 0))


class StepProbe(Extension):
    """Probes the training step every `ledger.probe_every` steps that log."""

    metric_keys = (*CarryProbe.metric_keys, TIME_KEY)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.measure_every = run.config.ledger.probe_every
        self._probes = [
            CarryProbe(
                run.row_model,
                token_loss=lambda output, targets: run.loss(output, targets).token_loss,
                cells=PROBED_CELLS,
                cell_tokens=run.config.row_tokens,
                agree=run.strategy.most,
                autocast=autocast_context(run.config, run.device),
            )
            for _ in run.state.shards
        ]
        self._seconds = 0.0

    def state_found(self, micro: MicroBatch, carry: Carry, state: Tensor) -> None:
        ledger = self.run.ledger_of(micro)
        assert ledger is not None
        with self.run.tracker.outside():
            began = self._clock()
            try:
                self._probes[micro.shard].measure(
                    micro.inputs,
                    micro.targets,
                    group_ids=carry.group_ids,
                    cell_index=carry.cell_index,
                    tokens_before=micro.extras.get("tokens_before"),
                    resets_before=micro.extras.get("resets_before"),
                    state=state,
                    age=ledger.lookup_age(),
                )
            finally:
                self._seconds += self._clock() - began

    def drain_metrics(self) -> Mapping[str, Reported]:
        """The time of what was measured, which each data shard counts; {} if nothing was."""
        found = [probe.drain_metrics() for probe in self._probes]
        for shard, drained in enumerate(found):
            self.run.position.unlogged[shard].add(drained)
        seconds, self._seconds = self._seconds, 0.0
        return {TIME_KEY: seconds} if any(found) else {}

    def _clock(self) -> float:
        """Seconds, once the device has done what was queued: the few steps that probe also log."""
        if self.run.device.type == "cuda":
            torch.cuda.synchronize(self.run.device)
        return time.perf_counter()


NUM_BUCKETS = 40  # [0, 1), [1, 2), [2, 4), ...: more than any document has
HELD_ON_DEVICE = 64  # micro-batches whose sums are fetched together
Floats = NDArray[np.float64]
Unit = tuple[str | int, ...]  # its groups count as one draw: a document in parts, or a drawn file
Part = tuple[int, Floats, dict[Unit, Floats]]


def bucket_start(index: int) -> int:
    return 1 << index >> 1


def depths(tokens_before: Tensor, num_tokens: int, resets: Tensor | None) -> Tensor:
    """The depth of each target of rows before which their groups had so many tokens [B]; int64 [B,
    num_tokens]. `resets`: bool [B, num_tokens]; None: the model takes none."""
    places = torch.arange(num_tokens, device=tokens_before.device)  # of the row
    found = tokens_before[:, None] + places
    if resets is None:
        return found
    last = torch.where(resets, places, -1).cummax(1).values  # -1: none so far
    return torch.where(last < 0, found, places - last)


def buckets(micro: MicroBatch) -> Tensor:
    """The bucket of each target of a micro-batch with groups; int64 [B, T]."""
    assert micro.carry is not None
    num_tokens = micro.targets.shape[1]
    before = torch.from_numpy(micro.carry.tokens_before(num_tokens)).to(micro.targets.device)
    depth = depths(before, num_tokens, micro.inputs.get("resets"))
    return torch.frexp(depth.double()).exponent.long()  # at least 2 ** (exponent - 1), or 0


class Depth(EvalRider):
    """Measures one set."""

    def __init__(self, sample: Any, guard: BestEffort, *, is_cut: bool) -> None:
        self._sample = sample  # an `evaluation_sample.Sample`; None: the set is read whole
        self._guard = guard  # of the sums; a failure on any rank turns it off on all
        self._is_cut = is_cut  # groups may be parts of documents
        self._is_off = False  # the same on all ranks

    def begin(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._cell = 0
        self._by_group: dict[int, Floats] = {}
        self._cut: dict[int, Unit] = {}
        self._waiting: list[tuple[list[int], Tensor]] = []

    def micro_done(self, micro: MicroBatch, state: Tensor | None, results: RowResults) -> None:
        """Run the rows from zero if any continues a document, and note the sums of each."""
        if self._is_off or state is None or micro.carry is None:  # nothing is carried
            return
        continues = (micro.carry.cell_index > 0) & (micro.carry.group_ids >= 0)
        from_zero, evaluator = None, self._evaluator
        # A model in shards runs on all ranks or on none.
        if evaluator.strategy.most(int(continues.any())):
            logits = evaluator.model(**micro.inputs, state=torch.zeros_like(state)).logits
            from_zero = evaluator.objective(logits, micro.targets, meta=micro.located).token_loss
        self._guard.run(self._add, micro, results, from_zero, continues)

    def _add(self, micro: MicroBatch, results: RowResults, from_zero: Tensor | None, continues: Flags) -> None:
        assert micro.carry is not None
        targets = micro.targets
        losses = torch.zeros(targets.shape, dtype=torch.float64, device=targets.device)
        for rows, result in results:
            if result.token_loss is None:
                raise SkipBatch("the loss is not known per token")
            losses[rows] = result.token_loss.double()
        is_continued = torch.from_numpy(continues).to(targets.device)[:, None]
        zero = losses
        if from_zero is not None:
            zero = torch.where(is_continued, from_zero.double(), losses)
        columns = torch.stack([(targets != IGNORED).double(), losses, zero], dim=-1)  # [B, T, 3]
        bucket = buckets(micro)[:, :, None].expand(-1, -1, 3)
        sums = columns.new_zeros(len(targets), NUM_BUCKETS, 3).scatter_add_(1, bucket, columns)
        beyond = columns.sum(1) * is_continued  # [B, 3]
        groups = micro.carry.group_ids.tolist()
        located: Any = micro.located
        if self._is_cut:
            for group, segments in zip(groups, located.rows, strict=True):
                for each in segments:
                    self._cut[group] = (each.source, each.stream, each.document)
        self._waiting.append((groups, torch.cat([sums, beyond[:, None]], dim=1)))
        self._cell = targets.shape[1]
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
        shared: dict[Unit, Floats] = {}
        for group, sums in self._by_group.items():
            unit, weight = self._cut.get(group), 1.0
            if self._sample is not None:
                at = self._sample.groups.get(group)
                if at is None:  # a row that fills up a batch
                    continue
                # 1 / probability of being drawn
                unit, weight = self._sample.units[at], self._sample.weights[at]
            if unit is None:
                alone.append(weight * sums)
            else:
                shared[unit] = shared.get(unit, 0.0) + weight * sums
        return self._cell, _moments(alone), shared

    def metrics(self, by_rank: Sequence[Any]) -> dict[str, float]:
        """`depth/<first depth of a bucket>/...`; empty if no document is longer than a cell."""
        self._is_off = self._is_off or any(part is None for part in by_rank)
        return {} if self._is_off else self._guard.run(self._metrics, by_rank) or {}

    def _metrics(self, by_rank: Sequence[Any]) -> dict[str, float]:
        cell = max(length for length, *_ in by_rank)
        units: dict[Unit, Any] = {}
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
                start = bucket_start(index)
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
