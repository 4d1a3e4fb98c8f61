"""A task of the user's own (`[eval] target`), called in every evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from trainer.data.tokenizer import Tokenizer
from trainer.distributed.agree import gather_from_ranks
from trainer.metrics.best_effort import BestEffort, as_number, checked


class OwnTask:
    """Calls the user's function on every rank; what rank 0 returns is logged.

    Args:
        function: called with `model`, `tokenizer`, `step`, `device`, `rank` and `world_size`, and with `args`. Returns a
            mapping of names to numbers; other ranks may return anything.
        autocast: the precision's context.
        guard: a task that fails on any rank is switched off on all, with one warning; the run goes on.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        args: Mapping[str, Any],
        model: nn.Module,
        tokenizer: Tokenizer,
        autocast: Callable[[], AbstractContextManager[None]],
        rank: int,
        world_size: int,
        device: torch.device,
        guard: BestEffort,
    ) -> None:
        self._function = function
        self._given = {"device": device, "rank": rank, "world_size": world_size, "tokenizer": tokenizer, **args}
        self._model = model
        self._autocast = autocast
        self._rank, self._world_size, self._device = rank, world_size, device
        self._guard = guard
        self._is_off = False  # the same on all ranks

    def run(self, step: int, taken: Set[str] = frozenset()) -> dict[str, float]:
        """The task's numbers as `eval/<name>`, the same on every rank, without names that are taken; empty once it has failed.
        The model is in evaluation mode, without gradients, and torch's random numbers are afterwards what they were."""
        if self._is_off:
            return {}
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            found = self._guard.run(self._call, step, taken)
        by_rank = gather_from_ranks((found, self._guard.enabled), world_size=self._world_size)
        self._is_off = not all(works for _, works in by_rank)
        return {} if self._is_off else by_rank[0][0] or {}

    def _call(self, step: int, taken: Set[str]) -> dict[str, float]:
        with torch.no_grad(), self._autocast():
            found = self._function(model=self._model, step=step, **self._given)
        if self._rank != 0:
            return {}
        if not isinstance(found, Mapping):
            raise TypeError(f"eval.target returned a {type(found).__name__}, not a mapping of names to numbers")
        values = checked(found, self._guard.leave_out, as_number)
        own = {f"eval/{name}": value for name, value in values.items() if value is not None}
        for key in sorted(own.keys() & taken):
            self._guard.leave_out(key, "the evaluation of [[eval.source]] reports a metric of this name itself")
        return {key: value for key, value in own.items() if key not in taken}
