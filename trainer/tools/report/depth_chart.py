"""Is context worth its cost? A drawing of the loss against depth, carried and from zero, for each set of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from trainer.extensions.depth_curve import DepthCurve, Number, in_words
from trainer.tools.diagnostics.depth import last_curves
from trainer.tools.runs.load import RunRecord
from trainer.wording import number_text

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 40
MOST_TICKS = 7
FIRST = 8  # of fewer tokens a document has too few
BAND_ERRORS = 2.0
Place = tuple[float, float]


def depth_figures(run: RunRecord) -> list[tuple[str, str, str]]:
    """(name of the set, what carrying is worth in words, the drawing as SVG) for each set of the last evaluation."""
    _, curves = last_curves(run)
    cell = run.setting("data.seq_len", 0)
    return [(name or "held out", in_words(curve, cell), drawing(curve, name)) for name, curve in curves.items()]


def drawing(curve: DepthCurve, name: str = "") -> str:
    """Both losses over the depth on a logarithmic axis, from zero where the two differ.

    Bands are two errors: of the carried loss, and, around the loss from zero, of the difference, which is paired by document.
    """
    points = [point for point in curve.points if point.start >= min(FIRST, curve.points[-1].start)]
    from_zero = [
        (point.start, point.from_zero._replace(error=point.gain.error))
        for point in points
        if point.from_zero and point.gain
    ]
    carried = [(point.start, point.loss) for point in points]
    lines = [("carried", "c0", carried), ("from zero at each cell (band: of the difference)", "c1", from_zero)]
    ends = [end for _, _, line in lines for _, number in line for end in _band(number)]
    low, high = min(ends), max(ends)
    first, last = points[0].start, 2 * points[-1].start

    def at(depth: float, loss: float) -> Place:
        x = LEFT + (WIDTH - LEFT - RIGHT) * math.log2(depth / first) / max(math.log2(last / first), 1)
        return x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (loss - low) / max(high - low, 1e-9)

    parts = [*_axes(first, last, low, high, at)]
    for number, (label, color, line) in enumerate(lines):
        # A bucket is drawn at its geometric middle.
        middles = [(start * math.sqrt(2), value) for start, value in line]
        up = [at(depth, _band(value)[1]) for depth, value in middles]
        down = [at(depth, _band(value)[0]) for depth, value in reversed(middles)]
        parts.append(f'<polygon points="{_path([*up, *down])}" style="fill: var(--{color}); opacity: .18" />')
        path = _path([at(depth, value.value) for depth, value in middles])
        dash = "; stroke-dasharray: 6 4" if number else ""
        parts.append(f'<polyline points="{path}" style="fill: none; stroke: var(--{color}); stroke-width: 2{dash}" />')
        for depth, value in middles:
            x, y = at(depth, value.value)
            words = f"{label.partition(' (')[0]}, {round(depth / math.sqrt(2)):,} tokens on: {value}"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill: var(--{color})"><title>{words}</title></circle>'
            )
        parts.append(_text(WIDTH - RIGHT - 4, TOP + 14 + 17 * number, label, "end", color))
    title = escape(f"Loss against depth{f' of {name}' if name else ''}: carried and from zero")
    style = "width: 100%; max-width: 900px; height: auto; display: block"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}" style="{style}">{"".join(parts)}</svg>'


def _band(number: Number) -> Place:
    error = BAND_ERRORS * number.error if math.isfinite(number.error) else 0.0
    return number.value - error, number.value + error


def _path(places: Iterable[Place]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _text(x: float, y: float, text: str, anchor: str, color: str = "muted") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="fill: var(--{color}); font-size: 12px">{text}</text>'


def _axes(first: int, last: int, low: float, high: float, at: object) -> Iterable[str]:
    """Grid lines and their numbers."""
    assert callable(at)
    powers = range(int(math.log2(first)), int(math.log2(last)) + 1)
    for power in powers[:: -(-len(powers) // MOST_TICKS)]:
        x, _ = at(1 << power, low)
        yield _line((x, TOP), (x, HEIGHT - BOTTOM))
        yield _text(x, HEIGHT - BOTTOM + 16, f"{1 << power:,}", "middle")
    for level in _levels(low, high):
        _, y = at(first, level)
        yield _line((LEFT, y), (WIDTH - RIGHT, y))
        yield _text(LEFT - 6, y + 4, number_text(level), "end")
    yield _text((LEFT + WIDTH) / 2, HEIGHT - 6, "tokens of the document before the target; nats per token", "middle")


def _line(start: Place, end: Place) -> str:
    return f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" style="stroke: var(--grid)" />'


def _levels(low: float, high: float) -> Sequence[float]:
    """Round numbers from low to high, about five."""
    rough = max(high - low, 1e-6) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= rough)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
