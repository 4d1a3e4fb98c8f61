"""Warnings about harmful settings: the config key, its effect on this run, and a better value.

The thresholds and their reasons are in `trainer.tools.limits`, as those that `train diagnose`
applies after the run; settings that need no forecast are doubts of the plan
(`trainer.tools.doubts`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainer.config.data_tables import ScheduleTable
from trainer.config.schema import RunConfig
from trainer.errors import UserError
from trainer.tools import limits
from trainer.tools.doubts import Doubt, never_reached
from trainer.tools.preview.summary import FillView, LedgerView, Preview, SourceView
from trainer.training.setup.plan import Plan
from trainer.wording import counted


def _to_set(key: str, problem: str, value: object) -> Doubt:
    return key, problem, f"set it to {value}"


def find_warnings(plan: Plan, preview: Preview) -> list[UserError]:
    """All warnings: the doubts of the plan, then those of the forecast in the config's order."""
    found: list[Doubt] = []
    for source, view in zip(plan.sources, preview.sources, strict=True):
        found += _blend_warnings(source.table.weight, view, preview)
    found += fill_warnings(plan, preview)
    if preview.ends_at_step is not None:
        when = f"step {preview.ends_at_step} of {preview.steps}"
        problem = f"is false, and the data is exhausted at {when}"
        found.append(_to_set("data.mixing.repeat", problem, "true"))
    if preview.ledger is not None:
        found += _ledger_warnings(preview.ledger)
    found += _run_warnings(plan.config)
    return [*plan.doubts, *(UserError(*each) for each in found)]


def fill_warnings(plan: Plan, preview: Preview) -> Iterator[Doubt]:
    """Why full rows have gaps: too few or too long documents for so many rows, or padding."""
    fill, config, rows = preview.fill, plan.config, plan.config.data.mixing.batch_size
    if fill is None or fill.mean >= limits.LOW_FILL:
        return
    fitting = min(fill.documents, int(fill.row_tokens * rows // max(fill.longest, 1)))
    if fitting >= rows:
        if fill.padding > 1 - limits.LOW_FILL:
            yield _padding(plan, fill)
        return
    why = f"the longest document has {fill.longest:,} tokens, "
    why += f"and an epoch {fill.row_tokens:,.0f} for each row"
    if fill.documents < rows:
        each = "data shard" if plan.facts.data_shards > 1 else "run"
        why = f"a {each} has {counted(fill.documents, 'document')} for {counted(rows, 'row')}"
    problem = f"{rows}: {fill.mean:.0%} of the positions hold a token, since {why}"
    cells = max(int(fill.row_tokens // config.data.seq_len), config.train.tbptt_cells)
    others = f"data.max_group_cells = {cells} (which loses state) or more data"
    key = "data.mixing.batch_size"
    if fitting:
        yield _to_set(key, f"{problem} ({others} would also help)", fitting)
    else:
        yield key, problem, f"set {others}, or use fewer ranks"


def _padding(plan: Plan, fill: FillView) -> Doubt:
    data, why = plan.config.data, f"pads documents, each of which begins a row, by {fill.padding:.0%}"
    if data.align == "document" and getattr(plan.weightless_model(), "resets_in_one_pass", False):
        return _to_set("data.align", f'"document" {why}', '"stream"')
    fix = "shorten it, or train a model that runs resets in one pass (docs/models.md), which needs no padding"
    return "data.seq_len", f"{data.seq_len} {why}", fix


def _blend_warnings(weight: float | ScheduleTable, view: SourceView, preview: Preview) -> Iterator[Doubt]:
    key = f"source {view.name}: weight"
    if isinstance(weight, ScheduleTable):
        length, unit = preview.num_batches, "micro-batches per rank"
        if weight.unit == "step":
            length, unit = preview.steps, "steps"
        yield from never_reached(key, weight.points, length, unit)
    if 0 < view.batches < 1:
        problem = f"gives {view.batches:.2g} of {preview.num_batches:,} micro-batches: "
        problem += "the source is hardly ever read"
        fix = f"raise it {1 / view.batches:.0f} times or more, or set it to 0"
        yield key, problem, fix
    if view.epochs is not None and view.epochs > limits.MAX_EPOCHS:
        problem = f"reads the source for {view.epochs:.1f} epochs; "
        problem += f"beyond {limits.MAX_EPOCHS:.0f}, repeated tokens add little"
        times = view.epochs / limits.MAX_EPOCHS
        yield key, problem, f"lower it about {times:.1f} times, or lower train.steps"


def _ledger_warnings(ledger: LedgerView) -> Iterator[Doubt]:
    row_bytes = round(ledger.megabytes * 1e6 / ledger.capacity)
    unused = (ledger.capacity - ledger.groups_in_flight) * row_bytes
    share = ledger.groups_in_flight / ledger.capacity
    if share < limits.OVERSIZE_FILL and unused > limits.OVERSIZE_BYTES:
        problem = f"the run uses at most {share:.1%} of {ledger.capacity:,} states; "
        problem += f"the rest takes {unused / 1e9:.2g} GB per rank"
        yield _to_set("ledger.capacity", problem, 2 ** math.ceil(math.log2(2 * ledger.groups_in_flight)))


def _run_warnings(config: RunConfig) -> Iterator[Doubt]:
    steps, interval = config.train.steps, config.metrics.log_interval
    if config.eval.every > steps:
        problem = f"{config.eval.every} exceeds the {steps} steps of the run: it is never evaluated"
        yield _to_set("eval.every", problem, steps)
    if steps > 1 and interval >= steps:
        problem = f"{interval} logs only the first and the last of {steps} steps: too few to diagnose"
        yield _to_set("metrics.log_interval", problem, max(steps // 20, 1))
