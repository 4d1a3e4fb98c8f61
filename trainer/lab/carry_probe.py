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
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.arrays import IGNORED, Flags, Ints
from trainer.metrics.aggregate import Moments, Reported, SumCount
from trainer.metrics.best_effort import SkipBatch
from trainer.model.protocol import evaluating
from trainer.on_device import to_device
from trainer.options import PROBED_CELLS
from trainer.training.extension import Extension
from trainer.training.setup.parts import autocast_context

if TYPE_CHECKING:
    from trainer.data.batch import Carry, MicroBatch
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
        inputs: Mapping[str, Any],  # of the model besides the state: `tokens` int64 [B, T] and others
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
