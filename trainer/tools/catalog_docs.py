"""Renders the catalog as Markdown: docs/training/METRICS_LOSSES.md is generated from it."""

from __future__ import annotations

from trainer.metrics.catalog.lookup import CATALOG
from trainer.metrics.catalog.spec import MetricSpec

_HEAD = """# Metrics and losses

Generated from `trainer/metrics/catalog/` by `make docs`; edit the catalog, not this page.

This page lists every key of a payload's `metrics`. Evaluation keys have the prefix `eval_` (`eval_loss`). A part in angle
brackets stands for a name (`objective/<name>`: `objective/token_ce`). Keys depend on features: if a feature is off, or a
value is unknown (MFU on an unknown device), the key is absent rather than zero. Backends show keys without a namespace
under `train/` and `eval/` (`loss` as `train/loss`, `eval_loss` as `eval/loss`) and the others unchanged.

*Window* is the reduction over micro-steps and *ranks* the reduction over ranks. `weighted_mean` sums values and counts
before it divides. `sum_and_worst` gives the total under the key and the largest rank's value under `<key>_max`;
`mean_and_error` gives the mean and its standard error under `<key>_se`. Counters
count since the last logged step.
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _row(spec: MetricSpec) -> str:
    how = f"{spec.kind}; window {spec.window}, ranks {spec.ranks}"
    cells = (f"`{spec.name}`", spec.unit or "-", how, spec.description, spec.healthy, spec.pathological)
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def render_catalog_markdown() -> str:
    """The whole page, ending in one newline; the same catalog always gives the same text."""
    parts = [_HEAD]
    for group in dict.fromkeys(spec.group for spec in CATALOG):
        rows = [_row(spec) for spec in CATALOG if spec.group == group]
        head = ["| key | unit | kind and reduction | meaning | healthy | pathological |", "|---|---|---|---|---|---|"]
        parts.append("\n".join([f"## {group}", "", *head, *rows, ""]))
    return "\n".join(parts).rstrip() + "\n"
