"""The micro-batches of one step, as this rank reads them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.data.loader import LoadedBatch
from trainer.distributed.agree import gather_from_ranks, raise_on_all_ranks
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.metrics.logger import get_logger
from trainer.training.step.microbatch import MicroBatch, masked_copy, split

MASKED_SHARE = "stream_mixing/masked_share"
logger = get_logger(__name__)


@dataclass(frozen=True)
class Window:
    """This rank's micro-batches of one step."""

    micros: Sequence[MicroBatch]
    data_state: Any
    """The data set's, after them."""
    metrics: Sequence[Mapping[str, float | None]]
    """What the data set reported with each of them, and whether it had no target."""
    is_exhausted: bool
    """All are masked copies: the data set had nothing left."""


class WindowReader:
    """Collects windows from a loader.

    A rank whose data are exhausted continues with masked rows: the others still need it in every collective, and the run
    ends at the first step in which no rank has a batch of its own. Batches without a target do not end it: the next ones may
    have some. A rank that has nothing to read from the start (resumed after it had read everything, or with fewer documents
    than ranks) gets a row to mask from a rank that has one.

    Args:
        accepted, burns_in: see `split`.
        data_state: the data set's, before the first window.
        is_resumed: the run continues from a checkpoint, so its data may be exhausted.
    """

    def __init__(
        self,
        loader: Iterator[LoadedBatch],
        *,
        accepted: frozenset[str] | None,
        data_state: Any,
        info: RankInfo,
        device: torch.device,
        is_resumed: bool,
        burns_in: bool = False,
    ) -> None:
        self._loader = loader
        self._accepted = accepted
        self._burns_in = burns_in
        self._data_state = data_state
        self._info = info
        self._device = device
        self._is_resumed = is_resumed
        self._last_batch: dict[str, Any] | None = None

    def read(self, step: int, num_micros: int) -> Window | None:
        """The window of a step, of so many micro-batches. None, instead of the first one, if a resumed run has nothing left to
        read on any rank.

        The first call communicates: every rank must make it.

        Raises:
            UserError: no rank of a new run has anything to read; or see `split`.
        """
        if self._last_batch is None and not self._start():
            return None
        micros: list[MicroBatch] = []
        metrics: list[Mapping[str, float | None]] = []
        is_exhausted = True
        for _ in range(num_micros):
            loaded = next(self._loader, None)
            if loaded is not None:
                batch, self._data_state = dict(loaded.batch), loaded.state
                is_masked = {} if loaded.is_masked is None else {MASKED_SHARE: float(loaded.is_masked)}
                metrics.append({**loaded.metrics, **is_masked})
                self._last_batch, is_exhausted = batch, False
            else:
                assert self._last_batch is not None
                batch = masked_copy(self._last_batch)
                metrics.append({MASKED_SHARE: 1.0})
            micros.append(split(batch, self._accepted, burns_in=self._burns_in))
        return Window(micros, self._data_state, metrics, is_exhausted)

    def _start(self) -> bool:
        """Read the first batch, and give the ranks without one a row to mask. False: no rank has anything to read."""
        world_size = self._info.world_size
        with raise_on_all_ranks(world_size=world_size):
            first = next(self._loader, None)
        if first is not None:
            self._loader = itertools.chain([first], self._loader)
            self._last_batch = dict(first.batch)
        has_data = gather_from_ranks(first is not None, world_size=world_size)
        without = [rank for rank, has in enumerate(has_data) if not has]
        if not without:
            return True
        if len(without) == world_size:
            if not self._is_resumed:
                raise UserError("data", "there is nothing to read", "check the paths of the sources")
            return False
        ranks = ", ".join(map(str, without))
        logger.warning("rank %s of %d has nothing to read, and runs fully masked batches", ranks, world_size)
        giver = has_data.index(True)
        own = masked_copy(self._last_batch) if self._info.rank == giver and self._last_batch is not None else {}
        row = gather_from_ranks(_moved(own, torch.device("cpu")), world_size=world_size)[giver]
        if first is None:
            self._last_batch = _moved(row, self._device)
        return True


def _moved(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
