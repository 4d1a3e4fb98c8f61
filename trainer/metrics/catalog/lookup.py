"""The catalog: one row for every metric key that can be emitted, and the lookup of a key.

Reductions, the generated documentation, charts and the first filter of diagnosis are derived from these rows.
Only the standard library is used, so that a dashboard can import the catalog without torch.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from functools import lru_cache
from typing import Final

from trainer.metrics.catalog import rows_data, rows_gns, rows_ledger, rows_speed, rows_training
from trainer.metrics.catalog.spec import MetricSpec

CATALOG: Final[tuple[MetricSpec, ...]] = (
    *rows_training.ROWS,
    *rows_speed.ROWS,
    *rows_data.ROWS,
    *rows_ledger.ROWS,
    *rows_gns.ROWS,
)
EVAL_PREFIX: Final = "eval_"
WORST_SUFFIX: Final = "_max"

_BY_NAME: Final = {spec.name: spec for spec in CATALOG if not spec.is_pattern}


# A part in angle brackets matches one segment between slashes.
_PATTERNS: Final = tuple(
    (re.compile("([^/]+)".join(map(re.escape, re.split(r"<\w+>", spec.name)))), spec)
    for spec in CATALOG
    if spec.is_pattern
)


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
    return None


def lookup(key: str) -> MetricSpec:
    """The row of a key, with `name` set to the key itself.

    A key matches by its name, by a pattern, with the prefix `eval_`, or as the `_max` sibling of a counter whose worst
    rank is reported.

    Raises:
        UnknownMetric: the key matches no row.
    """
    spec = _find(key)
    if spec is None:
        raise UnknownMetric(key)
    return spec


def family(key: str) -> tuple[str, str]:
    """(name of the key's row, the part of the key that stands for the row's angle brackets).

    `token_type/digit/loss` gives `("token_type/<type>/loss", "digit")`; a plain key gives itself and "". The family of an
    evaluation key, and of a worst-rank key, is that of its base key.

    Raises:
        UnknownMetric: the key matches no row.
    """
    spec = lookup(key)
    for base in (key, key.removeprefix(EVAL_PREFIX), key.removesuffix(WORST_SUFFIX)):
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


def is_known(key: str) -> bool:
    """Whether the key matches a row of the catalog."""
    return _find(key) is not None
