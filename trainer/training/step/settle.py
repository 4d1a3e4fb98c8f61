"""A step's numbers on their way to the host, and what can be decided with them on the device before they are there.

The step needs to know two things to step the optimizer: the factor on the gradient, and whether to step at all. Both stay on
the device. The optimizer gets the second as `found_inf`, the flag by which torch's loss scaling makes a step do nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.training.step.accumulation import WindowSums

# Places in the head of the reduced vector; the noise scale's sums follow.
TOKENS, LOSS_SUM, STOP, SAVED = range(4)
HEAD = 4


class HostCopy:
    """A vector of a device that is copied to the host without waiting for it."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._is_there: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._is_there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._is_there.record(torch.cuda.current_stream(values.device))

    def read(self) -> list[float]:
        """The numbers. Waits until the device has come as far as the copy, and for nothing that was queued after it."""
        if self._is_there is not None:
            self._is_there.synchronize()
        values: list[float] = self._values.tolist()
        return values


@dataclass(frozen=True)
class QueuedStep:
    """A step whose work is queued and whose numbers are on their way."""

    numbers: HostCopy
    """The reduced vector and, last, the gradient's squared norm."""
    sums: WindowSums
    gradients: list[Tensor]
    """Where the host decides about the optimizer's step; empty if the device has."""
    lr: float
    lr_before: float
    """Of the optimizer's last step, should this one not count."""


def supports_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer takes a `found_inf` on the device and then does nothing: torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_unless(is_bad: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`, which changes nothing if `is_bad` (bool [], on the device), decided there.

    A first step makes the optimizer's state, zeros, also where it is bad.
    """
    guarded: object = optimizer
    setattr(guarded, "found_inf", is_bad.float())  # noqa: B010 - torch knows the attribute, its types do not
    try:
        optimizer.step()
    finally:
        delattr(guarded, "found_inf")


def scale_gradients(gradients: list[Tensor], loss_factor: Tensor, grad_sq: Tensor, limit: float) -> None:
    """Divide the gradients by `loss_factor` and shrink them to norm `limit` (0: as they are), all on the device.

    Args:
        loss_factor: c, where the gradients are c times the true ones; [] float64.
        grad_sq: squared norm of `gradients`, [] float64.
        limit: largest norm of the true gradient.
    """
    one = torch.ones_like(loss_factor)
    shrink = one
    if limit:
        # A tensor over a tensor: a number over a tensor is the number times an inverse, which rounds twice.
        shrink = torch.minimum(one * limit / (grad_sq.sqrt() / loss_factor + 1e-6), one)
    scale = shrink / loss_factor
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        scale = scale.float()  # of the gradients' own type it takes one kernel for all of them
    torch._foreach_mul_(gradients, scale)
