"""The catalog: one row for every metric key that can be emitted, and the look-up of a key in it.

Reductions, the generated documentation, charts and the first filter of diagnosis are all derived from these rows.
Only the standard library is used, so that a dashboard can import the catalog without torch.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from functools import lru_cache
from typing import Final

from trainer.metrics.catalog import rows_data as catalog_rows_data
from trainer.metrics.catalog import rows_gns as catalog_rows_gns
from trainer.metrics.catalog import rows_ledger as catalog_rows_ledger
from trainer.metrics.catalog import rows_speed as catalog_rows_speed
from trainer.metrics.catalog import rows_training as catalog_rows_training
from trainer.metrics.catalog.spec import MetricSpec

CATALOG: Final[tuple[MetricSpec, ...]] = (
    *catalog_rows_training.ROWS,
    *catalog_rows_speed.ROWS,
    *catalog_rows_data.ROWS,
    *catalog_rows_ledger.ROWS,
    *catalog_rows_gns.ROWS,
)
EVAL_PREFIX: Final = "eval_"
WORST_SUFFIX: Final = "_max"

_BY_NAME: Final = {spec.name: spec for spec in CATALOG if not spec.is_pattern}


def _compile(pattern: str) -> re.Pattern[str]:
    literals = re.split(r"<\w+>", pattern)
    return re.compile("[^/]+".join(re.escape(part) for part in literals))


_PATTERNS: Final = tuple((_compile(spec.name), spec) for spec in CATALOG if spec.is_pattern)


class UnknownMetric(KeyError):
    """A key that no row of the catalog describes."""

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
            description=f"{base.description} The largest value of any rank.",
        )
    return None


def lookup(key: str) -> MetricSpec:
    """The row of a key, with `name` set to the key itself.

    A key matches by its name, by a pattern, with `eval_` in front, or as the `_max` sibling of a counter whose worst
    rank is reported.

    Raises:
        UnknownMetric: no row describes the key.
    """
    spec = _find(key)
    if spec is None:
        raise UnknownMetric(key)
    return spec


def family(key: str) -> tuple[str, str]:
    """(name of the row that describes the key, the part of the key that the row leaves open).

    `token_type/digit/loss` gives `("token_type/<type>/loss", "digit")`; a plain key gives itself and nothing. A key in
    evaluation, and one of the worst rank, belongs to the family of its base key.

    Raises:
        UnknownMetric: no row describes the key.
    """
    spec = lookup(key)
    for base in (key, key.removeprefix(EVAL_PREFIX), key.removesuffix(WORST_SUFFIX)):
        if base in _BY_NAME:
            return base, ""
        for regex, row in _PATTERNS:
            if regex.fullmatch(base):
                before, _, after = row.name.partition("<")
                return row.name, base[len(before) : len(base) - len(after.partition(">")[2])]
    return spec.name, ""


def is_known(key: str) -> bool:
    """Whether the catalog describes the key."""
    return _find(key) is not None
