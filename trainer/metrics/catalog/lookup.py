"""The catalog: one row for every metric key that can be emitted, and the lookup of a key.

Reductions, the generated documentation, charts and the first filter of diagnosis are derived from these rows. `register`
adds rows for metrics of one's own.
Only the standard library is used, so that a dashboard can import the catalog without torch.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from functools import cache, lru_cache
from typing import Final

from trainer.metrics.catalog import rows_data, rows_gns, rows_layers, rows_ledger, rows_speed, rows_training
from trainer.metrics.catalog.spec import MetricSpec
from trainer.metrics.logger import get_logger

CATALOG: Final[tuple[MetricSpec, ...]] = (
    *rows_training.ROWS,
    *rows_speed.ROWS,
    *rows_data.ROWS,
    *rows_ledger.ROWS,
    *rows_gns.ROWS,
    *rows_layers.ROWS,
)
logger = get_logger(__name__)
EVAL_PREFIX: Final = "eval_"
WORST_SUFFIX: Final = "_max"
ERROR_SUFFIX: Final = "_se"

# The catalog's rows and registered ones. The latter are process-wide, as an imported module is: a metric is declared
# where it is defined, and every part that reduces or shows a key has to know it.
_BY_NAME: Final[dict[str, MetricSpec]] = {}
_PATTERNS: Final[list[tuple[re.Pattern[str], MetricSpec]]] = []


def register(*specs: MetricSpec) -> None:
    """Add rows for metrics of one's own; call it on every rank, before a key is used: in the module that reports them.

    Raises:
        ValueError: a name has another row already.
    """
    for spec in specs:
        known = _BY_NAME.get(spec.name) or next((row for _, row in _PATTERNS if row.name == spec.name), None)
        if known == spec:
            continue
        if known is not None:
            raise ValueError(f"metric {spec.name!r} is in the catalog already, with another row")
        if spec.is_pattern:
            # A part in angle brackets matches one segment between slashes.
            _PATTERNS.append((re.compile("([^/]+)".join(map(re.escape, re.split(r"<\w+>", spec.name)))), spec))
        else:
            _BY_NAME[spec.name] = spec
    _find.cache_clear()
    _gauge.cache_clear()


class UnknownMetric(KeyError):
    """A key that matches no row of the catalog."""

    def __init__(self, key: str) -> None:
        self.key = key
        close = difflib.get_close_matches(key, [spec.name for spec in CATALOG], n=1)
        self.hint = f"; did you mean {close[0]}?" if close else ""
        super().__init__(key)

    def __str__(self) -> str:
        return f"metric {self.key!r} is not in the catalog{self.hint}"


def _direct(key: str) -> MetricSpec | None:
    exact = _BY_NAME.get(key)
    if exact is not None:
        return exact
    return next((replace(spec, name=key) for regex, spec in _PATTERNS if regex.fullmatch(key)), None)


@lru_cache(maxsize=4096)
def _find(key: str) -> MetricSpec | None:
    spec = _direct(key)
    if spec is not None:
        return spec
    if key.startswith(EVAL_PREFIX):
        trained = key.removeprefix(EVAL_PREFIX)
        spec = None if trained.startswith(EVAL_PREFIX) else _find(trained)
        return spec and replace(spec, name=key, title=f"{spec.title} (evaluation)")
    base = _direct(key.removesuffix(WORST_SUFFIX)) if key.endswith(WORST_SUFFIX) else None
    if base is not None and base.ranks == "sum_and_worst":
        return replace(
            base,
            name=key,
            ranks="max",
            title=f"{base.title}, worst rank",
            description=f"{base.description} This is the largest value of any rank.",
        )
    base = _direct(key.removesuffix(ERROR_SUFFIX)) if key.endswith(ERROR_SUFFIX) else None
    if base is not None and base.ranks == "mean_and_error":
        return replace(
            base,
            name=key,
            ranks="max",
            band=None,
            title=f"{base.title}, standard error",
            description=f"Standard error of {base.name}; absent for a sample of one.",
            healthy="Small against the value.",
            pathological="As large as the value: too few rows were sampled to tell.",
        )
    return None


def lookup(key: str) -> MetricSpec:
    """The row of a key, with `name` set to the key itself.

    A key matches by its name, by a pattern, with the prefix `eval_`, as the `_max` sibling of a counter whose worst
    rank is reported, or as the `_se` sibling of a mean with a standard error.

    Raises:
        UnknownMetric: the key matches no row.
    """
    spec = _find(key)
    if spec is None:
        raise UnknownMetric(key)
    return spec


def lookup_or_gauge(key: str) -> MetricSpec:
    """The row of a key; a key that is not in the catalog is a gauge, with one warning in each process."""
    return _find(key) or _gauge(key)


@cache
def _gauge(key: str) -> MetricSpec:
    logger.warning("%s: it is logged as a gauge; trainer.metrics.register gives it a row", UnknownMetric(key))
    text = "Not in the catalog."
    return MetricSpec(name=key, unit="", description=text, healthy="", pathological="", group="Other", title=key)


def family(key: str) -> tuple[str, str]:
    """(name of the key's row, the part of the key that stands for the row's angle brackets).

    `token_type/digit/loss` gives `("token_type/<type>/loss", "digit")`; a plain key gives itself and "". The family of an
    evaluation key, of a worst-rank key and of a standard error is that of its base key.

    Raises:
        UnknownMetric: the key matches no row.
    """
    spec = lookup(key)
    for base in (
        key,
        key.removeprefix(EVAL_PREFIX),
        key.removesuffix(WORST_SUFFIX),
        key.removesuffix(ERROR_SUFFIX),
    ):
        if base in _BY_NAME:
            return base, ""
        for regex, row in _PATTERNS:
            found = regex.fullmatch(base)
            if found is not None:
                return row.name, found[1]
    return spec.name, ""


def keys_under(prefix: str) -> tuple[str, ...]:
    """The names of all rows that begin with `prefix`, in the catalog's order."""
    return tuple(spec.name for spec in CATALOG if spec.name.startswith(prefix))


def is_built_in(key: str) -> bool:
    """Whether the key matches a row that is not a registered one: a part of the trainer reports it."""
    return is_known(key) and family(key)[0] in (spec.name for spec in CATALOG)


def is_known(key: str) -> bool:
    """Whether the key matches a row of the catalog."""
    return _find(key) is not None


register(*CATALOG)
