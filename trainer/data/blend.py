"""BlendDataset: micro-batches from several sources, by weights that may follow a schedule."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Final, NoReturn

import numpy as np

from trainer.data.collate import Batch
from trainer.data.pool import STAGES
from trainer.data.shard_source import StreamSource
from trainer.data.weights import ConstantWeight, WeightSpec, positions
from trainer.errors import UserError
from trainer.hashing import BLOCK, KeyedUniforms
from trainer.metrics.best_effort import BestEffort, as_number, checked, is_name
from trainer.metrics.catalog.lookup import is_built_in, lookup_or_gauge
from trainer.metrics.catalog.rows_data import EPOCHS
from trainer.metrics.catalog.spec import RankReduction
from trainer.micro_batches import ONE, MicroBatches

ALL_RANKS: Final = "states of all ranks"
"""The key of a source's part that holds those of every rank of the world that saved them."""


class UnreadSource:
    """A source of weight 0: nothing of it is opened, and its part of the state is kept for when it has a weight again."""

    def __init__(self) -> None:
        self._state: Any = None

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def state_dict(self) -> Any:
        """What was loaded."""
        return self._state

    def load_state_dict(self, state: Any) -> None:
        """Keep this rank's state; or those of all ranks, from a world of another size."""
        self._state = {ALL_RANKS: list(state)} if isinstance(state, list) else state


def parts_of(states: Sequence[Mapping[str, Any]], index: int) -> list[Any]:
    """A source's parts of the blend's states of all ranks."""
    parts = [state["sources"][index] for state in states]
    first = parts[0]
    return list(first[ALL_RANKS]) if isinstance(first, Mapping) and ALL_RANKS in first else parts


def without_sources(state: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A blend's state without some of its sources; the others continue where they are."""
    kept = [index for index, name in enumerate(state["names"]) if name not in names]
    lists = {"names", "ended", "counts", "expected", "sources", "claims"} & state.keys()
    cut = {**state, **{key: [state[key][index] for index in kept] for key in lists}}
    if "lanes" in state:  # a place begins with its source
        cut["lanes"] = [None if place and place[0] in names else place for place in state["lanes"]]
    return cut


MAX_SHARE_ERROR = "blend/max_share_error"
ENDED_SOURCES = "blend/ended_sources"
SHARE_PREFIX = "blend/share/"
VERSION = 1
# Rows of the catalog that sources report, which are merged; all others are other parts' of the trainer.
SOURCE_ROWS = ("stream_mixing/active/", "stream_mixing/refill/", MAX_SHARE_ERROR, ENDED_SOURCES, SHARE_PREFIX, EPOCHS)
Drained = Mapping[str, float | None]  # None: a value that should have been reported and could not be
# Sources are merged like ranks: by the operation that the catalog has for the key.
_MERGES: Mapping[RankReduction, Callable[[Iterable[float]], float]] = {
    **{"min": min, "max": max, "sum": sum, "sum_and_worst": sum},
    **dict.fromkeys(("mean", "weighted_mean", "mean_and_error"), fmean),
}


@dataclass(frozen=True)
class BlendSource:
    """One source: its name, an iterable of micro-batch dicts (for lanes, a `ShardSource`), and its weight (weights need not sum
    to 1)."""

    name: str
    dataset: Iterable[Any]
    weight: WeightSpec


class BlendDataset:
    """An iterator of micro-batches, each from one source.

    The source of batch i is a pure function of (seed, names, i), the weights at i, and which sources still have data;
    all ranks choose the same. A source with weight zero is never picked. Exhausted sources are skipped; when all are
    exhausted (or the others stay at weight zero), iteration stops.

    A source needs only `__iter__`; to be resumed, `state_dict` and `load_state_dict`; for metrics, `drain_step_metrics` and
    `metric_keys`, all that it can return (what is not in the catalog is a gauge). If they fail, they are absent from then on,
    with one warning; values that are no numbers, and names of other parts of the trainer, are left out with one.

    Args:
        sources: names must be unique.
        seed: of the choices.
        micro_batches: per optimizer step.
        per_source: also report `blend/share/<name>`.
        times: also report what reading took since the last drain: `time/<stage>/all`, or by source with `per_source`.
        history_every, history_tokens: batches of steps that are a multiple of `history_every` (all, where steps are not known
            ahead) have `history_tokens` tokens before each cell, if the source has `next_with_tokens_before`; 0: none have.

    Attributes:
        changes: by ascending batch, constant weights of sources from there on. May be replaced ahead of a thread that reads.

    Raises:
        UserError: no sources, or a name that occurs twice; while iterating: a batch at which all weights are zero.
    """

    def __init__(
        self,
        sources: Sequence[BlendSource],
        *,
        seed: int,
        micro_batches: MicroBatches = ONE,
        per_source: bool = False,
        times: bool = False,
        history_every: int = 0,
        history_tokens: int = 0,
    ) -> None:
        if not sources:
            raise UserError("data.source", "a blend needs at least one source", "add a [[data.source]]")
        names = [source.name for source in sources]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError("data.source", f"two sources are called {twice[0]!r}", "give each a name of its own")
        self.sources = list(sources)
        self.changes: Mapping[int, Mapping[str, float]] = {}
        self._micro_batches, self._is_known_ahead = micro_batches, micro_batches.is_known_ahead
        self._per_source = per_source
        self._history_every, self._history_tokens = history_every, history_tokens
        self._begin()
        self._names = names
        self._seed = seed
        self._uniforms = KeyedUniforms("blend", seed, *names)  # the names: a nested blend draws its own numbers
        self._batch_index = 0
        self._now = -1  # the source that the next batch is read from
        self._ended = [False] * len(sources)
        self._counts = [0] * len(sources)
        self._first = 0  # the batch at which the table of choices begins
        self._choices: list[int] = []
        # Before each choice and after the last: the batches that the weights call for of each source.
        self._expected = [[0.0] * len(sources)]
        keys = [MAX_SHARE_ERROR, ENDED_SOURCES]
        shares = [SHARE_PREFIX + name for name in names] if per_source else []
        self._time_names = (names if per_source else ["all"] * len(names)) if times else []
        self._seconds: defaultdict[str, float] = defaultdict(float)  # by key, since the last drain
        keys += [f"time/{stage}/{name}" for name in self._time_names for stage in STAGES]
        streams = {source.name: source.dataset for source in sources if isinstance(source.dataset, StreamSource)}
        self._epochs = {EPOCHS + name: dataset.epochs for name, dataset in streams.items()}
        keys += self._epochs
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
        self._latest: dict[int, dict[str, float | None]] = {}  # what each source reported last
        self._undrained: set[int] = set()
        self._states: list[Mapping[str, Any] | None] = [None] * len(sources)
        self._unsaved = set(range(len(sources)))  # whose state is not in `_states` yet

    def _begin(self) -> None:
        self._iterators: list[Iterator[Batch]] = [iter(source.dataset) for source in self.sources]
        # One that cannot give tokens before its cells may still give them by itself.
        self._asks = [getattr(iterator, "next_with_tokens_before", None) for iterator in self._iterators]

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next micro-batch; if it has no `dataset_labels`, they are set to the source's name."""
        every, plan = self._history_every, self._micro_batches
        # A loader makes batches before it is known which step they belong to, and tokens that nobody needs do no harm.
        is_due = every > 0 and (not self._is_known_ahead or plan.step_of(self._batch_index) % every == 0)
        return self.next_with_tokens_before(self._history_tokens if is_due else 0)

    def next_with_tokens_before(self, tokens_before: int) -> Batch:
        """The next micro-batch, with at least that many tokens before each cell if its source can give them.

        Raises:
            StopIteration: every source is exhausted, or stays at weight zero.
            UserError: all weights are zero at this batch.
        """
        while True:
            at = self._batch_index - self._first
            if at >= len(self._choices) or self._batch_index in self.changes:
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
                ask = self._asks[chosen]
                batch = next(self._iterators[chosen]) if ask is None else ask(tokens_before)
            except StopIteration:
                self._ended[chosen] = True
                self._choose(self._expected[at])
                continue
            break
        if self._time_names:
            seconds, dataset = time.perf_counter() - start, self.sources[chosen].dataset
            stages = {"own_code": seconds}
            if isinstance(dataset, StreamSource):
                stages = dataset.drain_seconds()
                stages["read"] = seconds - sum(stages.values())
            for stage, part in stages.items():
                self._seconds[f"time/{stage}/{self._time_names[chosen]}"] += part
        self._counts[chosen] += 1
        self._batch_index += 1
        if "dataset_labels" not in batch:
            batch["dataset_labels"] = [self.sources[chosen].name] * len(batch["tokens"])
        return batch

    @property
    def now_reading(self) -> str:
        """The source that is being read, and its file where that is known; empty before the first batch. For any thread."""
        if self._now < 0:
            return ""
        source = self.sources[self._now]
        where = getattr(source.dataset, "now_reading", None)
        return f"source {source.name}" + (f": {where}" if isinstance(where, str) and where else "")

    def shares_at(self, step: int, batch: int) -> list[float]:
        """The share of each source in an optimizer step that begins with this micro-batch; all zero where all weights are."""
        at = self.weights_at(step, batch)
        return [weight / (sum(at) or 1.0) for weight in at]

    def weights_at(self, step: int, batch: int) -> list[float]:
        """The weight of each source in an optimizer step that begins with this micro-batch."""
        specs = [self._weight_at(source, batch) for source in self.sources]
        return [spec.evaluate(step if spec.unit == "step" else batch) for spec in specs]

    def _weight_at(self, source: BlendSource, batch: int) -> WeightSpec:
        """What holds for a source at a batch: its last change, or else its weight from the beginning."""
        changed = [at[source.name] for first, at in self.changes.items() if first <= batch and source.name in at]
        return ConstantWeight(changed[-1]) if changed else source.weight

    def _choose(self, expected: list[float]) -> None:
        """Compute the choices from the next batch to the end of its block, -1 where all weights are 0; anew if a source ends.

        `expected`: batches that the weights call for of each source so far, of ended ones too, for `blend/max_share_error`.
        """
        self._first = self._batch_index
        block, offset = divmod(self._first, BLOCK)
        batches = np.arange(self._first, (block + 1) * BLOCK, dtype=np.int64)
        weights = np.zeros((len(batches), len(self.sources)))
        for i, source in enumerate(self.sources):
            weights[:, i] = source.weight.evaluate_many(positions(source.weight.unit, batches, self._micro_batches))
            for first, changed in self.changes.items():
                if source.name in changed:
                    weights[batches >= first, i] = changed[source.name]
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
        self._choices = chosen.tolist()
        self._expected = np.cumsum(np.vstack([expected, shares]), axis=0).tolist()

    def _stop_or_refuse(self) -> NoReturn:
        index = self._batch_index
        alive = [source for source, ended in zip(self.sources, self._ended, strict=True) if not ended]
        weights = [self._weight_at(source, index) for source in alive]
        places = [(positions(each.unit, index, self._micro_batches), each.zero_from()) for each in weights]
        if len(alive) < len(self.sources) and all(zero is not None and x >= zero for x, zero in places):
            raise StopIteration
        names = ", ".join(source.name for source in alive)
        problem = f"at batch {index} every source that still has data has weight zero ({names})"
        raise UserError("data.source", problem, "keep at least one weight above zero at every batch")

    @property
    def groups_in_flight(self) -> list[int] | None:
        """Ids of the groups that are begun and not finished; None: not known."""
        return None

    @property
    def waiting_groups(self) -> list[int]:
        """Ids of those that wait for a row to continue on."""
        return []

    def _given(self) -> tuple[int, list[float]]:
        """What `_counts` count, of all sources, and what the weights have called for of each."""
        return self._batch_index, self._expected[self._batch_index - self._first]

    def drain_step_metrics(self) -> Drained:
        """The sources' metrics, merged key by key, and how well the shares match the weights; {} before any batch.
        None is what a source should have reported and could not.

        A source contributes what it reported last, its counters only once; of one that has ended, counts (what sums over ranks)
        are 0, and other gauges are left out. `blend/max_share_error` is the largest difference between the share of batches a
        source gave and the one that the weights call for, whether or not sources have ended.
        """
        read: dict[str, float | None] = {}
        for key, epochs in self._epochs.items():
            read[key], epochs.read = epochs.read, 0.0
        total, expected = self._given()
        if not total:  # but documents that another shard had begun may be read
            return read
        for index in self._undrained & self._drains.keys():
            drained = self._drains[index]()
            if self._ended[index]:
                sums = {key for key in drained if self._merges[key] is sum}
                drained = {
                    k: v if k in self._counters else 0.0 for k, v in drained.items() if k in self._counters | sums
                }
            self._latest[index] = dict(drained)
        by_key: defaultdict[str, list[float | None]] = defaultdict(list)
        for drained in self._latest.values():
            for key, value in drained.items():
                by_key[key].append(value)
        for index in self._undrained & self._latest.keys():
            self._latest[index] |= dict.fromkeys(self._counters & self._latest[index].keys(), 0.0)
        self._undrained.clear()
        metrics: dict[str, float | None] = {}
        for key, values in by_key.items():
            if None in values:  # of a source that failed; only a mean can do without it
                values = [v for v in values if v is not None] if self._merges[key] is fmean else []
            metrics[key] = self._merges[key](values) if values else None  # type: ignore[arg-type]
        error = float(np.abs(np.subtract(self._counts, expected)).max()) / total
        # A source that is itself a blend has an error of its own.
        metrics[MAX_SHARE_ERROR] = max(error, metrics.get(MAX_SHARE_ERROR) or 0.0)
        metrics[ENDED_SOURCES] = sum(self._ended) + (metrics.get(ENDED_SOURCES) or 0.0)
        if self._per_source:
            for name, count in zip(self._names, self._counts, strict=True):
                metrics[SHARE_PREFIX + name] = count / total
        metrics.update(self._seconds)
        self._seconds.clear()
        metrics.update(read)
        return metrics

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
            "expected": self._given()[1].copy(),
            "sources": self._states.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue where a run stopped; weights may have changed since, and sources may have been added.

        Args:
            state: this rank's state, or those of all ranks in rank order; see `StreamSource.load_state_dict`.

        Raises:
            UserError: another seed, a source that is missing now, or one that gave batches and cannot be resumed.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        own = states[0]
        if own.get("version") != VERSION or "names" not in own:
            raise UserError("data.source", "the saved state is not one of a blend of this version", "start without it")
        if own["seed"] != self._seed:
            problem = f"the saved state was made with {own['seed']}, this run has {self._seed}"
            raise UserError("run.seed", problem, f"set it to {own['seed']}")
        if gone := [name for name in own["names"] if name not in self._names]:
            raise UserError(
                "data.source", f"the saved state has a source {gone[0]!r}, which is missing now", "put it back"
            )
        self._batch_index = self._first = own["batch_index"]
        self._choices = []
        self._latest.clear()
        self._expected = [[0.0] * len(self.sources)]
        for index, name in enumerate(self._names):
            self._counts[index], self._ended[index] = 0, False
            if name in own["names"]:
                self._load_source(index, own["names"].index(name), states)
        self._begin()
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


def _keys_of(dataset: Any, taken: Set[str], guard: BestEffort) -> list[str] | None:
    """The names that a source may report, each once, without the blend's own (`taken`); None if it reports nothing."""
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
    drained: dict[str, float | None] | None = guard.run(dataset.drain_step_metrics)
    if drained is not None and not isinstance(dataset, StreamSource | BlendDataset):
        drained = guard.run(checked, drained, guard.leave_out, as_number)
    if drained is None:
        return unknown
    for key in drained.keys() - unknown.keys():
        drained.pop(key)
        guard.leave_out(key, "it is not among the metric_keys")
    return drained
