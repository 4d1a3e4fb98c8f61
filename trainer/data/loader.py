"""Loader: micro-batches on the device, prefetched by one thread. Reading: the windows of a run."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from trainer.arrays import IGNORED
from trainer.data.batch import FILL, MASKED_SHARE, MicroBatch, take_apart
from trainer.distributed.env import RankInfo, gather_from_ranks, raise_on_all_ranks
from trainer.errors import UserError
from trainer.metrics.best_effort import BestEffort
from trainer.metrics.logger import get_logger
from trainer.on_device import move_together

logger = get_logger(__name__)
CLOSE_SEC = 5.0
TENSOR_KEYS = ("tokens", "targets", "resets", "token_types")


class Loader:
    """Iterates a dataset of dicts as micro-batches, with the dataset's state and metrics after each.

    An exception in the thread is raised from `next()`, after the batches made before it. While the
    thread runs, nobody else may touch the dataset, whose `state_dict` and `drain_step_metrics` are
    used where it has them. `close()` ends the thread; the loader is also a context manager.

    Args:
        device: where the values of `TENSOR_KEYS` go, in one copy that is not waited for.
        accepted: see `take_apart`.
        prefetch: batches that a thread prepares in advance; 0: no thread.
        guard: of `drain_step_metrics`: its failure costs the metrics, never a batch.
        full_tokens: targets of a micro-batch whose rows are full; 0: those that it has room for.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        device: torch.device | str,
        accepted: frozenset[str] | None = None,
        prefetch: int = 2,
        guard: BestEffort | None = None,
        full_tokens: int = 0,
    ) -> None:
        assert prefetch >= 0, prefetch
        self._dataset = dataset
        self._iterator = iter(dataset)
        self._device = torch.device(device)
        self._full_tokens = full_tokens
        self._accepted = accepted
        self._state_dict = getattr(dataset, "state_dict", None) or (lambda: None)
        self._drain = getattr(dataset, "drain_step_metrics", None) or dict
        self._guard = guard or BestEffort("data metrics")
        self._queue: queue.Queue[MicroBatch | BaseException] = queue.Queue(maxsize=max(prefetch, 1))
        self._stop = threading.Event()
        self._num_loaded = 0
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        if prefetch:
            self._thread = threading.Thread(target=self._run, name="data-loader", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        """The next micro-batch. StopIteration: the dataset is exhausted, or the loader closed."""
        if self._stop.is_set():
            raise StopIteration
        if self._thread is None:
            return self._load()
        if self._failure is None:
            item = self._queue.get()
            if isinstance(item, MicroBatch):
                return item
            self._failure = item
        raise self._failure

    @property
    def reading(self) -> str:
        """The batch being loaded, and from where. For any thread."""
        where = getattr(self._dataset, "now_reading", None)
        number = f"micro-batch {self._num_loaded + 1:,}"
        return f"{number} from {where}" if isinstance(where, str) and where else number

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread and drop prefetched batches. A read that hangs ends with the process."""
        self._stop.set()
        end = time.monotonic() + CLOSE_SEC
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < end:
            # The thread may be waiting for room in the queue.
            try:
                self._queue.get(timeout=0.01)
            except queue.Empty:
                self._thread.join(timeout=0.01)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                item: MicroBatch | BaseException = self._load()
            except BaseException as error:  # noqa: BLE001 - raised in the consumer
                item = error
            self._queue.put(item)
            if isinstance(item, BaseException):
                return

    def _load(self) -> MicroBatch:
        batch = dict(next(self._iterator))
        self._num_loaded += 1
        state = self._state_dict()
        metrics = self._guard.run(self._drain)
        if metrics is None:  # not known, which is not 0
            metrics = dict.fromkeys(getattr(self._dataset, "metric_keys", ()))
        targets = batch.get("targets")
        is_on_device = isinstance(targets, torch.Tensor) and targets.device.type != "cpu"
        # A tensor on a device must not be waited for.
        if targets is not None and not is_on_device:
            is_target = np.asarray(targets) != IGNORED
            num_targets = np.count_nonzero(is_target)
            fill = num_targets / (self._full_tokens or is_target.size)
            metrics = {**metrics, MASKED_SHARE: float(num_targets == 0), FILL: fill}
        move_together(batch, TENSOR_KEYS, self._device)
        return replace(take_apart(batch, self._accepted), state=state, metrics=metrics)


class Reading:
    """Reads from the loaders of this rank's data shards.

    A shard whose data are exhausted continues with masked rows: the others still need it in every
    collective, and the run ends at the first step in which none has a batch of its own. `states`
    are those of the data sets; the data of a run that `is_resumed` may be exhausted.
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
        """`num_micros` micro-batches of each shard, in turn. The first call communicates.

        If no rank has anything to read, None in a resumed run, a UserError in a new one.
        """
        if not self.last and not self._begin():
            return None
        window = []
        for _ in range(num_micros):
            for shard, batches in enumerate(self._batches):
                micro = next(batches, None)
                if micro is None:
                    self.last[shard] = self.last[shard].masked()
                else:
                    self.last[shard] = replace(micro, shard=shard)
                window.append(self.last[shard])
        return window

    def _begin(self) -> bool:
        """Read the first batches; False if no rank has any.

        A shard that has nothing to read from the start (resumed after it had read everything, or
        with fewer documents than shards) gets a row to mask from one that has some.
        """
        world_size = self._info.world_size
        with raise_on_all_ranks(world_size=world_size):
            firsts = [next(batches, None) for batches in self._batches]
        for shard, first in enumerate(firsts):
            if first is not None:
                self._batches[shard] = chain([first], self._batches[shard])
        has_data = gather_from_ranks([first is not None for first in firsts], world_size=world_size)
        flat = [has for own in has_data for has in own]
        if not any(flat):
            if self._is_resumed:
                return False
            raise UserError("data", "there is nothing to read", "check the paths of the sources")
        given = next(filter(None, firsts), None)
        if not all(flat):
            shards = "data shard" if len(firsts) > 1 else "rank"
            empty = ", ".join(str(number) for number, has in enumerate(flat) if not has)
            text = "%s %s of %d has nothing to read, and runs fully masked batches"
            logger.warning(text, shards, empty, len(flat))
            giver, own = list(map(any, has_data)).index(True), None
            if given is not None and self._info.rank == giver:
                own = replace(given.masked().to(torch.device("cpu")), state=None)
            (given,) = gather_from_ranks((own,), world_size=world_size)[giver]
        assert given is not None
        filler = given.to(self._device)
        for shard, (first, state) in enumerate(zip(firsts, self._states, strict=True)):
            self.last.append(first or replace(filler, shard=shard, state=state))
        return True
