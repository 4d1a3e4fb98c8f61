"""The micro-batch that a step trains on: a data set's dict, taken apart once. `Loader` prefetches
them to the device by one thread; `Reading` gives the windows of a run.
"""

from __future__ import annotations

import difflib
import inspect
import math
import queue
import threading
import time
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final, Self

import numpy as np
import torch
from torch import Tensor, nn

from trainer.arrays import IGNORED, is_known
from trainer.data.collate import TRAINED
from trainer.distributed.env import RankInfo, gather_from_ranks, raise_on_all_ranks
from trainer.errors import UserError
from trainer.metrics.best_effort import BestEffort
from trainer.metrics.logger import get_logger
from trainer.on_device import move_together
from trainer.wording import short_repr

CARRY_KEYS = ("group_ids", "cell_index", "is_last")
OPTIONAL_CARRY_KEYS = ("end_ids", "end_cell_index", "depth")
MASKED_SHARE = "stream_mixing/masked_share"
FILL = "data/fill"
BATCH_EXTRAS: Final[Mapping[str, str]] = {
    "dataset_labels": "source of each row, a list; with segment_ids of each segment, a tuple",
    "dataset_segments": "modality of each row, a list; with segment_ids of each segment, a tuple",
    "segment_ids": "segment of each target, integers [B, T], -1 where there is none",
    "pack_num_samples": "documents in each row, integers [B]",
    "token_types": "type of each target token, small integers [B, T], -1 where masked",
    "instability_meta_json": "JSON that locates the batch, or an object that makes it",
}
"""The keys of a data set's dict that the model never gets. A new one is registered here."""


@dataclass(frozen=True)
class Carry:
    """Which group each row continues: int64 [B], int64 [B], bool [B]; group -1 carries nothing.

    `end_ids` and `end_cell_index`, int64 [B]: the group that continues after the row, and its cell
    there, where that may be another one. `depth`, int64 [B]: tokens of the row's group before it;
    None: those of whole cells.
    """

    group_ids: np.ndarray
    cell_index: np.ndarray
    is_last: np.ndarray
    end_ids: np.ndarray | None = None
    end_cell_index: np.ndarray | None = None
    depth: np.ndarray | None = None

    def tokens_before(self, row_tokens: int) -> np.ndarray:
        """Tokens of each row's group before it, int64 [B], of rows of that many tokens."""
        return self.cell_index * row_tokens if self.depth is None else self.depth

    @classmethod
    def of_no_group(cls, num_rows: int) -> Self:
        nothing = np.zeros(num_rows, np.int64)
        return cls(nothing - 1, nothing, nothing != 0)


@dataclass(frozen=True)
class MicroBatch:
    inputs: dict[str, Any]  # for `model(**inputs)`, without the state
    targets: Tensor  # int64 [B, T] or floats [B, T, ...]; -100 or NaN: nothing to predict
    carry: Carry | None  # None: the rows have no groups, the model starts from zero
    extras: dict[str, Any]  # those of `BATCH_EXTRAS`, for monitoring alone
    located: object = "{}"  # identifies the batch: its text is JSON
    # The data set's state after this batch, however far a loader has read ahead: resuming from it
    # gives the next batch.
    state: Any = None
    # Reported by the data set with it; None is a value that it should have reported and could not.
    metrics: Mapping[str, float | tuple[float, float] | None] = field(default_factory=dict)
    shard: int = 0  # which of the rank's data shards it is of, from 0
    # What the rows are of: documents, or the groups of a data set that does not say.
    documents: Collection[Hashable] = ()
    is_filler: bool = False  # a masked copy: the data set had nothing left

    def masked(self) -> MicroBatch:
        """The same rows, with nothing to predict and no groups."""
        targets = torch.full_like(self.targets, IGNORED)
        if targets.is_floating_point():
            targets.fill_(math.nan)
        carry = self.carry and Carry.of_no_group(len(targets))
        before: Any = self.metrics.get(FILL) or (0, targets.numel())
        metrics: dict[str, Any] = {MASKED_SHARE: 1.0, FILL: (0.0, before[1])}
        return replace(self, targets=targets, carry=carry, metrics=metrics, documents=(), is_filler=True)

    def to(self, device: torch.device) -> MicroBatch:
        def moved(values: Mapping[str, Any]) -> dict[str, Any]:
            tensors = {key: v.to(device) for key, v in values.items() if isinstance(v, Tensor)}
            return {**values, **tensors}

        targets = self.targets.to(device)
        return replace(self, inputs=moved(self.inputs), targets=targets, extras=moved(self.extras))


def accepted_inputs(model: nn.Module) -> frozenset[str] | None:
    """Names that `model.forward` takes in addition to the state; None if it takes any."""
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    return frozenset(parameters) - {"state"}


def check_inputs(inputs: Collection[str], accepted: Collection[str], source: str = "") -> None:
    """Refuse keys of a batch of `source` that are neither an extra nor an input of the model."""
    known = [*sorted(accepted), *sorted(BATCH_EXTRAS)]
    for key in sorted(set(inputs) - set(accepted)):
        close = difflib.get_close_matches(key, known, n=1)
        fix = f"did you mean {close[0]}?" if close else "accept it in forward, or leave it out"
        problem = f"neither an input of the model nor a batch extra; there are {', '.join(known)}"
        raise UserError(f"{source}batch key {key}", problem, fix)


def take_apart(batch: Mapping[str, Any], accepted: frozenset[str] | None, source: str = "") -> MicroBatch:
    """A data set's dict as a micro-batch. `accepted`: inputs that the model takes; None: any."""
    inputs = {key: value for key, value in batch.items() if key not in BATCH_EXTRAS}
    extras = {key: value for key, value in batch.items() if key in BATCH_EXTRAS}
    missing = sorted(set(CARRY_KEYS) - inputs.keys())
    if 0 < len(missing) < len(CARRY_KEYS):
        problem = f"a micro-batch has no {', '.join(missing)}, but others of {', '.join(CARRY_KEYS)}"
        raise UserError("data", problem, "give all or none")
    targets, carry = inputs.pop("targets"), None
    if not missing:
        optional = {key: np.asarray(inputs.pop(key)) for key in OPTIONAL_CARRY_KEYS if key in inputs}
        carry = Carry(*map(np.asarray, map(inputs.pop, CARRY_KEYS)), **optional)
    if accepted is not None and not inputs.keys() <= accepted:
        check_inputs(inputs, accepted, source)
    located = extras.get("instability_meta_json", "{}")
    documents = getattr(located, "documents", None)
    if documents is None and carry is not None:
        documents = {*carry.group_ids.tolist()} - {-1}
    return MicroBatch(inputs, targets, carry, extras, located, documents=documents or ())


logger = get_logger(__name__)
CLOSE_SEC = 5.0
TENSOR_KEYS = ("tokens", "features", "targets", "resets", "token_types")


class Loader:
    """Iterates a dataset of dicts as micro-batches, each with the dataset's state and metrics.

    An exception in the thread is raised from `next()`, after the batches made before it. While the
    thread runs, nobody else may touch the dataset, whose `state_dict` and `drain_step_metrics` are
    used where it has them. `close()` ends the thread.

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
        if not isinstance(metrics, Mapping):  # not known, which is not 0
            if metrics is not None:
                self._guard.fail(TypeError(f"drain_step_metrics() gave {short_repr(metrics)}, no mapping"))
            metrics = dict.fromkeys(getattr(self._dataset, "metric_keys", None) or ())
        targets, trained = batch["targets"], batch.pop(TRAINED, None)
        # A tensor on a device must not be waited for.
        if not isinstance(targets, Tensor) or targets.device.type == "cpu":
            values = torch.as_tensor(targets)
            is_target = values != IGNORED
            if values.is_floating_point():
                is_target = is_known(values)
            num_tokens = int(is_target.sum())
            if trained is not None:  # the others fill rows, too
                metrics, num_tokens = {**metrics, TRAINED: trained}, trained[1]
            fill = num_tokens, self._full_tokens or is_target.numel()
            metrics = {**metrics, MASKED_SHARE: float(num_tokens == 0), FILL: fill}
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
        """`num_micros` micro-batches of each shard, in turn. The first call communicates:
        if no rank has anything to read, it gives None in a resumed run, a UserError in a new one.
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
        with fewer documents than shards) gets a masked batch from one that has some.
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
            raise UserError("data", "there is nothing to read", "check the path or target of each source")
        if all(flat):
            self.last += filter(None, firsts)
            return True
        empty = ", ".join(str(number) for number, has in enumerate(flat) if not has)
        text = "data shard %s of %d has nothing to read, and runs fully masked batches"
        logger.warning(text, empty, len(flat))
        giver, own = list(map(any, has_data)).index(True), None
        if self._info.rank == giver:
            own = next(filter(None, firsts)).masked().to(torch.device("cpu"))
            own = replace(own, state=None, located="{}")
            own.extras.pop("instability_meta_json", None)  # whose open files would travel
        given = gather_from_ranks(own, world_size=world_size)[giver]
        assert given is not None
        filler = given.to(self._device)
        for shard, (first, state) in enumerate(zip(firsts, self._states, strict=True)):
            self.last.append(first or replace(filler, shard=shard, state=state))
        return True
