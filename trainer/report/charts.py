"""From runs to charts: which key stands where, with which lines, under which heading of the catalog."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from trainer.metrics.catalog.lookup import CATALOG, EVAL_PREFIX, WORST_SUFFIX, UnknownMetric, family, lookup
from trainer.metrics.catalog.spec import Band
from trainer.report.curves import Curve, make_curve
from trainer.runs.load import Run

Style = Literal["line", "area"]
Variant = Literal["train", "eval", "worst"]
OTHER_GROUP: Final = "Not in the catalog"
# Copies of other curves, which the page can smooth by itself: at the end, and folded.
LAST_GROUPS: Final = ("Smoothed", OTHER_GROUP)
VARIANT_WORDS: Final = {"train": "", "eval": "held out", "worst": "worst rank"}


@dataclass(frozen=True)
class Line:
    """One curve of a chart.

    Attributes:
        run: number of the run.
        label: for people, the run's name included where there are several.
        variant: what tells it from the same run's other lines; empty if there are none.
        curve: its points.
        color: counts runs where there are several, lines otherwise.
        dash: counts variants.
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
    """A level to compare with: a capacity, a bound. `run` is None where it holds for all."""

    label: str
    value: float
    run: int | None = None


@dataclass(frozen=True)
class Chart:
    """What one chart shows. `facts` are sentences below it: (heading, text)."""

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


@dataclass
class Columns:
    """Every key of every run as a curve of at most `limit` points, made when first asked for."""

    runs: Sequence[Run]
    limit: int
    _made: dict[tuple[int, str], Curve | None] = field(default_factory=dict)

    def curve(self, run: int, key: str) -> Curve | None:
        """The curve of a key, None if the run does not have it."""
        if (run, key) not in self._made:
            steps, values = self.runs[run].column(key)
            self._made[run, key] = make_curve(steps, values, limit=self.limit) if len(steps) else None
        return self._made[run, key]

    def runs_with(self, key: str) -> list[int]:
        """Numbers of the runs that have the key."""
        return [run for run in range(len(self.runs)) if self.curve(run, key) is not None]

    def keys(self) -> list[str]:
        """Keys of any run, in the order of first appearance."""
        return list(dict.fromkeys(key for run in self.runs for key in run.keys))


def variant_of(key: str) -> tuple[str, Variant]:
    """(base key, how this key differs from it): `eval_loss` is `loss` in evaluation."""
    if key.startswith(EVAL_PREFIX):
        return key.removeprefix(EVAL_PREFIX), "eval"
    if key.endswith(WORST_SUFFIX):
        base = key.removesuffix(WORST_SUFFIX)
        try:
            if lookup(key).title == f"{lookup(base).title}, worst rank":
                return base, "worst"
        except UnknownMetric:
            pass
    return key, "train"


def chart_id(key: str, *, is_single: bool) -> str:
    """Keys with the same id share a chart.

    Evaluation and the worst rank stand beside the training curve. With one run the keys of a pattern share a chart as well, one
    for training and one for evaluation; with several runs colours mean runs, and each key has its own.
    """
    base, variant = variant_of(key)
    try:
        row, part = family(base)
    except UnknownMetric:
        return base
    if not part or not is_single:
        return base
    return f"{row} {variant}"


def _part(key: str) -> str:
    """What the pattern of a key leaves open; empty for plain and for unknown keys."""
    try:
        return family(key)[1]
    except UnknownMetric:
        return ""


def _label(key: str, run: str, *, is_single: bool) -> str:
    base, variant = variant_of(key)
    part = _part(base)
    words = [part] if part and is_single else ["" if is_single else run, VARIANT_WORDS[variant]]
    return ", ".join(word for word in words if word) or "train"


def catalog_chart(columns: Columns, keys: Sequence[str]) -> Chart:
    """The chart of keys that share one."""
    is_single = len(columns.runs) == 1
    lines = []
    colors: dict[object, int] = {}
    for key in keys:
        base, variant = variant_of(key)
        has_own_chart = is_single and bool(_part(base))
        dash = 0 if has_own_chart else list(VARIANT_WORDS).index(variant)
        for run in columns.runs_with(key):
            color = colors.setdefault(key if is_single else run, len(colors) if is_single else run)
            curve = columns.curve(run, key)
            assert curve is not None
            label = _label(key, columns.runs[run].name, is_single=is_single)
            lines.append(Line(run, label, VARIANT_WORDS[variant] or "train", curve, color, dash))
    base = variant_of(keys[0])[0]
    try:
        spec = lookup(base)
    except UnknownMetric:
        return Chart(base, "", OTHER_GROUP, tuple(keys), tuple(lines))
    facts = (("What", spec.description), ("Healthy", spec.healthy), ("Trouble", spec.pathological))
    part = _part(base)
    title = f"{spec.title}: {part}" if part and (not is_single or len(keys) == 1) else spec.title
    variants = {variant_of(key)[1] for key in keys}
    if len(variants) == 1 and (words := VARIANT_WORDS[variants.pop()]):
        title = f"{title}, {words}"
    return Chart(title, spec.unit, spec.group, tuple(keys), tuple(lines), band=spec.band, facts=facts)


def catalog_charts(columns: Columns, keys: Iterable[str]) -> list[Chart]:
    """Charts of these keys, in the order of the catalog."""
    is_single = len(columns.runs) == 1
    shared: dict[str, list[str]] = {}
    for key in sorted(keys, key=_catalog_order):
        if columns.runs_with(key):
            shared.setdefault(chart_id(key, is_single=is_single), []).append(key)
    return [catalog_chart(columns, together) for together in shared.values()]


_ROW_ORDER: Final = {spec.name: number for number, spec in enumerate(CATALOG)}


def _catalog_order(key: str) -> tuple[int, str, int]:
    base, variant = variant_of(key)
    try:
        row = _ROW_ORDER[family(base)[0]]
    except UnknownMetric:
        row = len(_ROW_ORDER)
    return row, base, list(VARIANT_WORDS).index(variant)


def group_order() -> list[str]:
    """Headings in the order of the catalog, the less useful ones last."""
    groups = list(dict.fromkeys(spec.group for spec in CATALOG))
    return [*(group for group in groups if group not in LAST_GROUPS), *LAST_GROUPS]
