"""One optimizer step: a window of micro-batches, one gradient, one decision that all ranks share.

Weights. The loss of a step is the sum of the token losses of all micro-batches of all ranks over the number of tokens, N:
what one big batch on one rank would give. N is known only after the window, so every micro-batch is scaled by the same
constant kappa0 (1 / the most tokens a rank's window can hold), DDP averages over the W ranks, and the gradient is divided by
c = kappa0 N / W when it is clipped: one multiplication that clipping needs anyway, and no collective before the window.

Collectives. Beside DDP's own there is one all-reduce a step: the noise scale's sums, the token and loss sums and the votes
(stop, background save finished) travel together. A NaN on one rank is a NaN in the sum, so a bad number is seen by all.

Waiting. With `settles_late`, `queue` decides on the device whether the optimizer steps, and `settle` reads what became of
it: at once, or after the next step's forward and backward are queued. In the latter case the device never runs out of work,
and a step that turns out bad has changed no weight; what the next one has done by then is taken back. Otherwise the host
decides in `settle`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.ledger.ledger import Ledger
from trainer.metrics.noise_scale.hooks import GradientNoiseScale
from trainer.metrics.noise_scale.square_norm import square_norm
from trainer.objective.compose import Objective
from trainer.training.checkpointing.generators import generator_states, set_generator_states
from trainer.training.step.accumulation import Accumulator
from trainer.training.step.details import StepDetails
from trainer.training.step.microbatch import MicroBatch
from trainer.training.step.optimizer import set_lr
from trainer.training.step.settle import (
    HEAD,
    LOSS_SUM,
    SAVED,
    STOP,
    TOKENS,
    HostCopy,
    QueuedStep,
    scale_gradients,
    step_unless,
    supports_found_inf,
)


@dataclass(frozen=True)
class StepSettings:
    """What of the config a step needs."""

    micro_batches: int
    max_tokens_per_micro: int
    clip_grad_norm: float
    settles_late: bool = False
    """Steps of which nothing has to be known at once may be settled during the next one, if the optimizer takes a
    `found_inf` and there is no loss scaling."""


@dataclass(frozen=True)
class StepOutcome:
    """What a step did; the same on every rank but for `details`."""

    is_empty: bool
    """No rank had a token: the data have ended, and nothing was changed."""
    is_finite: bool
    """False: the step was rejected, and weights and optimizer are as before."""
    loss: float
    """Token-weighted over all micro-batches and ranks, nats per token."""
    tokens: int
    """Trained on in this step, over all ranks."""
    grad_norm: float
    """Of the true gradient, before clipping."""
    should_stop: bool
    """Some rank was asked to stop."""
    all_saved: bool
    """Every rank's background save is written."""
    is_later_undone: bool
    """The window that was run since the step was queued is taken back, and to be run again if the run goes on."""
    ready_at: float
    """When this rank came to the backward that reduces the gradient over ranks, by the step's clock, less the time for which
    the ledger's exchanges held it up until then."""
    details: StepDetails = field(repr=False)
    """Local sums for logging."""


class TrainStep:
    """Runs optimizer steps.

    Args:
        model: DDP around the model, or the model itself on a single rank.
        ledger: where recurrent states live; None for a model without state.
        gns: hooks of the noise scale; None if it is off.
        scaler: loss scaling for fp16 (disabled otherwise).
        autocast: makes the context in which forward and loss run.
        details: makes the collector of what is logged beside the loss.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        ledger: Ledger | None,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        gns: GradientNoiseScale | None,
        scaler: torch.amp.GradScaler,
        settings: StepSettings,
        world_size: int,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[None]],
        details: Callable[[bool], StepDetails],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._optimizer = optimizer
        self._gns = gns
        self._scaler = scaler
        self._settings = settings
        self._world_size = world_size
        self._device = device
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._decides_on_device = settings.settles_late and supports_found_inf(optimizer) and not scaler.is_enabled()
        self._queued: QueuedStep | None = None
        # The generators' states before the window that was begun since the last `queue`.
        self._later: dict[str, Tensor] | None = None
        self._kappa = 1.0 / (settings.micro_batches * settings.max_tokens_per_micro)
        self._accumulator = Accumulator(
            model=model,
            ledger=ledger,
            objective=objective,
            gns=gns,
            scaler=scaler,
            kappa=self._kappa,
            device=device,
            autocast=autocast,
            details=details,
            clock=clock,
        )

    @property
    def settles_late(self) -> bool:
        """Whether the next step may begin before this one is settled."""
        return self._decides_on_device

    def forward_backward(self, step: int, window: Sequence[MicroBatch], *, will_log: bool) -> None:
        """Accumulate the gradient of `window`; the step before may still have to be settled.

        Args:
            step: global step, for the ledger's clock.
            window: `micro_batches` of this rank.
            will_log: collect what is logged beside the loss.
        """
        if self._queued is not None:
            self._later = generator_states(self._device)
        self._sums = self._accumulator.run(step, window, will_log=will_log)

    def conclude(self, *, lr: float, stop: bool, saved: bool) -> StepOutcome:
        """`queue` and `settle` in one."""
        self.queue(lr=lr, stop=stop, saved=saved)
        return self.settle()

    def queue(self, *, lr: float, stop: bool, saved: bool) -> None:
        """Reduce over ranks, unscale, clip, optimizer step; or leave the weights as they were. `settle` must follow.

        Nothing waits for the device, unless the host must decide whether to step: then that is left to `settle`.

        Args:
            lr: learning rate of this step.
            stop: this rank was asked to stop.
            saved: this rank's background save is written.
        """
        assert self._queued is None, "the step before was not settled"
        packed = self._reduced(stop=stop, saved=saved)
        if self._scaler.is_enabled():
            self._scaler.unscale_(self._optimizer)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        grad_sq = torch.stack([square_norm(gradient) for gradient in gradients]).sum()
        self._queued = QueuedStep(
            # Before the optimizer's work, for which nobody who reads it then waits.
            numbers=HostCopy(torch.cat([packed, grad_sq.reshape(1)])),
            sums=self._sums,
            gradients=[] if self._decides_on_device else gradients,
            lr=lr,
            lr_before=self._optimizer.param_groups[0]["lr"],
        )
        if self._decides_on_device:
            tokens, loss_sum = packed[TOKENS], packed[LOSS_SUM]
            is_bad = ~(loss_sum.isfinite() & grad_sq.isfinite()) | (tokens == 0)
            loss_factor = tokens * self._kappa / self._world_size
            scale_gradients(gradients, loss_factor, grad_sq, self._settings.clip_grad_norm)
            set_lr(self._optimizer, lr)
            step_unless(is_bad, self._optimizer)
            self._optimizer.zero_grad(set_to_none=True)

    def _reduced(self, *, stop: bool, saved: bool) -> Tensor:
        """The head and the noise scale's sums over all ranks, float64 on the device."""
        # Filled there: a tensor made of numbers of the host would be copied, and waited for.
        tokens = self._sums.tokens
        head = [tokens, self._sums.loss_sum, *(torch.full_like(tokens, vote) for vote in (stop, saved))]
        packed = torch.stack(head)
        if self._gns is not None:
            packed = torch.cat([packed, self._gns.local_sums()])
        if self._world_size > 1:
            dist.all_reduce(packed)
        return packed

    def settle(self) -> StepOutcome:
        """Read the queued step's numbers, and bring the host's state into line with them.

        A window that was begun since then is taken back first, unless the numbers say that all went as expected: the outcome
        then is that of a step that was settled at once, and `is_later_undone` that the window must be run again.
        """
        assert self._queued is not None, "no step is queued"
        queued, self._queued = self._queued, None
        *reduced, grad_sq = queued.numbers.read()
        tokens, loss_sum = reduced[TOKENS], reduced[LOSS_SUM]
        factor = self._kappa * tokens / self._world_size
        is_finite = math.isfinite(loss_sum) and math.isfinite(grad_sq)
        is_good = is_finite and tokens > 0
        is_expected = is_good and reduced[STOP] == 0
        is_later_undone = self._later is not None and not is_expected
        if is_later_undone:
            self._take_back()
        self._later = None
        if self._gns is not None and tokens > 0:
            self._gns.finish(reduced[HEAD:], grad_sq, grad_factor=factor)
        grad_norm = math.sqrt(grad_sq) / factor if is_good else grad_sq
        if self._decides_on_device and not is_good:
            set_lr(self._optimizer, queued.lr_before)
        elif not self._decides_on_device:
            self._decide(queued, grad_norm, factor, is_good=is_good)
        return StepOutcome(
            is_empty=tokens == 0,
            is_finite=is_finite,
            loss=loss_sum / tokens if tokens else math.nan,
            tokens=int(tokens),
            grad_norm=grad_norm,
            should_stop=reduced[STOP] > 0,
            all_saved=reduced[SAVED] == self._world_size,
            is_later_undone=is_later_undone,
            ready_at=queued.sums.ready_at,
            details=queued.sums.details,
        )

    def _take_back(self) -> None:
        """Undo what `forward_backward` has done since the last `queue`, except in the ledger, which keeps it."""
        assert self._later is not None
        set_generator_states(self._later, self._device)
        self._optimizer.zero_grad(set_to_none=True)

    def _decide(self, queued: QueuedStep, grad_norm: float, factor: float, *, is_good: bool) -> None:
        """Step the optimizer, or do not, from here."""
        if is_good:
            limit = self._settings.clip_grad_norm
            shrink = min(limit / (grad_norm + 1e-6), 1.0) if limit else 1.0
            torch._foreach_mul_(queued.gradients, shrink / factor)
            set_lr(self._optimizer, queued.lr)
            # With loss scaling this skips by the scaler's own flag, which is the finiteness just tested.
            self._scaler.step(self._optimizer)
        if self._scaler.is_enabled():
            self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
