"""BlendDataset: micro-batches from several sources, by weights that may follow a schedule."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, NoReturn

import numpy as np

from trainer.data.blending.sources import UnreadSource, parts_of
from trainer.data.blending.weights import WeightSpec, positions
from trainer.data.keyed import BLOCK, KeyedUniforms
from trainer.data.mixing.collate import Batch
from trainer.data.mixing.dataset import STAGES, StreamMixingDataset
from trainer.errors import UserError
from trainer.metrics.best_effort import BestEffort
from trainer.metrics.catalog.lookup import is_built_in, lookup_or_gauge
from trainer.metrics.catalog.spec import RankReduction
from trainer.metrics.values import as_number, checked, is_name
from trainer.micro_batches import MicroBatches

MAX_SHARE_ERROR = "blend/max_share_error"
ENDED_SOURCES = "blend/ended_sources"
SHARE_PREFIX = "blend/share/"
VERSION = 1
# Rows of the catalog that sources report, which are merged; all others are other parts' of the trainer.
SOURCE_ROWS = ("stream_mixing/active/", "stream_mixing/refill/", MAX_SHARE_ERROR, ENDED_SOURCES, SHARE_PREFIX)
Drained = Mapping[str, float | None]
"""None: a value that should have been reported and could not be."""
# Sources are merged like ranks: by the operation that the catalog has for the key.
_MERGES: Mapping[RankReduction, Callable[[Iterable[float]], float]] = {
    "min": min,
    "max": max,
    "sum": sum,
    "sum_and_worst": sum,
    "mean": fmean,
    "weighted_mean": fmean,
    "mean_and_error": fmean,
}


@dataclass(frozen=True)
class BlendSource:
    """One source: its name, an iterable of micro-batch dicts, and its weight (weights need not sum to 1)."""

    name: str
    dataset: Iterable[Batch]
    weight: WeightSpec


class BlendDataset:
    """An iterator of micro-batches, each from one source.

    The source of batch i is a pure function of (seed, names, i), the weights at i, and which sources still have data;
    all ranks choose the same. A source with weight zero is never picked. Exhausted sources are skipped; when all are
    exhausted (or the others stay at weight zero), iteration stops.

    A source needs only `__iter__`. One without `state_dict` and `load_state_dict` is saved as None: it can be trained
    on, but resuming after it gave a batch raises a UserError, since its position is unknown. A source takes part in the
    metrics if it has `drain_step_metrics` and `metric_keys`, which lists every key that the former can return; a key that is
    not in the catalog is a gauge. Its metrics are diagnostics: if they fail, they are absent from then on, with one warning. A
    value that is no number, and a name that another part of the trainer reports, are left out with one.

    Args:
        sources: names must be unique.
        seed: of the choices.
        micro_batches: micro-batches per optimizer step; if it is a number m, batch i belongs to step `i // m + 1`. Where the
            step is not known ahead, `window_begins` tells it.
        per_source: also report `blend/share/<name>`.
        times: also report what reading took since the last drain: `time/<stage>/all`, or by source with `per_source`.
        history_every, history_tokens: the batches of steps that are a multiple of `history_every` have `history_tokens`
            tokens before each cell (see `Collator`), where the source has `next_with_tokens_before`; 0: none have.

    Raises:
        UserError: no sources, or a name that occurs twice; while iterating: a batch at which all weights are zero.
    """

    def __init__(
        self,
        sources: Sequence[BlendSource],
        *,
        seed: int,
        micro_batches: int | MicroBatches = 1,
        per_source: bool = False,
        times: bool = False,
        history_every: int = 0,
        history_tokens: int = 0,
    ) -> None:
        if not sources:
            raise UserError("data.source", "a blend needs at least one source", "add a [[data.source]]")
        names = [source.name for source in sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError("data.source", f"two sources are called {twice[0]!r}", "give each a name of its own")
        if isinstance(micro_batches, int):
            if micro_batches < 1:
                raise UserError("micro_batches", f"must be >= 1, got {micro_batches}")
            micro_batches = MicroBatches.constant(micro_batches)
        self.sources = list(sources)
        self._micro_batches = micro_batches
        self._constant = micro_batches.first if micro_batches.is_constant else 0
        self._window: tuple[int, int, int] | None = None  # a step, its first batch and its micro-batches
        self._loaded_index = 0  # the batch at which the state that was loaded continues
        self._per_source = per_source
        self._history_every, self._history_tokens = history_every, history_tokens
        self._iterators: list[Iterator[Batch]] = [iter(source.dataset) for source in sources]
        self._names = names
        self._seed = seed
        self._uniforms = KeyedUniforms("blend", seed, *names)  # the names: a nested blend draws its own numbers
        self._batch_index = 0
        self._now = -1  # the source that the next batch is read from
        self._ended = [False] * len(sources)
        self._counts = [0] * len(sources)
        self._first = 0  # the batch at which the table of choices begins
        self._choices: list[int] = []
        self._expected = [
            [0.0] * len(sources)
        ]  # batches that the weights call for of each source, before each choice and after the last
        self._errors = [0.0]  # the largest difference between those and the actual batches, likewise
        keys = [MAX_SHARE_ERROR, ENDED_SOURCES]
        shares = [SHARE_PREFIX + name for name in names] if per_source else []
        self._time_names = (names if per_source else ["all"] * len(names)) if times else []
        self._seconds: defaultdict[str, float] = defaultdict(float)  # by key, since the last drain
        keys += [f"time/{stage}/{name}" for name in self._time_names for stage in STAGES]
        self._drains: dict[int, Callable[[], Drained]] = {}  # of the sources that report metrics
        for index, source in enumerate(sources):
            guard = BestEffort(f"metrics of the source {source.name}")
            own_keys = guard.run(_keys_of, source.dataset, frozenset(shares), guard)
            if own_keys is not None:
                self._drains[index] = partial(_drain_source, source.dataset, dict.fromkeys(own_keys), guard)
                keys += own_keys
        self.metric_keys = tuple(dict.fromkeys([*keys, *shares]))
        specs = {key: lookup_or_gauge(key) for key in self.metric_keys}
        self._merges = {key: _MERGES[spec.ranks] for key, spec in specs.items()}
        self._counters = {key for key, spec in specs.items() if spec.kind == "counter"}
        self._latest: dict[str, dict[int, float | None]] = {}  # by key, then source: what each source reported last
        self._reported: dict[int, Set[str]] = {}  # keys of a source's last report
        self._undrained: set[int] = set()
        self._states: list[Mapping[str, Any] | None] = [None] * len(sources)
        self._unsaved = set(range(len(sources)))  # whose state is not in `_states` yet

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next micro-batch; if it has no `dataset_labels`, they are set to the source's name.

        Raises:
            StopIteration, UserError: as `next_with_tokens_before`.
        """
        every, index = self._history_every, self._batch_index
        if every > 0 and self._constant:
            is_due = (index // self._constant + 1) % every == 0
        else:
            is_due = every > 0 and self._may_be_due(index)
        return self.next_with_tokens_before(self._history_tokens if is_due else 0)

    def window_begins(self, step: int, num_read: int, num_micros: int) -> None:
        """Say to which step the next micro-batches belong, where that is not known ahead; from any thread.

        Args:
            num_read: batches that were taken since the state was loaded. More may have been made ahead.
            num_micros: of `step`.
        """
        self._window = step, self._loaded_index + num_read, num_micros

    def _may_be_due(self, batch: int) -> bool:
        """Whether the step of a batch is a multiple of `history_every`, or may be: a loader makes batches before it is known
        which step they belong to, and tokens before a cell that nobody needs do no harm."""
        every, plan = self._history_every, self._micro_batches
        if plan.is_known_ahead:
            return plan.step_of(batch) % every == 0
        if self._window is None:
            return True
        step, first, num_micros = self._window
        ahead = batch - first - num_micros
        if ahead < 0:
            return step % every == 0
        earliest, latest = step + 1 + ahead // plan.most, step + 1 + ahead // plan.least
        return latest // every > (earliest - 1) // every

    def next_with_tokens_before(self, tokens_before: int) -> Batch:
        """The next micro-batch, with at least that many tokens before each cell if its source can give them.

        Raises:
            StopIteration: every source is exhausted, or stays at weight zero.
            UserError: all weights are zero at this batch.
        """
        while True:
            at = self._batch_index - self._first
            if at >= len(self._choices):
                self._choose(self._expected[at])
                at = 0
            chosen = self._choices[at]
            if chosen < 0:
                self._stop_or_refuse()
            self._now = chosen
            self._unsaved.add(chosen)
            self._undrained.add(chosen)
            start = time.perf_counter()
            try:
                batch = _next(self._iterators[chosen], tokens_before)
            except StopIteration:
                self._ended[chosen] = True
                self._choose(self._expected[at])
                continue
            break
        if self._time_names:
            self._add_times(chosen, time.perf_counter() - start)
        self._counts[chosen] += 1
        self._batch_index += 1
        if "dataset_labels" not in batch:
            batch["dataset_labels"] = [self.sources[chosen].name] * len(batch["tokens"])
        return batch

    def _add_times(self, chosen: int, seconds: float) -> None:
        dataset = self.sources[chosen].dataset
        stages = dataset.drain_seconds(seconds) if isinstance(dataset, StreamMixingDataset) else {"own_code": seconds}
        for stage, part in stages.items():
            self._seconds[f"time/{stage}/{self._time_names[chosen]}"] += part

    @property
    def now_reading(self) -> str:
        """The source that is being read, and its file where that is known; empty before the first batch. For any thread."""
        if self._now < 0:
            return ""
        source = self.sources[self._now]
        where = getattr(source.dataset, "now_reading", None)
        return f"source {source.name}" + (f": {where}" if isinstance(where, str) and where else "")

    def shares_at(self, step: int, batch: int) -> list[float]:
        """What the weights call for in an optimizer step that begins with this micro-batch: the share of each source, all zero
        where all weights are."""
        at = [source.weight.evaluate(step if source.weight.unit == "step" else batch) for source in self.sources]
        return [weight / (sum(at) or 1.0) for weight in at]

    def _choose(self, expected: list[float]) -> None:
        """Compute the choices from the next batch to the end of its block, -1 where all weights are zero.

        A choice depends on the batch index and on which sources have data, so this is repeated whenever a source ends.
        `expected` is the number of batches that the weights call for of each source so far. It includes sources that have
        ended: their share is then below the configured one, which is what `blend/max_share_error` is to show.
        """
        self._first = self._batch_index
        block, offset = divmod(self._first, BLOCK)
        batches = np.arange(self._first, (block + 1) * BLOCK, dtype=np.int64)
        weights = np.zeros((len(batches), len(self.sources)))
        for i, source in enumerate(self.sources):
            weights[:, i] = source.weight.evaluate_many(positions(source.weight.unit, batches, self._micro_batches))
        sums = weights.sum(axis=1, keepdims=True)
        shares = np.divide(weights, sums, out=np.zeros_like(weights), where=sums > 0)
        alive = np.where(self._ended, 0.0, weights)
        left = alive.sum(axis=1, keepdims=True)
        ends = np.divide(alive, left, out=np.zeros_like(alive), where=left > 0).cumsum(axis=1)
        totals = ends[:, -1:]
        chosen = (ends <= self._uniforms.block(block)[offset:, None] * totals).sum(axis=1)
        # The product may round up to the total itself: then the last source with a weight is meant.
        chosen = np.where(chosen < len(self.sources), chosen, (ends < totals).sum(axis=1))
        chosen = np.where(totals[:, 0] > 0, chosen, -1)
        expected_counts = np.cumsum(np.vstack([expected, shares]), axis=0)
        gives = chosen[:, None] == np.arange(len(self.sources))
        counts = np.cumsum(np.vstack([self._counts, gives]), axis=0)
        self._choices = chosen.tolist()
        self._expected = expected_counts.tolist()
        self._errors = np.abs(counts - expected_counts).max(axis=1).tolist()

    def _stop_or_refuse(self) -> NoReturn:
        index = self._batch_index
        alive = [source for source, ended in zip(self.sources, self._ended, strict=True) if not ended]
        is_over = len(alive) < len(self.sources)
        for source in alive:
            zero_from = source.weight.zero_from()
            x = positions(source.weight.unit, index, self._micro_batches)
            is_over = is_over and zero_from is not None and x >= zero_from
        if is_over:
            raise StopIteration
        raise UserError(
            "data.source",
            f"at batch {index} every source that still has data has weight zero "
            f"({', '.join(source.name for source in alive)})",
            "keep at least one weight above zero at every batch",
        )

    def drain_step_metrics(self) -> Drained:
        """The sources' metrics, merged key by key, and how well the shares match the weights; {} before any batch.
        None is what a source should have reported and could not.

        A source contributes what it reported last, its counters only once. A source that has ended has no readers: its
        counts (what sums over ranks) are 0, and its other gauges are left out. `blend/max_share_error` is the largest
        difference, over the sources, between the share of batches a source gave and the share that the weights call for
        (the mean of its configured probability at each batch, whether or not sources have ended).
        """
        if not self._batch_index:
            return {}
        latest = self._latest
        for index in self._undrained & self._drains.keys():
            drained = self._drains[index]()
            self._report(index, self._of_ended(drained) if self._ended[index] else drained)
        metrics = {key: self._merged(key, values.values()) for key, values in latest.items() if values}
        for key in self._counters & latest.keys():
            latest[key].update(dict.fromkeys(self._undrained & latest[key].keys(), 0.0))
        self._undrained.clear()
        error = self._errors[self._batch_index - self._first] / self._batch_index
        # A source that is itself a blend has an error of its own.
        metrics[MAX_SHARE_ERROR] = max(error, metrics.get(MAX_SHARE_ERROR) or 0.0)
        metrics[ENDED_SOURCES] = sum(self._ended) + (metrics.get(ENDED_SOURCES) or 0.0)
        if self._per_source:
            for name, count in zip(self._names, self._counts, strict=True):
                metrics[SHARE_PREFIX + name] = count / self._batch_index
        metrics.update(self._seconds)
        self._seconds.clear()
        return metrics

    def _merged(self, key: str, values: Collection[float | None]) -> float | None:
        """One value of those of all sources; None if a source's is not known, which only a mean can do without."""
        merge = self._merges[key]
        if None not in values:
            return merge(values)  # type: ignore[arg-type]
        known = [value for value in values if value is not None]
        return merge(known) if known and merge is fmean else None

    def _report(self, index: int, values: Drained) -> None:
        """Keep a source's report in place of its last one. The other sources' are not touched: most batches move one."""
        for key in self._reported.get(index, frozenset()) - values.keys():
            del self._latest[key][index]
        for key, value in values.items():
            self._latest.setdefault(key, {})[index] = value
        self._reported[index] = frozenset(values)

    def _of_ended(self, drained: Drained) -> Drained:
        counted = {key: value for key, value in drained.items() if key in self._counters}
        return {**{key: 0.0 for key in drained if self._merges[key] is sum}, **counted}

    def state_dict(self) -> dict[str, Any]:
        """Plain Python; a snapshot that later batches do not change. Only sources that moved are asked for their state."""
        for index in self._unsaved:
            state_dict = getattr(self.sources[index].dataset, "state_dict", None)
            self._states[index] = None if state_dict is None else state_dict()
        self._unsaved.clear()
        return {
            "version": VERSION,
            "seed": self._seed,
            "batch_index": self._batch_index,
            "names": self._names,
            "ended": self._ended.copy(),
            "counts": self._counts.copy(),
            "expected": self._expected[self._batch_index - self._first].copy(),
            "sources": self._states.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue where a run stopped; weights may have changed since, and sources may have been added.

        Args:
            state: this rank's state, or those of all ranks in rank order; see `StreamMixingDataset.load_state_dict`.

        Raises:
            UserError: another seed, a source that is missing now, or one that gave batches and cannot be resumed.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        own = states[0]
        if own.get("version") != VERSION or "names" not in own:
            problem = "the saved state is not one of a blend of this version"
            raise UserError("data.source", problem, "resume with the version that saved it")
        if own["seed"] != self._seed:
            problem = f"the saved state was made with {own['seed']}, this run has {self._seed}"
            raise UserError("run.seed", problem, f"set it to {own['seed']}")
        gone = [name for name in own["names"] if name not in self._names]
        if gone:
            problem = f"the saved state has a source {gone[0]!r}, which is missing now"
            raise UserError("data.source", problem, "put it back")
        self._batch_index = self._first = self._loaded_index = own["batch_index"]
        self._window = None
        self._choices = []
        self._latest.clear()
        self._reported.clear()
        self._expected = [[0.0] * len(self.sources)]
        for index, name in enumerate(self._names):
            self._counts[index], self._ended[index] = 0, False
            if name in own["names"]:
                self._load_source(index, own["names"].index(name), states)
        self._errors = [max(abs(c - e) for c, e in zip(self._counts, self._expected[0], strict=True))]
        self._iterators = [iter(source.dataset) for source in self.sources]
        self._undrained = set(range(len(self.sources)))  # the merged metrics cover every pool's last pick
        self._unsaved = set(range(len(self.sources)))

    def _load_source(self, index: int, saved: int, states: Sequence[Mapping[str, Any]]) -> None:
        dataset = self.sources[index].dataset
        parts = parts_of(states, saved)
        self._counts[index] = states[0]["counts"][saved]
        self._expected[0][index] = states[0]["expected"][saved]
        self._ended[index] = all(state["ended"][saved] for state in states)
        load = getattr(dataset, "load_state_dict", None)
        if parts[0] is not None and load is not None:
            load(parts[0] if len(parts) == 1 else parts)
        elif self._counts[index] and not isinstance(dataset, UnreadSource):
            raise UserError(
                self._names[index],
                f"gave {self._counts[index]} batches before the checkpoint, and cannot be resumed",
                "give its dataset state_dict and load_state_dict, or start without this checkpoint",
            )


def _next(iterator: Iterator[Batch], tokens_before: int) -> Batch:
    """A source's next batch. One that cannot give tokens before its cells may still have given them by itself."""
    with_tokens_before = getattr(iterator, "next_with_tokens_before", None) if tokens_before else None
    batch: Batch = next(iterator) if with_tokens_before is None else with_tokens_before(tokens_before)
    return batch


def _keys_of(dataset: Any, taken: Set[str], guard: BestEffort) -> list[str] | None:
    """The names that a source may report, each once; None if it reports nothing.

    Args:
        taken: names of the blend's own.
    """
    keys = getattr(dataset, "metric_keys", None)
    if keys is None or getattr(dataset, "drain_step_metrics", None) is None:
        return None
    if isinstance(keys, str):
        raise TypeError(f"metric_keys must be a list of names, got {keys!r}")
    found = [key for key in keys if is_name(key, guard.leave_out)]
    foreign = {key for key in found if key in taken or (is_built_in(key) and not key.startswith(SOURCE_ROWS))}
    for key in sorted(foreign):
        guard.leave_out(key, "the trainer reports a metric of this name itself; give it another one")
    return [key for key in dict.fromkeys(found) if key not in foreign]


def _drain_source(dataset: Any, unknown: Drained, guard: BestEffort) -> Drained:
    """A source's metrics, those that it lists; if it fails, all of them are not known, from then on."""
    drained = guard.run(_drained, dataset, guard)
    if drained is None:
        return unknown
    for key in drained.keys() - unknown.keys():
        guard.leave_out(key, "it is not among the metric_keys")
    return {key: value for key, value in drained.items() if key in unknown}


def _drained(dataset: Any, guard: BestEffort) -> Drained:
    drained: Drained = dataset.drain_step_metrics()
    is_ours = isinstance(dataset, StreamMixingDataset | BlendDataset)
    return drained if is_ours else checked(drained, guard.leave_out, as_number)
