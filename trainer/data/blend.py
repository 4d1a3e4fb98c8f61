"""BlendDataset: micro-batches from several sources, by weights that may follow a schedule."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final, NoReturn

import numpy as np

from trainer.arrays import BLOCK, KeyedUniforms, as_list
from trainer.data.collate import Batch
from trainer.data.pool import STAGES
from trainer.data.shard_source import StreamSource
from trainer.data.weights import ScheduledWeight, positions
from trainer.errors import UserError
from trainer.metrics.best_effort import BestEffort, as_number, checked, is_name
from trainer.metrics.catalog import is_built_in, lookup_or_gauge
from trainer.metrics.catalog_rows import EPOCHS_LEAST, EPOCHS_MOST, SHARE_ERRORS, RankReduction
from trainer.options import ONE, MicroBatches

ALL_RANKS: Final = "states of all ranks"
"""The key of a source's part that holds those of every rank of the world that saved them."""
LONGEST_SHARE = "blend/longest_share"
ENDED_SOURCES = "blend/ended_sources"
SHARE_PREFIX, WEIGHT_PREFIX = "blend/share/", "blend/weight/"
# Rows of the catalog that sources may report; the others belong to other parts of the trainer.
SOURCE_ROWS = ("stream_mixing/active/", "stream_mixing/refill/")
Reported = float | tuple[float, float] | None  # a pair is a ratio; None: it was not measured
Drained = Mapping[str, Reported]
# Sources are merged like ranks: by the operation that the catalog has for the key.
_MERGES: Mapping[RankReduction, Callable[[Iterable[Any]], Any]] = {
    **{"min": min, "max": max, "sum": sum, "sum_and_worst": sum},
    **dict.fromkeys(("mean", "weighted_mean", "max_over_sum"), fmean),
}


class UnreadSource:
    """A source of weight 0: nothing of it is opened, and its state is kept for a later weight."""

    kept: Any = None
    """Its state on this rank, or `{ALL_RANKS: [...]}` from a world of another size."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def state_dict(self) -> Any:
        return self.kept


@dataclass(frozen=True)
class BlendSource:
    """One source: an iterable of micro-batch dicts, and its weight; weights need not sum to 1."""

    name: str
    dataset: Iterable[Any]
    weight: ScheduledWeight


class BlendDataset:
    """An iterator of micro-batches, each from one source.

    The source of batch i is a pure function of (seed, names, i), the weights at i, and which
    sources still have data: ranks choose the same until one ends earlier on some of them. A source
    with weight zero is never picked. Exhausted sources are skipped; when all are exhausted (or stay
    at weight zero), iteration stops.

    A source needs only `__iter__`; to be resumed, `state_dict` and `load_state_dict` (on another
    number of ranks: of the list of their states); for metrics, `drain_step_metrics` and
    `metric_keys`, all that it can return (those not in the catalog are gauges). If they fail, they
    are unknown from then on; `guards` makes what says so, by its name. A blend in a blend has none.

    `seed` is of the choices; `micro_batches` are those of a step. `per_source`: also report share,
    weight and epochs of each source; `times`: the seconds of reading since the last drain, of all
    sources or of each. Raises UserError without sources, for a name twice, and at a batch at which
    all weights are zero.
    """

    def __init__(
        self,
        sources: Sequence[BlendSource],
        *,
        seed: int,
        micro_batches: MicroBatches = ONE,
        per_source: bool = False,
        times: bool = False,
        guards: Callable[[str], BestEffort] = BestEffort,
    ) -> None:
        if not sources:
            raise UserError("data.source", "a blend needs at least one source", "add a [[data.source]]")
        self._names = names = [source.name for source in sources]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise UserError("data.source", f"two sources are called {twice!r}", "rename one")
        self.sources = list(sources)
        self.lane_sets: Mapping[int, int] = {}  # of full rows, see `LaneBlend`
        self._micro_batches = micro_batches
        self._iterators = [iter(source.dataset) for source in self.sources]
        self._seed = seed
        # With the names: a nested blend draws its own numbers.
        self._uniforms = KeyedUniforms("blend", seed, *names)
        self._batch_index = 0
        self._now = -1  # the source that the next batch is read from
        self._ended = [False] * len(sources)
        self._counts = [0.0] * len(sources)
        self._first = 0  # the batch at which the table of choices begins
        self._choices: list[int] = []
        # Before each choice and after the last: the batches of each source by its weights.
        self._expected: list[list[float]] = []
        self._due = [0.0] * len(sources)  # what the weights call for so far
        self._total = self._longest = 0  # its sum; the longest document, where shares are of tokens
        self._states: list[Mapping[str, Any] | None] = [None] * len(sources)
        self._unsaved = set(range(len(sources)))  # whose state is not in `_states` yet
        self._time_names: list[str] = []  # of each source, in `time/<stage>/<name>`
        self._has_shares, self._guards = per_source, guards
        if times:
            self._time_names = names if per_source else ["all"] * len(names)
        self._seconds: defaultdict[str, float] = defaultdict(float)  # by key, since the last drain
        self._constants: dict[str, Reported] = {}  # metrics that stay as they are
        self._latest: dict[int, dict[str, Reported]] = {}  # the last report of each source
        self._undrained: set[int] = set()
        self._register_metrics()

    def _register_metrics(self) -> None:
        keys = [LONGEST_SHARE, ENDED_SOURCES, EPOCHS_LEAST, EPOCHS_MOST]
        keys += [SHARE_ERRORS + name for name in self._names]
        keys += [f"time/{stage}/{name}" for name in self._time_names for stage in STAGES]
        own = []
        if self._has_shares:
            prefixes = SHARE_PREFIX, WEIGHT_PREFIX, f"{EPOCHS_LEAST}/", f"{EPOCHS_MOST}/"
            own = [prefix + name for prefix in prefixes for name in self._names]
        # Of the sources that report metrics: all of them as unknown.
        self._reporters: dict[int, tuple[Drained, BestEffort]] = {}
        for index, source in enumerate(self.sources):
            guard = self._guards(f"metrics of the source {source.name}")
            own_keys = guard.run(_keys_of, source.dataset, frozenset(own), guard)
            if own_keys is not None:
                self._reporters[index] = (dict.fromkeys(own_keys), guard)
                keys += own_keys
        self.metric_keys = tuple(dict.fromkeys([*keys, *own]))
        specs = {key: lookup_or_gauge(key) for key in self.metric_keys}
        self._merges = {key: _MERGES[spec.ranks] for key, spec in specs.items()}
        self._counters = {key for key, spec in specs.items() if spec.kind == "counter"}

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next micro-batch, with its source's name as `dataset_labels` if it has none."""
        batch = None
        while batch is None:
            at = self._batch_index - self._first
            if at >= len(self._choices):
                self._choose()
                at = 0
            chosen = self._choices[at]
            if chosen < 0:
                self._stop_or_refuse()
            start = time.perf_counter()
            batch = self._read(chosen)
        if self._time_names:
            seconds, dataset = time.perf_counter() - start, self.sources[chosen].dataset
            stages = {"own_code": seconds}
            if isinstance(dataset, StreamSource):
                stages = dataset.drain_seconds()
                # `drain_step_metrics` may have opened files, too, before.
                stages["read"] = max(seconds - sum(stages.values()), 0.0)
            for stage, part in stages.items():
                self._seconds[f"time/{stage}/{self._time_names[chosen]}"] += part
        self._counts[chosen] += 1
        self._total += 1
        self._batch_index += 1
        self._due = self._expected[self._batch_index - self._first]
        return batch

    def _read(self, index: int) -> Batch | None:
        """The next batch of a source, with its labels; None if the source has ended."""
        self._now = index
        self._unsaved.add(index)
        self._undrained.add(index)  # at its end too: its gauges are to go
        try:
            batch: Batch = next(self._iterators[index])
        except StopIteration:
            self._ended[index] = True
            self._choices = []
            return None
        if "dataset_labels" not in batch:
            rows: Any = batch.get("tokens", batch.get("targets"))
            labels: Any = [self.sources[index].name] * len(rows)
            if "segment_ids" in batch:  # one for each segment
                labels = (self.sources[index].name,) * (int(np.asarray(batch["segment_ids"]).max()) + 1)
            batch = {**batch, "dataset_labels": labels}
        return batch

    @property
    def now_reading(self) -> str:
        """The source being read, and its file if known; empty at first. For any thread."""
        if self._now < 0:
            return ""
        source = self.sources[self._now]
        where = getattr(source.dataset, "now_reading", None)
        file = f": {where}" if isinstance(where, str) and where else ""
        return f"source {source.name}{file}"

    def shares_at(self, batch: int) -> list[float]:
        """The share of each source at a batch; 0 if all weights are."""
        specs = [source.weight for source in self.sources]
        weights = [spec.evaluate(positions(spec.unit, batch, self._micro_batches)) for spec in specs]
        return [weight / (sum(weights) or 1.0) for weight in weights]

    def _choose(self) -> None:
        """Compute the choices from the next batch to the end of its block; -1: no weight."""
        self._first = self._batch_index
        block, offset = divmod(self._first, BLOCK)
        batches = np.arange(self._first, (block + 1) * BLOCK, dtype=np.int64)
        specs = [source.weight for source in self.sources]
        places = [positions(spec.unit, batches, self._micro_batches) for spec in specs]
        weights = np.stack([*map(ScheduledWeight.evaluate_many, specs, places)], axis=1)
        sums = weights.sum(axis=1, keepdims=True)
        shares = np.divide(weights, sums, out=np.zeros_like(weights), where=sums > 0)
        alive = np.where(self._ended, 0.0, weights)
        left = alive.sum(axis=1, keepdims=True)
        ends = np.divide(alive, left, out=np.zeros_like(alive), where=left > 0).cumsum(axis=1)
        totals = ends[:, -1:]
        chosen = (ends <= self._uniforms.block(block)[offset:, None] * totals).sum(axis=1)
        chosen = np.where(totals[:, 0] > 0, chosen, -1)
        self._choices = chosen.tolist()
        self._expected = np.cumsum(np.vstack([self._due, shares]), axis=0).tolist()

    def _stop_or_refuse(self) -> NoReturn:
        """Stop if sources have ended, and the others stay at weight zero; else refuse the batch."""
        index = self._batch_index
        alive = [each for each, ended in zip(self.sources, self._ended, strict=True) if not ended]
        weights = [source.weight for source in alive]
        places = [(positions(each.unit, index, self._micro_batches), each.zero_from()) for each in weights]
        if len(alive) < len(self.sources) and all(zero is not None and x >= zero for x, zero in places):
            raise StopIteration
        names = ", ".join(source.name for source in alive)
        problem = f"at batch {index} every source that still has data has weight zero ({names})"
        raise UserError("data.source", problem, "keep one weight above zero at every batch")

    @property
    def groups_in_flight(self) -> list[int] | None:
        """Ids of unfinished groups; None if unknown."""
        return None

    @property
    def waiting_groups(self) -> list[int]:
        """Ids of those that wait for a row to continue on."""
        return []

    def drain_step_metrics(self) -> Drained:
        """The sources' metrics, merged key by key, and the blend's; {} before any batch.

        A source contributes its last report, its counters only once; after its end, values that sum
        over ranks are 0, and other gauges are left out. The tracker takes `blend/max_share_error`
        from the errors of all sources.
        """
        if not self._total:
            return {}
        for index in self._undrained & self._reporters.keys():
            self._latest[index] = self._report_of(index)
        metrics = self._merged()
        self._undrained.clear()
        begun = {}
        for source, count, due in zip(self.sources, self._counts, self._due, strict=True):
            metrics[SHARE_ERRORS + source.name] = (count - due, self._total)
            if isinstance(source.dataset, StreamSource) and (times := source.dataset.times_begun):
                begun[source.name] = times
        if begun:
            least, most = zip(*begun.values(), strict=True)
            metrics |= {EPOCHS_LEAST: min(least), EPOCHS_MOST: max(most)}
        if self._longest:
            metrics[LONGEST_SHARE] = (self._longest, self._total)
        metrics[ENDED_SOURCES] = float(sum(self._ended))
        if self._has_shares:
            shares = self.shares_at(self._batch_index - 1)
            for name, count, share in zip(self._names, self._counts, shares, strict=True):
                metrics |= {SHARE_PREFIX + name: (count, self._total), WEIGHT_PREFIX + name: share}
            for name, own in begun.items():
                metrics |= {f"{EPOCHS_LEAST}/{name}": own[0], f"{EPOCHS_MOST}/{name}": own[1]}
        metrics |= self._seconds
        self._seconds.clear()
        return metrics | self._constants

    def _report_of(self, index: int) -> dict[str, Reported]:
        """A source's metrics, those that it lists; once it fails, all of them are unknown."""
        dataset: Any = self.sources[index].dataset
        unknown, guard = self._reporters[index]
        drained: Drained | None = guard.run(dataset.drain_step_metrics)
        if drained is not None and not isinstance(dataset, StreamSource):
            drained = guard.run(checked, drained, guard.leave_out, as_number)
        if drained is None:
            drained = unknown
        for key in drained.keys() - unknown.keys():
            guard.leave_out(key, "it is not among the metric_keys")
        report = {key: value for key, value in drained.items() if key in unknown}
        if self._ended[index]:
            for key in report.keys() - self._counters:
                if self._merges[key] is sum:
                    report[key] = 0.0
                else:
                    del report[key]
        return report

    def _merged(self) -> dict[str, Reported]:
        by_key: defaultdict[str, list[Reported]] = defaultdict(list)
        for report in self._latest.values():
            for key, value in report.items():
                by_key[key].append(value)
            report |= dict.fromkeys(self._counters & report.keys(), 0.0)  # events count once
        metrics: dict[str, Reported] = {}
        for key, values in by_key.items():
            merge, known = self._merges[key], [value for value in values if value is not None]
            # Only a mean can do without the value of a source that failed.
            is_known = len(known) == len(values) or (merge is fmean and known)
            metrics[key] = merge(known) if is_known else None
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Plain Python; a snapshot that later batches do not change, if those of the sources are such."""
        for index in self._unsaved:  # the states of the others are the same
            self._states[index] = getattr(self.sources[index].dataset, "state_dict", lambda: None)()
        self._unsaved.clear()
        return {
            "seed": self._seed,
            "batch_index": self._batch_index,
            "plan": [[*map(list, self._micro_batches.points)], self._micro_batches.begin],
            "names": self._names,
            "ended": self._ended.copy(),
            "counts": self._counts.copy(),
            "expected": self._due.copy(),
            "sources": self._states.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue where a run stopped; weights may have changed, and sources may be new or gone.

        `state` is this rank's state, or those of all ranks in rank order.
        """
        states = as_list(state)
        own = states[0]
        if own["seed"] != self._seed:
            problem = f"the saved state was made with {own['seed']}, this run has {self._seed}"
            raise UserError("run.seed", problem, f"set it to {own['seed']}")
        self._batch_index = self._first = self._total = own["batch_index"]
        # The next batch stays in its step, whatever m the steps before it had.
        before, now = MicroBatches(*own["plan"]), replace(self._micro_batches, begin=0)
        step = before.step_of(self._batch_index)
        self._micro_batches = replace(now, begin=before.batches_before(step) - now.batches_before(step))
        self._choices = []
        self._latest.clear()
        self._due = [0.0] * len(self.sources)
        for index, name in enumerate(self._names):
            self._counts[index], self._ended[index] = 0, False
            if name in own["names"]:
                self._load_source(index, own["names"].index(name), states, own is state)
        self._iterators = [iter(source.dataset) for source in self.sources]
        # The merged metrics cover the last pick of every pool that was read.
        self._undrained = {at for at, count in enumerate(self._counts) if count or self._ended[at]}
        self._unsaved = set(range(len(self.sources)))

    def _load_source(self, index: int, saved: int, states: Sequence[Mapping[str, Any]], is_own: bool) -> None:
        dataset, parts = self.sources[index].dataset, [state["sources"][saved] for state in states]
        if isinstance(parts[0], Mapping) and ALL_RANKS in parts[0]:
            parts, is_own = parts[0][ALL_RANKS], False
        # Without `repeat`, ranks may differ.
        self._counts[index] = fmean(state["counts"][saved] for state in states)
        self._due[index] = states[0]["expected"][saved]
        self._ended[index] = all(state["ended"][saved] for state in states)
        load = getattr(dataset, "load_state_dict", None)
        if isinstance(dataset, UnreadSource):
            dataset.kept = parts[0] if is_own else {ALL_RANKS: parts}
        elif parts[0] is not None and load is not None:
            load(parts[0] if is_own else parts)
            self._ended[index] &= not isinstance(dataset, StreamSource) or dataset.is_ended  # it may repeat now
        elif self._counts[index]:
            problem = "was read before the checkpoint, and cannot be resumed"
            fix = "give it state_dict and load_state_dict, or start without this checkpoint"
            raise UserError(f"source {self._names[index]}", problem, fix)


def _keys_of(dataset: Any, taken: Set[str], guard: BestEffort) -> list[str] | None:
    """The names that a source may report, each once and not `taken`; None: it reports nothing."""
    keys = getattr(dataset, "metric_keys", None)
    if keys is None or not hasattr(dataset, "drain_step_metrics") or isinstance(dataset, BlendDataset):
        return None
    if isinstance(keys, str):  # its letters would be names
        raise TypeError(f"metric_keys must be a tuple of texts, got {keys!r}")
    found = [key for key in keys if is_name(key, guard.leave_out)]
    foreign = {key for key in found if key in taken or (is_built_in(key) and not key.startswith(SOURCE_ROWS))}
    for key in sorted(foreign):
        guard.leave_out(key, "the trainer reports a metric of this name itself; give it another one")
    return [key for key in dict.fromkeys(found) if key not in foreign]
