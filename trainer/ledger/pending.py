"""Rows that were stored before anybody knew whether they are finite: the check without a wait for the device.

A row that is not finite is stored as zeros, which is what a group that is not held reads. Which rows that were stays on the
device until somebody has to know; then the look-ups and stores of the step are gone through once more, on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Flags = NDArray[np.bool_]


class Lookup(NamedTuple):
    """Groups that were looked for, and which of them were held and not at their start."""

    groups: list[int]
    is_held: Flags


class Stored(NamedTuple):
    """Groups that were stored."""

    groups: list[int]
    is_last: Flags
    is_finite: Tensor
    """bool [n], on the device."""


class Refusals(NamedTuple):
    """What a step's rows that were not finite come to."""

    num_rows: int
    """Rows refused."""
    num_cold_starts: int
    """Look-ups that read zeros in the place of such a row."""
    groups: list[int]
    """Groups that must not be held."""


class PendingRows:
    """The look-ups and stores of the steps that are not final yet, the newest last."""

    def __init__(self) -> None:
        self._steps: list[list[Lookup | Stored]] = []

    def begin_step(self) -> None:
        """What follows belongs to a new step."""
        self._steps.append([])

    def forget_newest(self) -> None:
        """The newest step is taken back."""
        self._steps.pop()

    def forget_oldest(self) -> None:
        """The oldest step is final."""
        self._steps.pop(0)

    def clear(self) -> None:
        """Forget all steps."""
        self._steps.clear()

    def look_up(self, groups: list[int], is_held: Flags) -> None:
        """Note a look-up."""
        if self._steps:
            self._steps[-1].append(Lookup(groups, is_held))

    def store(self, groups: list[int], is_last: Flags, states: Tensor) -> Tensor:
        """Note a store; the states to keep, [n, width]: zeros for a row that is not finite."""
        is_finite = states.isfinite().all(dim=1)  # [n]
        self._steps[-1].append(Stored(groups, is_last, is_finite))
        return torch.where(is_finite.unsqueeze(1), states, 0)

    def count(self, device: torch.device) -> Tensor:
        """Rows of the newest step that are not finite, those of last cells included; [] float64 on the device."""
        flags = [event.is_finite for event in self._steps[-1] if isinstance(event, Stored)]
        if not flags:
            return torch.zeros((), dtype=torch.float64, device=device)
        return (~torch.cat(flags)).sum().double()

    def read(self) -> Refusals:
        """Go through the newest step. Waits for the device."""
        events = self._steps[-1]
        flags = [event.is_finite for event in events if isinstance(event, Stored)]
        is_finite: list[bool] = torch.cat(flags).tolist() if flags else []
        num_rows = num_cold_starts = at = 0
        refused: set[int] = set()
        for event in events:
            if isinstance(event, Lookup):
                held = zip(event.groups, event.is_held.tolist(), strict=True)
                num_cold_starts += sum(is_held and group in refused for group, is_held in held)
                continue
            for group, is_last in zip(event.groups, event.is_last.tolist(), strict=True):
                refused.discard(group)
                if not (is_last or is_finite[at]):
                    refused.add(group)
                    num_rows += 1
                at += 1
        return Refusals(num_rows, num_cold_starts, sorted(refused))
