"""What is known of a step once its numbers are read; the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag, auto

from trainer.data.loader import MicroBatch


class Flag(IntFlag):
    """What a rank says with a step."""

    NONE = 0
    STOP = auto()  # it was asked to stop
    SAVE = auto()  # by its clock, the time between two saves has passed
    EXHAUSTED = auto()  # it had no batch of its own, only masked copies


@dataclass(frozen=True)
class StepOutcome:
    """The result of a step."""

    flags: Flag
    """`STOP` and `SAVE` if any rank says so. `EXHAUSTED` if all do: nothing was changed."""
    is_finite: bool  # False: the step was skipped; weights and optimizer are as before
    loss: float
    """Token-weighted over all micro-batches and ranks, nats per token; NaN without a token."""
    tokens: int
    """Target tokens over all ranks. 0: all targets were masked, and nothing was changed."""
    tokens_trained: int  # 0 for a step that was skipped
    grad_norm: float
    """Norm of the true gradient before clipping; for a skipped step, the squared norm as it was."""
    grad_factor: float
    """c, where the gradient before the update was c times that of the mean loss."""

    @property
    def is_taken(self) -> bool:
        """Whether the weights were updated."""
        return self.is_finite and self.tokens > 0


@dataclass(frozen=True)
class Step:
    """A step whose numbers are known."""

    number: int
    window: Sequence[MicroBatch]  # of this rank
    is_logged: bool
    outcome: StepOutcome
