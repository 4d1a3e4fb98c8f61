"""Arithmetic of time spans: what they cover, where the gaps are, and the time of nested ones without what is inside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Something that ran from `start` to `end`, in microseconds."""

    name: str
    start: float
    end: float

    @property
    def length(self) -> float:
        """In microseconds."""
        return self.end - self.start


def clipped(spans: Iterable[Span], start: float, end: float) -> Iterator[Span]:
    """The parts of the spans between `start` and `end`; those outside are left out."""
    for span in spans:
        inside = Span(span.name, max(span.start, start), min(span.end, end))
        if inside.length > 0:
            yield inside


def gaps(spans: Iterable[Span], start: float, end: float) -> list[float]:
    """Lengths of the times between `start` and `end` in which none of the spans runs, in order. Spans may overlap."""
    found, covered_to = [], start
    for span in sorted(clipped(spans, start, end), key=lambda each: each.start):
        if span.start > covered_to:
            found.append(span.start - covered_to)
        covered_to = max(covered_to, span.end)
    if end > covered_to:
        found.append(end - covered_to)
    return found


def self_times(spans: Sequence[Span]) -> list[tuple[Span, float]]:
    """Each span of one thread with its length less that of the spans directly inside it."""
    own = [span.length for span in spans]
    open_spans: list[int] = []
    # Of two that start together the longer one is the outer one.
    for index in sorted(range(len(spans)), key=lambda each: (spans[each].start, -spans[each].end)):
        while open_spans and spans[open_spans[-1]].end <= spans[index].start:
            open_spans.pop()
        if open_spans:
            own[open_spans[-1]] -= spans[index].length
        open_spans.append(index)
    return list(zip(spans, own, strict=True))
