"""From runs to charts: which keys share a chart, with which curves, under which heading of the catalog."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.metrics.catalog.lookup import (
    CATALOG,
    ERROR_SUFFIX,
    EVAL_PREFIX,
    WORST_SUFFIX,
    family,
    is_known,
    keys_under,
    lookup,
)
from trainer.metrics.catalog.rows_gns import LAYER_ROWS
from trainer.metrics.catalog.spec import Band
from trainer.tools.diagnostics.rule import batches_through
from trainer.tools.runs.load import RunRecord
from trainer.tools.runs.noise_scale import B_BIG, READINGS, noise_scale_of
from trainer.wording import counted

# Over all curves: the page stays below 15 MB, including the 5 MB of plotly.
POINT_BUDGET: Final = 150_000
MOST_POINTS: Final = 1_500
FEWEST_POINTS: Final = 100
OTHER_GROUP: Final = "Not in the catalog"
# "Smoothed" repeats other curves, which the page can smooth by itself.
LAST_GROUPS: Final = ("Smoothed", OTHER_GROUP)
VARIANT_WORDS: Final = {"train": "", "eval": "held out", "worst": "worst rank"}
# One healthy run in a thousand exceeds the bound on the pick surprise (docs/mixing.md).
SURPRISE_ALPHA: Final = 1e-3

Style = Literal["line", "area", "heat"]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Values over steps. A point is one logged value, or a bucket of neighboring ones.

    Attributes:
        first, last: first and last logged step of each point [N], ascending.
        mean, low, high: over the finite values of each point [N]; equal if the point is one value.
        num_values: number of finite values in all points.
        bad_steps: steps with NaN or infinite values, which are not in the points.
    """

    first: Ints
    last: Ints
    mean: Floats
    low: Floats
    high: Floats
    num_values: int
    bad_steps: Ints

    @property
    def is_reduced(self) -> bool:
        """Whether points are buckets."""
        return self.num_values > len(self.mean)

    @property
    def is_constant(self) -> bool:
        """Whether all values are the same finite number."""
        return bool(len(self.mean)) and not len(self.bad_steps) and float(self.low.min()) == float(self.high.max())


def make_curve(steps: ArrayLike, values: ArrayLike, *, limit: int) -> Curve:
    """A curve of at most `limit` points.

    More values are put into buckets of equal width in steps. A point then has the mean, lowest and highest value of its bucket,
    so an outlier stays visible in a run of any length.

    Args:
        steps: ascending and unique [V].
        values: NaN and infinities go to `bad_steps` [V].
        limit: at least 1.
    """
    step, value = np.asarray(steps, np.int64), np.asarray(values, np.float64)
    finite = np.isfinite(value)
    bad = step[~finite]
    step, value = step[finite], value[finite]
    if len(step) <= limit:
        return Curve(step, step, value, value, value, len(step), bad)
    width = (int(step[-1]) - int(step[0]) + 1) / limit
    bucket = ((step - step[0]) / width).astype(np.int64)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    counts = np.diff(starts, append=len(step))
    # Dividing before the sum keeps values near the largest float from overflowing.
    mean = np.add.reduceat(value / np.repeat(counts, counts), starts)
    low, high = np.minimum.reduceat(value, starts), np.maximum.reduceat(value, starts)
    return Curve(step[starts], step[starts + counts - 1], mean, low, high, len(step), bad)


def running_total(values: ArrayLike) -> Floats:
    """Cumulative sum of a counter; values that are not finite count as 0."""
    total: Floats = np.cumsum(np.nan_to_num(np.asarray(values, np.float64), nan=0.0, posinf=0.0, neginf=0.0))
    return total


@dataclass(frozen=True)
class Line:
    """One curve of a chart.

    Attributes:
        run: index of the run.
        label: legend text, including the name of the run if there are several.
        variant: distinguishes lines of the same run and key.
        color: index of a color; stands for the run if there are several.
        dash: index of a dash style; stands for the variant.
        errors: standard error of each point; NaN where unknown.
    """

    run: int
    label: str
    variant: str
    curve: Curve
    color: int
    dash: int = 0
    errors: Floats | None = None


@dataclass(frozen=True)
class Reference:
    """A horizontal line to compare with, such as a capacity, of one run."""

    label: str
    value: float
    run: int


@dataclass(frozen=True)
class Chart:
    """One chart. `facts` are (heading, text) pairs shown below it. Of style `heat`, a line is a row of cells over steps, whose
    colors are logarithmic. `is_wide`: a combined view."""

    title: str
    unit: str
    group: str
    keys: tuple[str, ...]
    lines: tuple[Line, ...]
    style: Style = "line"
    band: Band | None = None
    references: tuple[Reference, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    is_wide: bool = False
    is_log: bool = False

    @property
    def axis(self) -> str:
        """Title of the axis of values."""
        return self.unit or ("unit not known" if self.group == OTHER_GROUP else "no unit")

    @property
    def is_zero(self) -> bool:
        """Whether every value is 0, without error bars, and some key has several. A single 0 says nothing about the run."""
        is_zero = all(
            line.curve.is_constant and float(line.curve.low[0]) == 0.0 and line.errors is None for line in self.lines
        )
        return is_zero and any(line.curve.num_values > 1 for line in self.lines)

    @property
    def is_drawn(self) -> bool:
        """Whether it is drawn: zeros are listed in words, and so are constants, except in a combined view."""
        return not self.is_zero and (self.is_wide or not all(line.curve.is_constant for line in self.lines))


@dataclass
class Columns:
    """Every key of every run as a curve of at most `limit` points, computed on first use."""

    runs: Sequence[RunRecord]
    limit: int
    _made: dict[tuple[int, str], Curve | None] = field(default_factory=dict)

    def curves(self, key: str) -> list[tuple[int, Curve]]:
        """(index of the run, curve) for each run that has the key."""
        for run, record in enumerate(self.runs):
            if (run, key) not in self._made:
                steps, values = record.column(key)
                self._made[run, key] = make_curve(steps, values, limit=self.limit) if len(steps) else None
        return [(run, curve) for run in range(len(self.runs)) if (curve := self._made[run, key]) is not None]

    def errors(self, run: int, key: str, curve: Curve) -> Floats | None:
        """The standard error of each point, NaN where unknown; None for a key without errors, and for buckets."""
        if not is_error(key + ERROR_SUFFIX) or curve.is_reduced:
            return None
        known = dict(zip(*self.runs[run].column(key + ERROR_SUFFIX), strict=True))
        errors = np.array([known.get(step, math.nan) for step in curve.first.tolist()])
        return errors if np.isfinite(errors).any() else None

    @property
    def is_single(self) -> bool:
        """Whether there is only one run, so that colors stand for lines."""
        return len(self.runs) == 1


def variant_of(key: str) -> tuple[str, str]:
    """(base key, variant): `eval_loss` is the evaluation of `loss`, `ledger/cold_starts_max` is that of the worst rank."""
    if key.startswith(EVAL_PREFIX):
        return key.removeprefix(EVAL_PREFIX), "eval"
    base = key.removesuffix(WORST_SUFFIX)
    # Some keys of the catalog end in _max themselves.
    if base != key and is_known(base) and is_known(key) and lookup(key).title == f"{lookup(base).title}, worst rank":
        return base, "worst"
    return key, "train"


def is_error(key: str) -> bool:
    """Whether the key is a standard error, which is drawn as a band around its mean."""
    base = key.removesuffix(ERROR_SUFFIX)
    return base != key and is_known(base) and lookup(base).ranks == "mean_and_error"


def _family(key: str) -> tuple[str, str]:
    return family(key) if is_known(key) else ("", "")


def chart_id(key: str, *, is_single: bool) -> str:
    """Keys with the same id share a chart.

    Evaluation and worst rank are drawn with the training curve. For a single run the keys of a pattern share a chart too, one
    for each variant; for several runs, colors stand for runs, so each key needs its own.
    """
    base, variant = variant_of(key)
    row, part = _family(base)
    return f"{row} {variant}" if part and is_single else base


def _facts(keys: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Meaning, good and bad signs of some keys from the catalog; of several, each with the title of its row."""
    specs = {family(key)[0]: lookup(key) for key in keys if is_known(key)}
    facts = []
    for spec in specs.values():
        front = f"{spec.title}: " if len(specs) > 1 else ""
        words = ("What", f"{front}{spec.description}"), ("Healthy", spec.healthy), ("Trouble", spec.pathological)
        facts += [(name, text) for name, text in words if text]
    return tuple(facts)


@dataclass(frozen=True)
class View:
    """Keys that are read together.

    Attributes:
        rows: names of catalog rows; a pattern stands for all its keys.
        style: for a single run; several runs are drawn as lines.
        is_total: draw running totals.
        is_log: logarithmic scale.
        max_keys: lines of one color that are readable if colors stand for runs; beyond, the keys get separate charts.
        references: horizontal lines.
    """

    title: str
    rows: tuple[str, ...]
    style: Style = "line"
    is_total: bool = False
    is_log: bool = False
    max_keys: int = 1
    references: Callable[[Columns], Iterable[Reference]] = lambda columns: ()


PLAIN: Final = View("", ())


def _capacity(columns: Columns) -> Iterable[Reference]:
    for number, run in enumerate(columns.runs):
        capacity, ranks = run.setting("ledger.capacity"), run.world_size
        if isinstance(capacity, int) and ranks is not None:
            yield Reference(f"capacity of {counted(ranks, 'rank')}", float(capacity * ranks), number)


def _surprise_bound(columns: Columns) -> Iterable[Reference]:
    for number, run in enumerate(columns.runs):
        if run.steps:
            picks = batches_through(run, run.steps[-1])
            yield Reference("ln(picks / 0.001)", math.log(max(picks, 1) / SURPRISE_ALPHA), number)


_ACTIVE: Final = "stream_mixing/active/"
VIEWS: Final = (
    View(
        "Step time by phase (share)",
        ("time/data_share", "time/forward_backward_share", "time/optimizer_share"),
        style="area",
    ),
    View("Step time by phase (seconds)", ("time/data_sec", "time/forward_backward_sec", "time/optimizer_sec")),
    View("Device memory", ("gpu/allocated_gb", "gpu/peak_gb", "gpu/reserved_gb", "gpu/total_gb")),
    View("Pool: active readers by modality", (f"{_ACTIVE}modalities/<modality>",), style="area"),
    View("Pool: remaining picks per reader", (f"{_ACTIVE}remaining_min", f"{_ACTIVE}remaining_max"), max_keys=2),
    View(
        "Pool: remaining fraction of the slice per reader",
        (f"{_ACTIVE}remaining_fraction_min", f"{_ACTIVE}remaining_fraction_max"),
        max_keys=2,
    ),
    View("Pool: surprise of the longest wait", (f"{_ACTIVE}pick_surprise_max",), references=_surprise_bound),
    View("Ledger: live groups", ("ledger/live_groups",), references=_capacity),
    View(
        "Ledger: lost state, running total",
        (*keys_under("ledger/false_evictions/"), "ledger/cold_starts"),
        is_total=True,
        max_keys=3,
    ),
    View("Ledger: evictions, running total", keys_under("ledger/evictions/"), is_total=True, max_keys=2),
    View("Ledger: what carrying is worth", ("ledger/carry_gain", "ledger/stale_gap"), max_keys=2),
    *(View(spec.title, (spec.name,), style="heat") for spec in LAYER_ROWS),
)


def _noise_scale_views(columns: Columns) -> list[View]:
    """A view of each key that the noise scale of a run is read from (`noise_scale_of`), the first where none can be read."""
    scales = [scale for run in columns.runs if (scale := noise_scale_of(run)) is not None]
    read = sorted({scale.key for scale in scales}, key=READINGS.index) or ["gns/b_now"]
    return [
        View(
            "Noise scale and batch size" + (f" ({key})" if len(read) > 1 else ""),
            (key, f"{key}_low", f"{key}_high", B_BIG),
            is_log=True,
            max_keys=4,
        )
        for key in read
    ]


def _make_views(columns: Columns, keys: Sequence[str]) -> tuple[list[Chart], set[str]]:
    """(charts, the keys that they show). Skips views with too many lines for several runs."""
    charts, used = [], set[str]()
    for view in (*_noise_scale_views(columns), *VIEWS):
        shown = [key for row in view.rows for key in keys if _belongs(key, row) and columns.curves(key)]
        if not shown or (not columns.is_single and len(shown) > view.max_keys):
            continue
        if view.style == "heat":  # `blocks.10` follows `blocks.9`
            shown.sort(key=lambda key: [(text, int(part or 0)) for text, part in re.findall(r"(\D*)(\d*)", key)])
        charts.append(_chart(columns, shown, view))
        used.update(shown)
    return charts, used


def _belongs(key: str, row: str) -> bool:
    return variant_of(key)[1] == "train" and _family(key)[0] == row and not is_error(key)


def _chart(columns: Columns, keys: Sequence[str], view: View = PLAIN) -> Chart:
    """The chart of keys that share one."""
    base = variant_of(keys[0])[0]
    parts = [_family(variant_of(key)[0])[1] for key in keys]
    variants = [variant_of(key)[1] for key in keys]
    dashes = [list(VARIANT_WORDS).index(variant) for variant in variants]
    names = [VARIANT_WORDS[variant] for variant in variants]
    if view.rows and (len(keys) > 1 or parts[0]):
        names = _short_titles([part or lookup(key).title for part, key in zip(parts, keys, strict=True)])
        # Totals often coincide (each false eviction is also a cold start): only dashes make both visible.
        dashes = [number if view.is_total or not columns.is_single else 0 for number in range(len(keys))]
    elif columns.is_single and parts[0]:
        names, dashes = parts, [0] * len(keys)
    lines = []
    for number, (key, name, dash) in enumerate(zip(keys, names, dashes, strict=True)):
        for run, curve in columns.curves(key):
            words = ["" if columns.is_single else columns.runs[run].name, name]
            errors, drawn = columns.errors(run, key, curve), curve
            if view.is_total:
                steps, values = columns.runs[run].column(key)
                drawn = replace(
                    make_curve(steps, running_total(values), limit=columns.limit), bad_steps=curve.bad_steps
                )
            label = ", ".join(filter(None, words)) or "train"
            lines.append(Line(run, label, name or "train", drawn, number if columns.is_single else run, dash, errors))
    if not is_known(base):
        return Chart(base, "", OTHER_GROUP, tuple(keys), tuple(lines))
    spec = lookup(base)
    title = view.title or spec.title
    if not view.rows and parts[0] and (not columns.is_single or len(keys) == 1):
        title = f"{title}: {parts[0]}"
    if not view.rows and len(set(variants)) == 1 and variants[0] != "train":
        title = f"{title}, {VARIANT_WORDS[variants[0]]}"
    return Chart(
        title,
        spec.unit,
        spec.group,
        tuple(keys),
        tuple(lines),
        style=view.style if columns.is_single else "line",
        band=spec.band if len(keys) == 1 or not view.rows else None,
        references=tuple(view.references(columns)),
        facts=_facts(keys if view.rows else [base]),
        is_wide=bool(view.rows),
        is_log=view.is_log,
    )


def _short_titles(titles: list[str]) -> list[str]:
    """Titles without the leading words that all of them share: they are in the title of the chart."""
    for mark in (": ", ", "):
        if (
            len(titles) > 1
            and len({title.partition(mark)[0] for title in titles}) == 1
            and all(mark in title for title in titles)
        ):
            titles = [title.partition(mark)[2] for title in titles]
    return titles


def catalog_charts(columns: Columns, keys: Iterable[str]) -> list[Chart]:
    """The charts of some keys, in the order of the catalog; standard errors are drawn with their means."""
    rows = {spec.name: number for number, spec in enumerate(CATALOG)}

    def order(key: str) -> tuple[int, str, int]:
        base, variant = variant_of(key)
        return rows.get(_family(base)[0], len(rows)), base, list(VARIANT_WORDS).index(variant)

    shared: dict[str, list[str]] = {}
    for key in sorted(keys, key=order):
        if columns.curves(key) and not is_error(key):
            shared.setdefault(chart_id(key, is_single=columns.is_single), []).append(key)
    return [_chart(columns, together) for together in shared.values()]


def points_per_curve(runs: Sequence[RunRecord]) -> int:
    """The number of points per curve that keeps the page within the budget."""
    num_curves = max(sum(len(run.keys) for run in runs), 1)
    return min(max(POINT_BUDGET // num_curves, FEWEST_POINTS), MOST_POINTS)


def make_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Charts with every key of every run, sorted by the headings of the catalog; in each group the views come first."""
    columns = Columns(runs, points_per_curve(runs))
    keys = list(dict.fromkeys(key for run in runs for key in run.keys))
    views, used = _make_views(columns, keys)
    groups = dict.fromkeys(spec.group for spec in CATALOG)
    order = [*(group for group in groups if group not in LAST_GROUPS), *LAST_GROUPS]
    charts = [*views, *catalog_charts(columns, [key for key in keys if key not in used])]
    return sorted(charts, key=lambda chart: order.index(chart.group))
