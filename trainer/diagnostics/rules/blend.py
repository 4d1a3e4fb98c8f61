"""The rule about the blend: does every source give its share?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainer.diagnostics.facts import SHARE_ERROR, micro_batches, sources
from trainer.diagnostics.outcome import Knob, Outcome, finding, healthy, not_measured
from trainer.diagnostics.rules.rule import Rule
from trainer.diagnostics.series import Series, series
from trainer.runs.load import Run

SHARES = "blend/share/"
ALPHA = 1e-3


def check_shares(run: Run) -> Outcome:
    """Realised against configured shares."""
    errors = series(run, SHARE_ERROR)
    if not errors:
        return not_measured(SHARE_ERROR)
    per_step = micro_batches(run)
    for column in (errors, *_own_errors(run)):
        hits = [
            index for index in _doubling(column) if column.values[index] > share_limit(column.steps[index] * per_step)
        ]
        if hits:
            worst = hits[-1]
            step = column.steps[worst]
            name = column.key.removeprefix(SHARES)
            whose = "a source's share" if column is errors else f"the share of source {name}"
            return finding(
                f"{whose} is off by {column.values[worst]:.3f} at step {step}; "
                f"chance explains {share_limit(step * per_step):.3f}",
                evidence=[column.evidence(hits)],
                knob=Knob(
                    "data.source.weight" if column is errors else f"data.source.{name}.weight", None, _advice(run)
                ),
            )
    step = errors.steps[-1]
    return healthy(
        f"shares are within {errors.values[-1]:.3f} at step {step}; chance explains {share_limit(step * per_step):.3f}"
    )


def _advice(run: Run) -> str:
    repeats = run.setting("data.mixing.repeat", True)
    return "a weight that the source's data can follow" if repeats else "data.mixing.repeat = true, or more data"


def share_limit(batches: int) -> float:
    """What chance explains of a source's share after so many batches (Hoeffding), for 16 sources and 32 looks."""
    return math.sqrt(math.log(2 * 16 * 32 / ALPHA) / (2 * max(batches, 1)))


def _doubling(column: Series) -> Iterator[int]:
    """The first row at or after each power of two of steps, and the last row: looks that are few, whatever the run's length."""
    due = 1
    for index, step in enumerate(column.steps):
        if step >= due or index == len(column) - 1:
            yield index
            due = 2 ** (step.bit_length())


def _own_errors(run: Run) -> Iterator[Series]:
    """Each source's distance from its configured share, where the shares are logged and no weight is a schedule."""
    weights = {str(table.get("name")): table.get("weight", 1.0) for table in sources(run) if "include" not in table}
    if len(weights) < len(sources(run)) or not all(isinstance(weight, int | float) for weight in weights.values()):
        return
    total = math.fsum(weights.values())
    for name, weight in weights.items():
        share = series(run, SHARES + name)
        if share and total:
            values = share.values[:]
            for index, value in enumerate(share.values):
                values[index] = abs(value - weight / total)
            yield Series(share.key, share.steps, values)


RULES = (
    Rule(
        name="shares",
        looks_at=(SHARE_ERROR, f"{SHARES}<source>"),
        threshold="distance between realised and configured share above sqrt(ln(1024 / 0.001) / (2 N)) after N batches",
        why="Each batch is one draw, so Hoeffding's bound holds; it is looked at whenever the steps have doubled. With "
        "`metrics.per_source` and constant weights a source that has ended is found too.",
        knob="the source's `weight`, `data.mixing.repeat`, or more data",
        severity="warning",
        check=check_shares,
    ),
)
