"""Reads the windows of a run: the micro-batches of each step, from this rank's data shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from trainer.data.batch import MicroBatch
from trainer.data.loader import Loader
from trainer.distributed.agree import gather_from_ranks, raise_on_all_ranks
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.metrics.logger import get_logger

logger = get_logger(__name__)


class Reading:
    """Reads from the loaders of this rank's data shards.

    A shard whose data are exhausted continues with masked rows: the others still need it in every collective, and the run
    ends at the first step in which none has a batch of its own. Batches without a target do not end it: the next ones may
    have some.

    Args:
        loaders: of this rank's shards.
        states: of their data sets, for a shard that has nothing to read.
        is_resumed: the run continues from a checkpoint, so its data may be exhausted.
    """

    def __init__(
        self,
        loaders: Sequence[Loader],
        states: Sequence[Any],
        *,
        info: RankInfo,
        device: torch.device,
        is_resumed: bool,
    ) -> None:
        self.loaders = loaders
        self._batches: list[Iterator[MicroBatch]] = [*loaders]
        self.last: list[MicroBatch] = []  # of each loader; empty before the first window
        self._states, self._info, self._device, self._is_resumed = states, info, device, is_resumed

    def window(self, num_micros: int) -> list[MicroBatch] | None:
        """`num_micros` micro-batches of each shard, in turn. None, instead of the first ones, if a resumed run has nothing left
        to read on any rank. The first call communicates.

        Raises:
            UserError: no rank of a new run has anything to read; or see `trainer.data.batch.take_apart`.
        """
        if not self.last and not self._begin():
            return None
        window = []
        for _ in range(num_micros):
            for shard, batches in enumerate(self._batches):
                micro = next(batches, None)
                self.last[shard] = self.last[shard].masked() if micro is None else replace(micro, shard=shard)
                window.append(self.last[shard])
        return window

    def _begin(self) -> bool:
        """Read the first batches. A shard that has nothing to read from the start (resumed after it had read everything, or
        with fewer documents than shards) gets a row to mask from one that has some. False: none has anything."""
        world_size = self._info.world_size
        with raise_on_all_ranks(world_size=world_size):
            firsts = [next(batches, None) for batches in self._batches]
        for shard, first in enumerate(firsts):
            if first is not None:
                self._batches[shard] = chain([first], self._batches[shard])
        has_data = gather_from_ranks([first is not None for first in firsts], world_size=world_size)
        flat = [has for own in has_data for has in own]
        if not any(flat):
            if not self._is_resumed:
                raise UserError("data", "there is nothing to read", "check the paths of the sources")
            return False
        given = next((first for first in firsts if first is not None), None)
        if not all(flat):
            what = "data shard" if len(firsts) > 1 else "rank"
            empty = ", ".join(str(number) for number, has in enumerate(flat) if not has)
            logger.warning("%s %s of %d has nothing to read, and runs fully masked batches", what, empty, len(flat))
            giver = list(map(any, has_data)).index(True)
            own = None
            if given is not None and self._info.rank == giver:
                own = replace(given.masked().to(torch.device("cpu")), state=None)
            (given,) = gather_from_ranks((own,), world_size=world_size)[giver]
        assert given is not None
        filler = given.to(self._device)
        for shard, (first, state) in enumerate(zip(firsts, self._states, strict=True)):
            self.last.append(replace(filler, shard=shard, state=state) if first is None else first)
        return True
