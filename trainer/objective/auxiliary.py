"""Losses and metrics of a model's output in addition to its logits: none, for a plain run.

Models that declare some, and `[objective.losses]`, are given a class that adds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.errors import UserError
from trainer.metrics.best_effort import BestEffort
from trainer.objective.loss import ObjectiveOutput
from trainer.wording import few


class Auxiliary:
    """Refuses losses of an output and leaves out its metrics, since the model declares none.

    Attributes:
        losses: by name; each has a `weight`, and `by`: "tokens" or "rows".
        metric_keys: the metrics that the output may have; others are left out with one warning.
        by_rows: keys of the losses by rows.
        is_on: whether there is any loss or metric.
    """

    def __init__(self, losses: Mapping[str, Any] | None = None, metric_keys: Sequence[str] = ()) -> None:
        self.losses, self.metric_keys = losses or {}, tuple(metric_keys)
        self.by_rows = [f"objective/{name}" for name, each in self.losses.items() if each.by == "rows"]
        self.is_on = bool(self.losses or self.metric_keys)
        self._guard = BestEffort("model")

    def begin_window(self, window: Sequence[Any], *, world_size: int) -> None:
        """Prepare the window's micro-batches of this rank. Every rank must call it."""

    def __call__(self, result: ObjectiveOutput, output: Any, micro: Any) -> ObjectiveOutput:
        """The loss of a micro-batch (`trainer.data.batch.MicroBatch`) with all its parts.

        Raises:
            UserError: the output has other losses than the model declares.
        """
        losses, metrics = getattr(output, "losses", None), getattr(output, "metrics", None)
        # What nobody trains on must not look as if somebody did.
        if losses:
            refuse_output(undeclared(sorted(losses)))
        self._leave_out_but(self.metric_keys, metrics or {})
        return result

    def _leave_out_but(self, known: Iterable[str], metrics: Mapping[str, Any]) -> None:
        for name in metrics.keys() - set(known):
            self._guard.leave_out(name, "the model's metric_keys do not list it")


def undeclared(names: Sequence[str]) -> str:
    """The mistake of an output with these further losses, after "it returns"."""
    return f'the loss {few(names)}, which is not in its loss_keys: {{"{names[0]}": "tokens"}}, or "rows"'


def refuse_output(problem: str) -> None:
    if problem:
        raise UserError("model.target", f"it returns {problem}", "see docs/models.md#losses-and-metrics")
