"""The catalog: one row for every metric key that can be emitted, and the lookup of a key.

Reductions, the generated documentation, charts and the first filter of diagnosis are derived from
these rows. `register` adds rows for custom metrics. Only the standard library is used: dashboards
need no torch.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

from trainer.metrics.catalog_rows import DATA_ROWS, GNS_ROWS, LAYER_ROWS, ROWS, MetricSpec
from trainer.metrics.logger import get_logger

CATALOG: Final[tuple[MetricSpec, ...]] = (*ROWS, *DATA_ROWS, *GNS_ROWS, *LAYER_ROWS)
logger = get_logger(__name__)
EVAL_PREFIX: Final = "eval_"
EMA_PREFIX: Final = "ema/"  # of an evaluation's numbers with averaged weights
WORST_SUFFIX: Final = "_max"
ERROR_SUFFIX: Final = "_se"
ERRORS_SHOWN: Final = 2.0
"""Errors shown as +- and in charts: 95 %."""

# The catalog's rows and registered ones. The latter are process-wide, like an imported module: a
# metric is declared where it is defined, and every part that reduces or shows a key has to know it.
_ROWS: Final[dict[str, MetricSpec]] = {}
_PATTERNS: Final[dict[str, re.Pattern[str]]] = {}


def register(*specs: MetricSpec) -> None:
    """Add rows for custom metrics, on every rank before a key is used: in the reporting module.

    Raises:
        ValueError: a name has another row already.
    """
    for spec in specs:
        if _ROWS.setdefault(spec.name, spec) != spec:
            raise ValueError(f"metric {spec.name!r} is in the catalog already, with another row")
        plain = re.split("<[^<>/]+>", spec.name)
        if len(plain) > 1:  # a part in angle brackets matches one segment between slashes
            _PATTERNS[spec.name] = re.compile("([^/]+)".join(map(re.escape, plain)))
    _find.cache_clear()  # a key that was a gauge until now may have a row


def plain_names() -> list[str]:
    """The names of all rows that are no patterns, also of registered ones."""
    return [name for name in _ROWS if name not in _PATTERNS]


class UnknownMetric(LookupError):
    """A key that matches no row of the catalog."""

    def __init__(self, key: str) -> None:
        close = difflib.get_close_matches(key, _ROWS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        super().__init__(f"metric {key!r} is not in the catalog{hint}")


class _Found(NamedTuple):
    spec: MetricSpec  # the row, as it applies to the key
    row: str  # name of the catalog's row

    def changed(self, **changes: Any) -> _Found:
        return self._replace(spec=replace(self.spec, **changes))


@lru_cache(maxsize=4096)
def _find(key: str) -> _Found | None:
    if key in _ROWS and key not in _PATTERNS:
        return _Found(_ROWS[key], key)
    # There are few patterns, and the keys are remembered.
    for name, pattern in _PATTERNS.items():
        if pattern.fullmatch(key):
            return _Found(replace(_ROWS[name], name=key), name)
    for prefix, of_what in ((EVAL_PREFIX, "evaluation"), (EMA_PREFIX, "averaged weights")):
        if key.startswith(prefix) and not key.startswith(2 * prefix):
            base = _find(key.removeprefix(prefix))
            return base and base.changed(name=key, title=f"{base.spec.title} ({of_what})")
    if key.endswith(WORST_SUFFIX):
        base = _find(key.removesuffix(WORST_SUFFIX))
        if base is not None and base.spec.ranks == "sum_and_worst":
            text = f"{base.spec.description} This is the largest value of any rank."
            return base.changed(name=key, ranks="max", title=f"{base.spec.title}, worst rank", description=text)
    if key.endswith(ERROR_SUFFIX):
        base = _find(key.removesuffix(ERROR_SUFFIX))
        if base is not None and base.spec.has_error:
            text = f"Error of {base.spec.name} over documents, widened by Student's t: two are 95 %."
            return base.changed(
                name=key,
                ranks="max",
                has_error=False,
                title=f"{base.spec.title}, standard error",
                description=f"{text} Absent below five documents.",
                healthy="Small against the value.",
                pathological="As large as the value: too few documents were read to tell.",
            )
    return None


def _need(key: str) -> _Found:
    found = _find(key)
    if found is None:
        raise UnknownMetric(key)
    return found


def lookup(key: str) -> MetricSpec:
    """The row of a key, with `name` set to the key itself.

    A key matches by its name, by a pattern, with the prefix `eval_` or `ema/`, as the `_max` sibling
    of a counter whose worst rank is reported, or as the `_se` sibling of a mean with an error.

    Raises:
        UnknownMetric: the key matches no row.
    """
    return _need(key).spec


def lookup_or_gauge(key: str) -> MetricSpec:
    """The row of a key; one that is not in the catalog is a gauge, with one warning per key."""
    found = _find(key)
    return _gauge(key) if found is None else found.spec


@cache
def _gauge(key: str) -> MetricSpec:
    logger.warning("%s: it counts as a gauge; trainer.metrics.catalog.register gives it a row", UnknownMetric(key))
    text = "Not in the catalog."
    return MetricSpec(name=key, unit="", description=text, healthy="", pathological="", group="Other", title=key)


def family(key: str) -> str:
    """The name of a key's row: `token_type/digit/loss` gives `token_type/<type>/loss`.

    A key that `lookup` derives from another one (evaluation, worst rank, error) has that one's.

    Raises:
        UnknownMetric: the key matches no row.
    """
    return _need(key).row


def is_built_in(key: str) -> bool:
    """Whether the key matches one of the trainer's own rows, not a registered one."""
    found = _find(key)
    return found is not None and found.row in (spec.name for spec in CATALOG)


def is_known(key: str) -> bool:
    return _find(key) is not None


register(*CATALOG)
