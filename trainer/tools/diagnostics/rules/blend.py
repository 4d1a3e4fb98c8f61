"""The rule about the blend: whether every source provides its configured share of the batches."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainer.tools.diagnostics.facts import SHARE_ERROR, batches_through
from trainer.tools.diagnostics.outcome import Knob, Outcome, finding, healthy
from trainer.tools.diagnostics.rules.rule import Rule
from trainer.tools.diagnostics.series import Series, series
from trainer.tools.runs.load import RunRecord
from trainer.wording import counted, few

ENDED_SOURCES = "blend/ended_sources"
ALPHA = 1e-3


def check_shares(run: RunRecord) -> Outcome:
    """Realised shares against configured ones."""
    errors = series(run, SHARE_ERROR)
    step = errors.steps[-1]
    ended = series(run, ENDED_SOURCES)
    repeat = Knob("data.mixing.repeat", run.setting("data.mixing.repeat"), "true, or more data")
    hits = [i for i in _doublings(errors) if errors.values[i] > share_limit(batches_through(run, errors.steps[i]))]
    if not hits and ended.positive:
        return finding(
            f"{_what_ended(run, ended)}; the others give its batches",
            evidence=[ended.evidence(ended.positive[:1])],
            knob=repeat,
            severity="advice",
        )
    if not hits:
        limit = share_limit(batches_through(run, step))
        return healthy(
            f"shares are within {errors.values[-1]:.3f} of their weights at step {step}; "
            f"sampling noise explains at most {limit:.3f}"
        )
    step, error = errors.steps[hits[-1]], errors.values[hits[-1]]
    limit = share_limit(batches_through(run, step))
    words = f"the share of a source is off by {error:.3f} at step {step}; sampling noise explains at most {limit:.3f}"
    knob = Knob("data.source.weight", None, "a weight that the amount of data allows")
    evidence = [errors.evidence(hits)]
    if ended.positive:
        evidence.append(ended.evidence(ended.positive[:1]))
        words += f"; {_what_ended(run, ended)}"
        knob = repeat
    return finding(words, evidence=evidence, knob=knob)


def _what_ended(run: RunRecord, ended: Series) -> str:
    """The sources that gave all they had, each with its step where events.jsonl has it."""
    found = [
        (event.get("sources"), event.get("global_step")) for event in run.events if event.get("event") == "source_ended"
    ]
    names = {name: step for sources, step in found if isinstance(sources, list) for name in sources}
    if names:
        listed = few([f"{name} exhausted at step {step}" for name, step in names.items()])
        return f"source {listed}"
    return f"{counted(max(ended.values), 'source')} exhausted, the first by step {ended.steps[ended.positive[0]]}"


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


RULES = (
    Rule(
        name="shares",
        needs=(SHARE_ERROR,),
        uses=(ENDED_SOURCES,),
        threshold="the realised and the configured share differ by more than sqrt(ln(1024 / 0.001) / (2 N)) after N batches; "
        "or a source has ended (advice)",
        why="Each batch is an independent draw, so Hoeffding's bound holds; it is tested whenever the number of steps has "
        "doubled. A source that ran out of data keeps its configured share, so its missing batches count.",
        knob="the `weight` of the source, `data.mixing.repeat`, or more data",
        severity="warning",
        check=check_shares,
    ),
)
