"""Forward and backward of a window: its gradient, its sums, and its states into the ledger. Nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.ledger.ledger import Ledger
from trainer.metrics.noise_scale.hooks import GradientNoiseScale
from trainer.objective.compose import Objective
from trainer.training.step.details import StepDetails
from trainer.training.step.microbatch import IGNORED, MicroBatch


@dataclass
class WindowSums:
    """What this rank's window comes to, beside the gradients in the parameters."""

    micros: Sequence[MicroBatch]
    details: StepDetails
    loss_sum: Tensor
    """Of all tokens, [] float64 on the device."""
    tokens: Tensor
    """Their number, [] float64 on the device."""
    ready_at: float = 0.0
    """When it came to the last backward, less the time for which the ledger's exchanges held it up until then."""


class Accumulator:
    """Accumulates the gradient of windows; the arguments are those of `TrainStep`.

    Args:
        kappa: factor on the loss.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        ledger: Ledger | None,
        objective: Objective,
        gns: GradientNoiseScale | None,
        scaler: torch.amp.GradScaler,
        kappa: float,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[None]],
        details: Callable[[bool], StepDetails],
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._ledger = ledger
        self._objective = objective
        self._gns = gns
        self._scaler = scaler
        self._kappa = kappa
        self._device = device
        self._autocast = autocast
        self._make_details = details
        self._clock = clock
        self._exchange_sec = 0.0

    def run(self, step: int, window: Sequence[MicroBatch], *, will_log: bool) -> WindowSums:
        """See `TrainStep.forward_backward`."""
        self._exchange_sec = 0.0
        if self._ledger is not None:
            self._ledger.begin_step(step)
        if self._gns is not None:
            self._gns.begin_window(len(window))
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        sums = WindowSums(window, self._make_details(will_log), loss_sum=zero, tokens=zero.clone())
        for index, micro in enumerate(window):
            self._accumulate(micro, sums, is_last=index == len(window) - 1)
        return sums

    def _accumulate(self, micro: MicroBatch, sums: WindowSums, *, is_last: bool) -> None:
        """Forward, backward and store of one micro-batch."""
        row_tokens = (micro.targets != IGNORED).sum(dim=1)  # [B]
        state = None
        if self._ledger is not None and micro.carry is not None:
            with self._exchange_timed(self._ledger):
                state = self._ledger.lookup(micro.carry.group_ids, micro.carry.cell_index)  # [B, state_width]
        with self._without_sync(is_last):
            with self._autocast():
                output = self._model(**micro.inputs, state=state)
                result = self._objective(output.logits, micro.targets, meta=micro.meta)
            if self._gns is not None:
                self._gns.begin_micro(is_last)
            scaled: Any = self._scaler.scale(result.loss_sum * self._kappa)  # torch leaves backward without types
            if is_last:
                sums.ready_at = self._clock() - self._exchange_sec
            scaled.backward()
            if self._gns is not None:
                scale = self._scaler.get_scale() if self._scaler.is_enabled() else 1.0
                self._gns.end_micro(row_tokens.sum() * (self._kappa * scale), row_tokens)
        if self._ledger is not None and micro.carry is not None and output.state is not None:
            carry = micro.carry
            with self._exchange_timed(self._ledger):
                self._ledger.store(carry.group_ids, carry.cell_index, carry.is_last, output.state.detach())
        sums.details.add(micro, result)
        sums.loss_sum += result.loss_sum.detach()
        sums.tokens += result.num_tokens

    @contextmanager
    def _exchange_timed(self, ledger: Ledger) -> Iterator[None]:
        """Adds up the time in the ledger's collectives, in which a rank waits for the others."""
        began = self._clock()
        yield
        if ledger.ownership == "exchange":
            self._exchange_sec += self._clock() - began

    def _without_sync(self, is_last: bool) -> AbstractContextManager[None]:
        if is_last or not isinstance(self._model, DistributedDataParallel):
            return nullcontext()
        return self._model.no_sync()
