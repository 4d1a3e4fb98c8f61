"""The window of one step: its micro-batches, as this rank reads them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from trainer.data.batch import MicroBatch
from trainer.distributed.agree import gather_from_ranks, raise_on_all_ranks
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.metrics.logger import get_logger

logger = get_logger(__name__)
CPU = torch.device("cpu")


class WindowReader:
    """Collects windows from a loader.

    A rank whose data are exhausted continues with masked rows: the others still need it in every collective, and the run
    ends at the first step in which no rank has a batch of its own. Batches without a target do not end it: the next ones may
    have some. A rank that has nothing to read from the start (resumed after it had read everything, or with fewer documents
    than ranks) gets a row to mask from a rank that has one.

    Args:
        data_state: the data set's, before the first window.
        is_resumed: the run continues from a checkpoint, so its data may be exhausted.
    """

    def __init__(
        self, loader: Iterator[MicroBatch], *, data_state: Any, info: RankInfo, device: torch.device, is_resumed: bool
    ) -> None:
        self._loader = loader
        self._data_state = data_state
        self._info = info
        self._device = device
        self._is_resumed = is_resumed
        self._filler: MicroBatch | None = None

    def read(self, num_micros: int) -> list[MicroBatch] | None:
        """The next window, of so many micro-batches. None, instead of the first one, if a resumed run has nothing left to
        read on any rank.

        The first call communicates: every rank must make it.

        Raises:
            UserError: no rank of a new run has anything to read; or see `trainer.data.batch.take_apart`.
        """
        if self._filler is None and not self._start():
            return None
        found = []
        for _ in range(num_micros):
            micro = next(self._loader, None)
            if micro is None:
                assert self._filler is not None
                micro = replace(self._filler.masked(), state=self._data_state)
            self._filler, self._data_state = micro, micro.state
            found.append(micro)
        return found

    def _start(self) -> bool:
        """Read the first batch, and give the ranks without one a row to mask. False: no rank has anything to read."""
        world_size = self._info.world_size
        with raise_on_all_ranks(world_size=world_size):
            first = next(self._loader, None)
        if first is not None:
            self._loader = itertools.chain([first], self._loader)
        self._filler = first
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
        own = replace(first.masked().to(CPU), state=None) if first is not None and self._info.rank == giver else None
        (given,) = gather_from_ranks((own,), world_size=world_size)[giver]
        if first is None:
            assert given is not None
            self._filler = given.to(self._device)
        return True
