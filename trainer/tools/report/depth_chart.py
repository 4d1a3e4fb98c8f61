"""Is context worth its cost? A drawing of the loss against depth, carried and from zero, for each set of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import groupby

from trainer.metrics.catalog.lookup import ERRORS_SHOWN
from trainer.tools.diagnostics.depth import last_curves
from trainer.tools.runs.depth_curve import DepthCurve, Number, in_words
from trainer.tools.runs.load import RunRecord
from trainer.wording import number_text

WIDTH, HEIGHT = 480, 350
LEFT, RIGHT = 52, 26
LOSSES, GAINS = (24, 184), (226, 306)  # top and bottom of the two parts
MOST_TICKS = 7
BEFORE = 2  # buckets before the first carried one
# The page's, or outside it these.
COLORS = {"c0": "#0072b2", "c1": "#d55e00", "c2": "#00866a", "muted": "#7a8794", "grid": "#9993"}
COLORS = {name: f"var(--{name}, {color})" for name, color in COLORS.items()}
Place = tuple[float, float]
Line = tuple[str, str, list[tuple[int, Number]]]  # label, color, numbers by first depth of a bucket


def depth_figures(run: RunRecord) -> list[tuple[str, str, str]]:
    """(name of the set, what carrying is worth in words, the drawing as SVG) for each set of the last evaluation."""
    _, curves = last_curves(run)
    cell = run.setting("data.seq_len", 0)
    return [(name or "held out", in_words(curve, cell), drawing(curve, name)) for name, curve in curves.items()]


def drawing(curve: DepthCurve, name: str = "") -> str:
    """Both losses over the depth on a logarithmic axis; below, their difference, the gain, with its 95 % band.

    The losses have no band: their errors are mostly of how hard the documents are, which cancels in the gain.
    """
    first = next(index for index, point in enumerate(curve.points) if point.gain)
    points = curve.points[max(first - BEFORE, 0) :]
    carried = [(point.start, point.loss) for point in points]
    from_zero = [(point.start, point.from_zero) for point in points if point.from_zero]
    gains = [(point.start, point.gain) for point in points if point.gain]
    ends = points[0].start, 2 * points[-1].start
    parts = [
        *_part(LOSSES, ends, "loss:", [("carried", "c0", carried), ("from zero at each cell", "c1", from_zero)]),
        *_part(GAINS, ends, "", [("gain of carrying", "c2", gains)], is_gain=True),
        _text((LEFT + WIDTH) / 2, HEIGHT - 8, "tokens of the document before the target", "middle"),
    ]
    of = f" of {name}" if name else ""
    title = escape(f"Loss against depth{of}: carried and from zero")
    style = "width: 100%; max-width: 640px; height: auto; display: block"
    shape = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
    return f'<svg {shape} role="img" aria-label="{title}" style="{style}">{"".join(parts)}</svg>'


def _part(
    span: Place, depths: tuple[int, int], what: str, lines: Sequence[Line], *, is_gain: bool = False
) -> Iterable[str]:
    """Axes, lines and their names. A gain has its band, a line at 0, and the numbers of the depths below it."""
    (top, bottom), (first, last) = span, depths
    numbers = [number for *_, line in lines for _, number in line]
    ends = [number.value for number in numbers]
    if is_gain:
        ends = [0.0, *(end for number in numbers for end in _band(number))]
    low, high = min(ends), max(ends)

    def at(depth: float, value: float) -> Place:
        x = LEFT + (WIDTH - LEFT - RIGHT) * math.log2(depth / first) / math.log2(last / first)
        return x, bottom - (bottom - top) * (value - low) / max(high - low, 1e-9)

    powers = range(round(math.log2(max(first, 1))), round(math.log2(last)) + 1)
    for power in powers[:: -(-len(powers) // MOST_TICKS)]:
        x, _ = at(1 << power, low)
        yield _line((x, top), (x, bottom), "grid")
        if is_gain:
            yield _text(x, bottom + 18, f"{1 << power:,}", "middle")
    for level in _levels(low, high, int(bottom - top) // 25):
        _, y = at(first, level)
        is_zero = is_gain and not level
        yield _line((LEFT, y), (WIDTH - RIGHT, y), "muted" if is_zero else "grid")
        yield _text(LEFT - 6, y + 4, number_text(level), "end")
    for number, (label, color, line) in enumerate(lines):
        # A bucket is drawn at its geometric middle.
        middles = [(start * math.sqrt(2), start, value) for start, value in line]
        if is_gain:
            yield from _bands(middles, at, COLORS[color])
        path = _path([at(depth, value.value) for depth, _, value in middles])
        look = f"fill: none; stroke: {COLORS[color]}; stroke-width: 2"
        if number:
            look += "; stroke-dasharray: 6 4"
        yield f'<polyline points="{path}" style="{look}" />'
        for depth, start, value in middles:
            x, y = at(depth, value.value)
            words = f"<title>{label}, {start:,} tokens on: {value}</title>"
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill: {COLORS[color]}">{words}</circle>'
    names = ", ".join(f'<tspan style="fill: {COLORS[color]}">{label}</tspan>' for label, color, _ in lines)
    heading = f"{what} {names}, nats per token"
    if is_gain and any(math.isfinite(number.error) for number in numbers):
        heading += " (band: 95 % over documents)"
    yield _text(LEFT, top - 9, heading, "start")


def _bands(
    middles: Sequence[tuple[float, int, Number]], at: Callable[[float, float], Place], color: str
) -> Iterable[str]:
    """The bands of neighbouring buckets: none where the error is not known; a single one is an error bar."""
    for has_error, near in groupby(middles, key=lambda each: math.isfinite(each[2].error)):
        if has_error:
            bands = [(depth, _band(value)) for depth, _, value in near]
            edge = [at(depth, high) for depth, (_, high) in bands]
            edge += [at(depth, low) for depth, (low, _) in reversed(bands)]
            yield f'<polygon points="{_path(edge)}" style="fill: {color}; stroke: {color}; opacity: .25" />'


def _band(number: Number) -> Place:
    error = ERRORS_SHOWN * number.error if math.isfinite(number.error) else 0.0
    return number.value - error, number.value + error


def _path(places: Iterable[Place]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} style="fill: {COLORS["muted"]}; font-size: 13px">{text}</text>'


def _line(start: Place, end: Place, color: str) -> str:
    ends = f'x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
    return f'<line {ends} style="stroke: {COLORS[color]}" />'


def _levels(low: float, high: float, most: int) -> Sequence[float]:
    """Round numbers from low to high, at most about so many."""
    rough = max(high - low, 1e-6) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= rough)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
