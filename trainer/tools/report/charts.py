"""From runs to charts: which keys share a chart, with which lines, under which heading of the catalog."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np

from trainer.metrics.catalog.lookup import CATALOG, ERROR_SUFFIX, EVAL_PREFIX, WORST_SUFFIX, family, is_known, lookup
from trainer.metrics.catalog.spec import Band
from trainer.tools.report.curves import Curve, band_curve, make_curve
from trainer.tools.runs.load import RunRecord
from trainer.wording import number_text

Style = Literal["line", "area", "heat"]
Variant = Literal["train", "eval", "worst"]
OTHER_GROUP: Final = "Not in the catalog"
# "Smoothed" repeats other curves, which the page can smooth by itself.
LAST_GROUPS: Final = ("Smoothed", OTHER_GROUP)
CUT_BEYOND: Final = 4.0  # times the highest of the other points
ERRORS_DRAWN: Final = 2  # standard errors on each side
VARIANT_WORDS: Final = {"train": "", "eval": "held out", "worst": "worst rank"}


@dataclass(frozen=True)
class Line:
    """One curve of a chart.

    Attributes:
        run: index of the run.
        label: legend text, including the name of the run if there are several.
        variant: distinguishes lines of the same run and key.
        curve: the points.
        color: index of a color; stands for the run if there are several.
        dash: index of a dash style; stands for the variant.
        spread: a band around the curve.
    """

    run: int
    label: str
    variant: str
    curve: Curve
    color: int
    dash: int = 0
    spread: Curve | None = None


@dataclass(frozen=True)
class Reference:
    """A horizontal line to compare with, such as a capacity. `run` is None if it applies to all runs."""

    label: str
    value: float
    run: int | None = None


@dataclass(frozen=True)
class Chart:
    """One chart. `facts` are (heading, text) pairs shown below it. Of style `heat`, a line is a row of cells over steps, whose
    colors are logarithmic."""

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
    top: float | None = None
    """Where the axis ends on a whole run, though a few values lie above it; None: above the largest."""

    @property
    def axis(self) -> str:
        """Title of the axis of values."""
        return self.unit or ("unit not known" if self.group == OTHER_GROUP else "no unit")


@dataclass
class Columns:
    """Every key of every run as a curve of at most `limit` points, computed on first use."""

    runs: Sequence[RunRecord]
    limit: int
    _made: dict[tuple[int, str], Curve | None] = field(default_factory=dict)

    def curve(self, run: int, key: str) -> Curve | None:
        """The curve of a key; None if the run does not have it."""
        if (run, key) not in self._made:
            steps, values = self.runs[run].column(key)
            self._made[run, key] = make_curve(steps, values, limit=self.limit) if len(steps) else None
        return self._made[run, key]

    def curves(self, key: str) -> list[tuple[int, Curve]]:
        """(index of the run, curve) for each run that has the key."""
        return [(run, curve) for run in range(len(self.runs)) if (curve := self.curve(run, key)) is not None]

    def errors(self, run: int, key: str) -> Curve | None:
        """A mean with the band of its standard errors; None for a key without one, and where a run does not have it."""
        steps, values = self.runs[run].column(key)
        error_steps, errors = self.runs[run].column(key + ERROR_SUFFIX)
        if not is_error(key + ERROR_SUFFIX) or not len(error_steps):
            return None
        at = np.isin(np.asarray(steps), np.asarray(error_steps))
        middle, half = np.asarray(values)[at], ERRORS_DRAWN * np.asarray(errors)
        return band_curve(np.asarray(steps)[at], middle, middle - half, middle + half, limit=self.limit)

    def keys(self) -> list[str]:
        """The keys of all runs, in order of first appearance."""
        return list(dict.fromkeys(key for run in self.runs for key in run.keys))

    @property
    def is_single(self) -> bool:
        """Whether there is only one run, so that colors stand for lines."""
        return len(self.runs) == 1


def make_facts(what: str, healthy: str, trouble: str) -> tuple[tuple[str, str], ...]:
    """The facts of a chart; empty ones are left out."""
    return tuple((name, text) for name, text in (("What", what), ("Healthy", healthy), ("Trouble", trouble)) if text)


def variant_of(key: str) -> tuple[str, Variant]:
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


def family_of(key: str) -> tuple[str, str]:
    """(name of the catalog row, the part that a pattern leaves open); both empty for unknown keys."""
    return family(key) if is_known(key) else ("", "")


def chart_id(key: str, *, is_single: bool) -> str:
    """Keys with the same id share a chart.

    Evaluation and worst rank are drawn with the training curve. For a single run the keys of a pattern share a chart too, one
    for each variant; for several runs, colors stand for runs, so each key needs its own.
    """
    base, variant = variant_of(key)
    row, part = family_of(base)
    return f"{row} {variant}" if part and is_single else base


def _label(columns: Columns, run: int, key: str) -> str:
    base, variant = variant_of(key)
    part = family_of(base)[1]
    if columns.is_single and part:
        return part
    words = ["" if columns.is_single else columns.runs[run].name, VARIANT_WORDS[variant]]
    return ", ".join(filter(None, words)) or "train"


def _catalog_chart(columns: Columns, keys: Sequence[str]) -> Chart:
    """The chart of keys that share one."""
    base = variant_of(keys[0])[0]
    part = family_of(base)[1]
    is_split = columns.is_single and bool(part)
    lines = []
    for key in keys:
        variant = variant_of(key)[1]
        dash = 0 if is_split else list(VARIANT_WORDS).index(variant)
        for run, curve in columns.curves(key):
            color = keys.index(key) if columns.is_single else run
            spread = columns.errors(run, key)
            lines.append(
                Line(run, _label(columns, run, key), VARIANT_WORDS[variant] or "train", curve, color, dash, spread)
            )
    if not is_known(base):
        return Chart(base, "", OTHER_GROUP, tuple(keys), tuple(lines))
    spec = lookup(base)
    title = f"{spec.title}: {part}" if part and (not columns.is_single or len(keys) == 1) else spec.title
    variants = {VARIANT_WORDS[variant_of(key)[1]] for key in keys}
    if len(variants) == 1 and variants != {""}:
        title = f"{title}, {variants.pop()}"
    about = make_facts(spec.description, spec.healthy, spec.pathological)
    return Chart(title, spec.unit, spec.group, tuple(keys), tuple(lines), band=spec.band, facts=about)


def not_flattened(chart: Chart) -> Chart:
    """A chart of times whose axis ends above all but the first point of a run, in which data is opened, where that is far
    higher."""
    if chart.unit != "s" or chart.style != "line":
        return chart
    firsts = {int(line.curve.first[0]): float(line.curve.high[0]) for line in chart.lines if len(line.curve.high)}
    rest = np.concatenate([line.curve.high[1:] for line in chart.lines] or [np.empty(0)])
    highest = float(rest.max()) if len(rest) else 0.0
    cut = [
        f"{number_text(value)} s at step {step}" for step, value in firsts.items() if value > CUT_BEYOND * highest > 0
    ]
    if not cut:
        return chart
    return replace(
        chart, top=highest, facts=(*chart.facts, ("Beyond the axis", f"{', '.join(cut)}; zoom in to see it"))
    )


def catalog_charts(columns: Columns, keys: Iterable[str]) -> list[Chart]:
    """The charts of some keys, in the order of the catalog; standard errors are drawn with their means."""
    shared: dict[str, list[str]] = {}
    for key in sorted(keys, key=_catalog_order):
        if columns.curves(key) and not is_error(key):
            shared.setdefault(chart_id(key, is_single=columns.is_single), []).append(key)
    return [_catalog_chart(columns, together) for together in shared.values()]


_ROW_ORDER: Final = {spec.name: number for number, spec in enumerate(CATALOG)}


def _catalog_order(key: str) -> tuple[int, str, int]:
    base, variant = variant_of(key)
    return _ROW_ORDER.get(family_of(base)[0], len(_ROW_ORDER)), base, list(VARIANT_WORDS).index(variant)


def group_order() -> list[str]:
    """Headings in the order of the catalog, the least useful last."""
    groups = dict.fromkeys(spec.group for spec in CATALOG)
    return [*(group for group in groups if group not in LAST_GROUPS), *LAST_GROUPS]
