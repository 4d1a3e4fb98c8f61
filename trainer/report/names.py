"""Names that tell runs apart on one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.runs.load import Run


@dataclass
class NamedRun(Run):
    """A run under the name that the page uses."""

    label: str = ""

    @property
    def name(self) -> str:
        """For people."""
        return self.label


def with_distinct_names(runs: Sequence[Run]) -> list[NamedRun]:
    """The runs, each named by as much of the end of its path as tells it from the others; the same path twice is numbered."""
    parts = [run.path.absolute().parts for run in runs]
    depth = 1
    while depth < max(map(len, parts)) and len({part[-depth:] for part in parts}) < len(set(parts)):
        depth += 1
    labels = ["/".join(part[-depth:]) for part in parts]
    named = []
    for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
        earlier = labels[:number].count(label)
        fields = {name: value for name, value in vars(run).items() if name != "label"}
        named.append(NamedRun(**fields, label=f"{label} ({earlier + 1})" if earlier else label))
    return named
