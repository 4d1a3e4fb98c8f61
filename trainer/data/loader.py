"""Loader: micro-batches on the device, prefetched by one thread, each with the dataset's state and metrics after it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer.arrays import IGNORED
from trainer.metrics.best_effort import BestEffort

CLOSE_SEC = 5.0
TENSOR_KEYS = ("tokens", "targets", "resets", "token_types", "tokens_before", "resets_before")


@dataclass(frozen=True)
class LoadedBatch:
    """One micro-batch with the dataset's state and metrics.

    Args:
        batch: the dataset's dict; those of `TENSOR_KEYS` are tensors on the device.
        state: the dataset's state after this batch: resuming from it gives the next one, however far the loader has
            read ahead. None if the dataset has no `state_dict`.
        metrics: drained from the dataset right after this batch; {} if it has no `drain_step_metrics`. None is what it should
            have reported and could not.
        is_masked: no row has a target; None if that is unknown without waiting for a device.
    """

    batch: dict[str, Any]
    state: dict[str, Any] | None
    metrics: Mapping[str, float | None]
    is_masked: bool | None = None


class Loader:
    """Iterates a dataset of micro-batch dicts as `LoadedBatch`es.

    Args:
        dataset: an iterable of dicts; `state_dict` and `drain_step_metrics` are used where it has them.
        device: where tensors go; to a CUDA device through pinned memory, without waiting for the copy.
        guard: of `drain_step_metrics`: its failure costs the metrics, never a batch.
        prefetch: batches that a thread prepares in advance; 0: no thread.

    An exception in the thread is raised from `next()`, after the batches made before it. While the thread runs, nobody
    else may touch the dataset. `close()` ends the thread; the loader is also a context manager.
    """

    def __init__(
        self, dataset: Any, *, device: torch.device | str, prefetch: int = 2, guard: BestEffort | None = None
    ) -> None:
        assert prefetch >= 0, prefetch
        self._dataset = dataset
        self._iterator = iter(dataset)
        self._device = torch.device(device)
        self._state_dict = getattr(dataset, "state_dict", None)
        self._drain = getattr(dataset, "drain_step_metrics", None)
        self._guard = guard or BestEffort("data metrics")
        self._queue: queue.Queue[LoadedBatch | BaseException] = queue.Queue(maxsize=max(prefetch, 1))
        self._stop = threading.Event()
        self._num_loaded = 0
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        if prefetch:
            self._thread = threading.Thread(target=self._run, name="data-loader", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[LoadedBatch]:
        return self

    def __next__(self) -> LoadedBatch:
        """The next micro-batch.

        Raises:
            StopIteration: the dataset is exhausted, or the loader was closed.
            Exception: what the dataset raised.
        """
        if self._stop.is_set():
            raise StopIteration
        if self._thread is None:
            return self._load()
        if self._failure is None:
            item = self._queue.get()
            if isinstance(item, LoadedBatch):
                return item
            self._failure = item
        raise self._failure

    @property
    def reading(self) -> str:
        """What is being loaded: another text for every batch. For any thread."""
        where = getattr(self._dataset, "now_reading", None)
        number = f"micro-batch {self._num_loaded + 1:,}"
        return f"{number} from {where}" if isinstance(where, str) and where else number

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread and drop prefetched batches; may be called twice. A read that hangs ends with the process."""
        self._stop.set()
        end = time.monotonic() + CLOSE_SEC
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < end:
            try:
                self._queue.get(timeout=0.01)
            except queue.Empty:
                self._thread.join(timeout=0.01)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                item: LoadedBatch | BaseException = self._load()
            except BaseException as error:  # noqa: BLE001 - raised in the consumer
                item = error
            self._queue.put(item)
            if isinstance(item, BaseException):
                return

    def _load(self) -> LoadedBatch:
        batch = next(self._iterator)
        self._num_loaded += 1
        state = None if self._state_dict is None else self._state_dict()
        metrics = {} if self._drain is None else self._guard.run(self._drain)
        if metrics is None:
            metrics = dict.fromkeys(getattr(self._dataset, "metric_keys", ()))
        is_masked = _is_masked(batch.get("targets"))
        is_cuda = self._device.type == "cuda"
        for key in TENSOR_KEYS:
            if key in batch:
                tensor = torch.as_tensor(batch[key])
                batch[key] = (tensor.pin_memory() if is_cuda else tensor).to(self._device, non_blocking=is_cuda)
        return LoadedBatch(batch, state, metrics, is_masked)


def _is_masked(targets: Any) -> bool | None:
    if targets is None or (isinstance(targets, torch.Tensor) and targets.device.type != "cpu"):
        return None
    array = np.asarray(targets)
    # Nearly every batch has a target at its very first position: look there before comparing all.
    return not (array.size and array.flat[0] != IGNORED) and bool((array == IGNORED).all())
