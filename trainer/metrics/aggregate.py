"""Puts the values of several micro-steps, and of several steps between two logged ones, together on one rank.

How values combine comes from the catalog's `window` column. Tensors stay on their device and nothing is read: a value
is a number, a 0-dim tensor, or a `SumCount` for keys whose mean is weighted. `rank_reduction` combines the results over ranks,
also the `Moments` of what a reporter has sampled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from trainer.metrics.catalog.lookup import lookup_or_gauge
from trainer.metrics.catalog.spec import Kind, WindowReduction
from trainer.metrics.values import LeaveOut, as_number
from trainer.wording import message_of

Scalar = float | torch.Tensor
MOST_EXACT = 2**53


class SumCount(NamedTuple):
    """A mean on its way: a sum and the number, or total weight, of what was summed."""

    total: Scalar
    weight: Scalar


class Moments(NamedTuple):
    """A weighted mean over sampled units on its way, with what its standard error needs.

    Unit i has a total y_i and a weight w_i. The mean is R = sum(y) / sum(w), a ratio of two sums that both vary from sample to
    sample, and its standard error sqrt(n / (n - 1) sum((y - R w)^2)) / sum(w) (Cochran, Sampling Techniques, 3rd ed. 1977,
    section 6.4). With equal weights this is the standard error of an ordinary mean.
    """

    num: Scalar
    """Number of units, n."""
    total: Scalar
    """Sum of y."""
    weight: Scalar
    """Sum of w."""
    total_sq: Scalar
    """Sum of y^2."""
    cross: Scalar
    """Sum of y w."""
    weight_sq: Scalar
    """Sum of w^2."""

    @classmethod
    def of(cls, totals: torch.Tensor, weights: torch.Tensor) -> Moments:
        """Of units with these totals and weights, [n] each, without waiting for the device. Those of weight 0 are no units."""
        weights = weights.double()
        is_unit = weights != 0
        totals = torch.where(is_unit, totals.double(), 0.0)
        squares = (totals.square().sum(), (totals * weights).sum(), weights.square().sum())
        return cls(is_unit.sum(), totals.sum(), weights.sum(), *squares)

    def mean(self) -> float:
        """R; NaN without units. Waits for the device."""
        return float(self.total) / float(self.weight) if float(self.num) else math.nan

    def error(self) -> float:
        """The standard error of R; NaN for fewer than two units. Waits for the device."""
        num = float(self.num)
        if num < 2:
            return math.nan
        ratio = self.mean()
        squares = float(self.total_sq) - 2 * ratio * float(self.cross) + ratio**2 * float(self.weight_sq)
        # Rounding may leave a sum of squares below zero; a NaN stays one.
        return math.sqrt(0.0 if squares < 0 else squares * num / (num - 1)) / float(self.weight)


Value = Scalar | SumCount
# None: this rank should have a value and cannot give it. A total or an extreme over the others would look right and be wrong:
# there is none then. A mean is over the others.
Reported = Value | Moments | None
# What callers may pass: a component's own pair counts as a SumCount.
Input = Scalar | tuple[Scalar, Scalar]


def as_scalar(value: Any) -> Scalar:
    """A number, or a tensor of one element without its graph; waits for no device.

    Raises:
        TypeError: it is neither.
    """
    if type(value) is float or (type(value) is int and abs(value) < MOST_EXACT):
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach()
    return as_number(value)


def as_value(value: Any) -> Value:
    """As `as_scalar`, also a pair of them."""
    if isinstance(value, tuple) and len(value) == 2:
        return SumCount(as_scalar(value[0]), as_scalar(value[1]))
    return as_scalar(value)


def _larger(a: Scalar, b: Scalar, sign: int) -> Scalar:
    """The larger of two scalars (`sign` 1) or the smaller (-1); NaN wins over any number, on the device and off it."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        like = a if isinstance(a, torch.Tensor) else b
        assert isinstance(like, torch.Tensor)
        first, second = (x if isinstance(x, torch.Tensor) else like.new_full((), x) for x in (a, b))
        return torch.maximum(first, second) if sign > 0 else torch.minimum(first, second)
    if a != a or b != b:
        return float("nan")
    return max(a, b) if sign > 0 else min(a, b)


@dataclass(slots=True)
class _Entry:
    """Running aggregate of one key."""

    how: WindowReduction
    total: Scalar | None
    """None: see `Reported`."""
    count: Scalar

    def value(self) -> Value | None:
        if self.total is None:
            return None
        if self.how == "weighted_mean":
            return SumCount(self.total, self.count)
        return self.total / self.count if self.how == "mean" else self.total


class Recorder:
    """The one place where a run's metrics are recorded: combines what is recorded until it is drained.

    A key that some micro-batches lack is combined over those that reported it: a gauge present once with 1.0 stays 1.0. A key
    that is not in the catalog is a gauge.

    Args:
        metric_keys: the keys that may be recorded; empty: any.
        leave_out: told of a value that cannot be taken, which then counts as one that could not be given; None: it raises.
    """

    def __init__(self, metric_keys: Iterable[str] = (), *, leave_out: LeaveOut | None = None) -> None:
        self.metric_keys = tuple(metric_keys)
        self._known = frozenset(self.metric_keys)
        self._leave_out = leave_out
        self._rules: dict[str, WindowReduction] = {}  # looked up once
        self._entries: dict[str, _Entry] = {}
        self._moments: dict[str, Moments] = {}  # of the last sample

    def record(self, key: str, value: Input | Moments | None) -> None:
        """Take in one value; see `add`."""
        self.add({key: value})

    def add(self, values: Mapping[str, Input | Moments | None]) -> None:
        """Take in the values of one micro-batch; a pair is (sum, count), None a value that could not be given.

        Raises:
            KeyError: a key is not among `metric_keys`, where those were given.
            TypeError: a value is no number.
            ValueError: a pair for a key whose mean is not weighted.
        """
        if self._known and not self._known.issuperset(values):
            raise KeyError(f"not among the metric_keys: {', '.join(sorted(values.keys() - self._known))}")
        for key, value in values.items():
            try:
                self._add(key, value)
            except Exception as error:  # noqa: BLE001 - one value must not cost the others
                if self._leave_out is None:
                    raise type(error)(f"{key}: {message_of(error)}") from None
                self._leave_out(key, message_of(error))
                self._add(key, None)

    def _add(self, key: str, value: Input | Moments | None) -> None:
        how, entry = self._rules.get(key), self._entries.get(key)
        if how is None:
            how = self._rules[key] = lookup_or_gauge(key).window
        if isinstance(value, Moments):
            self._moments[key] = value
            return
        if value is None:
            if how not in ("mean", "weighted_mean"):
                self._entries[key] = _Entry(how, None, 1.0)
            return
        if type(value) is not float:
            value = as_value(value)
        if isinstance(value, tuple) and how != "weighted_mean":
            raise ValueError(f"a (sum, count) pair, but its window reduction is {how}")
        total, count = value if isinstance(value, tuple) else (value, 1.0)
        if entry is None or how == "last":
            self._entries[key] = _Entry(how, total, count)
        elif entry.total is None:
            return
        elif how in ("max", "min"):
            entry.total = _larger(entry.total, total, 1 if how == "max" else -1)
        else:
            entry.total, entry.count = entry.total + total, entry.count + count

    def result(self) -> dict[str, Reported]:
        """The aggregates so far; weighted means still as `SumCount`."""
        return {**{key: entry.value() for key, entry in self._entries.items()}, **self._moments}

    def state_dict(self) -> dict[str, list[float | None]]:
        """Sum (or extreme, or last; None: not known) and count of each key, as plain numbers; waits for their devices."""
        return {
            key: [None if entry.total is None else float(entry.total), float(entry.count)]
            for key, entry in self._entries.items()
        }

    def load_state_dict(self, state: Mapping[str, Sequence[Any]]) -> None:
        """Go on from a saved state."""
        self._entries = {
            key: _Entry(lookup_or_gauge(key).window, total, count) for key, (total, count) in state.items()
        }

    def drain_metrics(self) -> dict[str, Reported]:
        """The aggregates so far; starts anew."""
        result = self.result()
        self._entries, self._moments = {}, {}
        return result


class UnloggedCounters:
    """Keeps what was counted on steps that did not log, so that the next one that does reports it.

    Counters add up and flags stay raised; of any other key only the latest step's value is handed on. Counters that
    must be reported from the first logged step on are named as `counters` and start at zero.
    """

    def __init__(self, counters: tuple[str, ...] = ()) -> None:
        self._counters = counters
        self._kinds: dict[str, Kind] = {}  # looked up once
        self._kept: dict[str, Scalar | None] = dict.fromkeys(counters, 0.0)
        self._latest: dict[str, Value] = {}

    def add(self, values: Mapping[str, Value | None]) -> None:
        """Take in one step's values; None is one that could not be given: its count is not known until the next drain."""
        self._latest = {}
        for key, value in values.items():
            kind, kept = self._kinds.get(key), self._kept.get(key, 0.0)
            if kind is None:
                kind = self._kinds[key] = lookup_or_gauge(key).kind
            value = value.detach() if isinstance(value, torch.Tensor) else value
            if kind == "gauge" or isinstance(value, tuple):
                if value is not None:
                    self._latest[key] = value
            elif value is None or kept is None or key not in self._kept:
                self._kept[key] = value if kept is not None else None
            else:
                self._kept[key] = kept + value if kind == "counter" else _larger(kept, value, 1)

    def drain(self) -> dict[str, Value]:
        """Everything counted since the last drain, and the latest step's other values; starts anew."""
        kept = {key: value for key, value in self._kept.items() if value is not None}
        drained: dict[str, Value] = {**kept, **self._latest}
        self._kept = dict.fromkeys(self._counters, 0.0)
        self._latest = {}
        return drained
