"""Runs `eval.target`, a custom evaluation task, at every evaluation.

It could go if tasks were run on checkpoints alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.data.tokenizer import Tokenizer
from trainer.distributed.env import gather_from_ranks
from trainer.metrics.best_effort import BestEffort, as_number, checked
from trainer.training.evaluator import Evaluator


@dataclass(kw_only=True, eq=False, repr=False)
class OwnTask:
    """Calls the user's function on every rank; rank 0's result is logged."""

    function: Callable[..., Any]
    """Called with `model`, `tokenizer`, `step`, `device`, `rank` and `world_size`, and with `args`. Returns a mapping of
    names to numbers; other ranks may return anything."""
    args: Mapping[str, Any]
    model: nn.Module
    tokenizer: Tokenizer
    guard: BestEffort
    """A task that fails on any rank is switched off on all, with one warning; the run continues."""
    is_off: bool = False
    """The same on all ranks."""

    def run(self, evaluator: Evaluator, step: int, taken: Set[str]) -> dict[str, float]:
        """The task's numbers as `eval/<name>`, the same on every rank, without `taken` names; empty once it has failed.

        The model is in evaluation mode, without gradients; torch's random state is restored afterwards.
        """
        if self.is_off:
            return {}
        devices = [evaluator.device] if evaluator.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            found = self.guard.run(self._call, evaluator, step, taken)
        by_rank = gather_from_ranks((found, self.guard.enabled), world_size=evaluator.info.world_size)
        self.is_off = not all(works for _, works in by_rank)
        return {} if self.is_off else by_rank[0][0] or {}

    def _call(self, evaluator: Evaluator, step: int, taken: Set[str]) -> dict[str, float]:
        info = evaluator.info
        with torch.no_grad(), evaluator.autocast():
            given = {"device": evaluator.device, "rank": info.rank, "world_size": info.world_size, **self.args}
            found = self.function(model=self.model, tokenizer=self.tokenizer, step=step, **given)
        if not info.is_main:
            return {}
        if not isinstance(found, Mapping):
            raise TypeError(f"eval.target returned a {type(found).__name__}, not a mapping of names to numbers")
        values = checked(found, self.guard.leave_out, as_number)
        own = {f"eval/{name}": value for name, value in values.items() if value is not None}
        for key in sorted(own.keys() & taken):
            self.guard.leave_out(key, "the evaluation of [[eval.source]] reports a metric of this name itself")
        return {key: value for key, value in own.items() if key not in taken}
