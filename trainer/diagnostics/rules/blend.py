"""The rule about the blend: whether every source provides its configured share of the batches."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator

from trainer.diagnostics.facts import SHARE_ERROR, micro_batches, sources
from trainer.diagnostics.outcome import Knob, Outcome, finding, healthy
from trainer.diagnostics.rules.rule import Rule
from trainer.diagnostics.series import Series, series
from trainer.runs.load import RunRecord

SHARES = "blend/share/"
ALPHA = 1e-3


def check_shares(run: RunRecord) -> Outcome:
    """Realised shares against configured ones."""
    errors = series(run, SHARE_ERROR)

    def limit(step: int) -> float:
        return share_limit(step * micro_batches(run))

    for column in (errors, *_errors_by_source(run)):
        hits = [index for index in _doublings(column) if column.values[index] > limit(column.steps[index])]
        if hits:
            step, error = column.steps[hits[-1]], column.values[hits[-1]]
            name = column.key.removeprefix(SHARES)
            whose = "the share of a source" if column is errors else f"the share of source {name}"
            repeats = run.setting("data.mixing.repeat", True)
            remedy = "a weight that the amount of data allows" if repeats else "data.mixing.repeat = true, or more data"
            key = "data.source.weight" if column is errors else f"data.source.{name}.weight"
            return finding(
                f"{whose} is off by {error:.3f} at step {step}; sampling noise explains at most {limit(step):.3f}",
                evidence=[column.evidence(hits)],
                knob=Knob(key, None, remedy),
            )
    step = errors.steps[-1]
    return healthy(
        f"shares are within {errors.values[-1]:.3f} of their weights at step {step}; "
        f"sampling noise explains at most {limit(step):.3f}"
    )


def share_limit(batches: int) -> float:
    """Hoeffding bound on the share error of a source after so many batches, for 16 sources and 32 tests."""
    return math.sqrt(math.log(2 * 16 * 32 / ALPHA) / (2 * max(batches, 1)))


def _doublings(column: Series) -> Iterator[int]:
    """The first row at or after each power of two of steps, and the last row: few tests, however long the run."""
    due = 1
    for index, step in enumerate(column.steps):
        if step >= due or index == len(column) - 1:
            yield index
            due = 2 ** (step.bit_length())


def _errors_by_source(run: RunRecord) -> Iterator[Series]:
    """The share error of each source, if shares are logged per source and all weights are constant."""
    weights = {str(table.get("name")): table.get("weight", 1.0) for table in sources(run) if "include" not in table}
    if len(weights) < len(sources(run)) or not all(isinstance(weight, int | float) for weight in weights.values()):
        return
    total = math.fsum(weights.values())
    for name, weight in weights.items():
        share = series(run, SHARES + name)
        if share and total:
            yield Series(share.key, share.steps, array("d", (abs(value - weight / total) for value in share.values)))


RULES = (
    Rule(
        name="shares",
        needs=(SHARE_ERROR,),
        uses=(f"{SHARES}<source>",),
        threshold="the realised and the configured share differ by more than sqrt(ln(1024 / 0.001) / (2 N)) after N batches",
        why="Each batch is an independent draw, so Hoeffding's bound holds; it is tested whenever the number of steps has "
        "doubled. With `metrics.per_source` and constant weights, the rule also finds a source that ran out of data.",
        knob="the `weight` of the source, `data.mixing.repeat`, or more data",
        severity="warning",
        check=check_shares,
    ),
)
