"""Display names that distinguish the runs on one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainer.tools.runs.load import RunRecord


def with_distinct_names(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs labeled by the shortest path suffixes that differ; runs with the same path are numbered."""
    parts = [run.path.absolute().parts for run in runs]
    depth = 1
    while depth < max(map(len, parts)) and len({part[-depth:] for part in parts}) < len(set(parts)):
        depth += 1
    labels = ["/".join(part[-depth:]) for part in parts]
    earlier = [labels[:number].count(label) for number, label in enumerate(labels)]
    return [
        replace(run, label=f"{label} ({count + 1})" if count else label)
        for run, label, count in zip(runs, labels, earlier, strict=True)
    ]
