"""The micro-batches of one step, as this rank reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.data.loader import LoadedBatch
from trainer.errors import UserError
from trainer.training.step.microbatch import MicroBatch, masked_copy, split


@dataclass(frozen=True)
class Window:
    """This rank's micro-batches of one step."""

    micros: Sequence[MicroBatch]
    data_state: Any
    """The data set's, after them."""
    metrics: Sequence[Mapping[str, float]]
    """What the data set reported with each of them."""


class WindowReader:
    """Collects windows from a loader.

    A rank whose data are exhausted continues with masked rows: the others still need it in every collective, and the run
    ends at the first step in which no rank has a token.

    Args:
        accepted: inputs that the model takes; None: any.
        data_state: the data set's, before the first window.
        rank: for the message when there is nothing to read at all.
    """

    def __init__(
        self,
        loader: Iterator[LoadedBatch],
        *,
        micro_batches: int,
        accepted: frozenset[str] | None,
        data_state: Any,
        rank: int,
    ) -> None:
        self._loader = loader
        self._micro_batches = micro_batches
        self._accepted = accepted
        self._data_state = data_state
        self._rank = rank
        self._last_batch: dict[str, Any] | None = None

    def read(self) -> Window:
        """The next window.

        Raises:
            UserError: this rank has nothing to read; or see `split`.
        """
        micros, metrics = [], []
        for _ in range(self._micro_batches):
            loaded = next(self._loader, None)
            if loaded is not None:
                batch, self._data_state = dict(loaded.batch), loaded.state
                metrics.append(loaded.metrics)
                self._last_batch = batch
            elif self._last_batch is not None:
                batch = masked_copy(self._last_batch)
            else:
                raise UserError("data", f"rank {self._rank} has nothing to read", "use fewer ranks, or more documents")
            micros.append(split(batch, self._accepted))
        return Window(micros, self._data_state, metrics)
