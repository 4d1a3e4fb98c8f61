"""The answer as a table, a plot in text, and a picture (extra `report`: plotly)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from trainer.tools.branching.answer import ERRORS_WIDE, Answer, BatchRow, sentence
from trainer.tools.fitted_table import Column, fitted_table
from trainer.tools.pictures import save_picture
from trainer.wording import number_text

PLOT_HEIGHT, MAX_WIDTH = 14, 100


def print_answer(answer: Answer, console: Console) -> None:
    """Table, plot and sentence."""
    parts: list[Any] = [_table(answer, console.width)]
    if len([row for row in answer.rows if row.measured.losses]) > 1:
        parts.append(Text(_plot(answer, min(console.width, MAX_WIDTH))))
    parts.append(Text(sentence(answer)))
    console.print(Group(*parts), highlight=False)


def _table(answer: Answer, width: int) -> Any:
    rows = answer.rows
    loss = "held-out loss" if answer.study.is_held_out else "training loss"
    columns = [
        Column("batch", [f"{row.factor} x" for row in rows], "right"),
        Column("sequences", [number_text(row.sequences, 3) for row in rows], "right"),
        Column("tokens", [f"{row.step_tokens:,.0f}" for row in rows], "right", leave_out=1),
        Column("m", [_micro_batches(row) for row in rows], "right", leave_out=3),
        Column("steps", [f"{row.branch.steps:,}" for row in rows], "right", leave_out=2),
        Column(
            "trained\ntokens",
            ["-" if row.tokens is None else f"{row.tokens:,.0f}" for row in rows],
            "right",
            leave_out=5,
        ),
        Column("best lr", [_rate(row) for row in rows], "right"),
        Column(loss, [_loss(row) for row in rows], "right"),
        Column("above\nthe best", [_excess(answer, row) for row in rows], "right"),
        Column("allowed", [_allowed(answer, row) for row in rows], "right", leave_out=4),
        Column("within", ["yes" if row.compared and row.compared.is_within else "no" for row in rows]),
    ]
    title = (
        f"Loss after {answer.study.tokens:,.0f} tokens from step {answer.study.origin.step:,}; +- one standard error"
    )
    return fitted_table(columns, width=width, hint="; --json has all", title=title, title_justify="left")


def _micro_batches(row: BatchRow) -> str:
    batch = row.branch.batch
    return str(batch.micro_batches) if batch.row_share == 1 else f"{batch.micro_batches} of {batch.row_share} the rows"


def _rate(row: BatchRow) -> str:
    if row.lr is None or row.lr_scale is None:
        return "-"
    return f"{number_text(row.lr, 3)} ({number_text(row.lr_scale, 3)}{', edge' if row.is_edge else ''})"


def _loss(row: BatchRow) -> str:
    if not row.measured.losses:
        return "not finite"
    error = row.measured.error
    return f"{row.measured.mean:.4f}" + ("" if error is None else f" +- {error:.4f}")


def _excess(answer: Answer, row: BatchRow) -> str:
    if row.compared is None or answer.verdict is None:
        return "-"
    if row.factor == answer.verdict.reference:
        return "best"
    scale = abs(answer.row(answer.verdict.reference).measured.mean)
    error = "" if row.compared.error is None else f" +- {row.compared.error / scale:.2%}"
    return f"{row.compared.excess / scale:+.2%}{error}"


def _allowed(answer: Answer, row: BatchRow) -> str:
    if row.compared is None or answer.verdict is None:
        return "-"
    return f"{row.compared.allowed / abs(answer.row(answer.verdict.reference).measured.mean):.2%}"


def _plot(answer: Answer, width: int) -> str:
    import plotext

    rows = [row for row in answer.rows if row.measured.losses]
    # plotext has one global figure: clear it before use, and read it at once.
    plotext.clear_figure()
    plotext.limit_size(False, False)
    plotext.theme("clear")
    plotext.plotsize(width, PLOT_HEIGHT)
    plotext.xscale("log")
    xs = [row.sequences for row in rows]
    means = [row.measured.mean for row in rows]
    plotext.plot(xs, means, marker="braille")
    for row in rows:
        wide = ERRORS_WIDE * (row.measured.error or 0.0)
        plotext.scatter([row.sequences] * 2, [row.measured.mean - wide, row.measured.mean + wide], marker="-")
    plotext.scatter(xs, means, marker="o")
    plotext.xticks(xs, [number_text(x, 3) for x in xs])
    plotext.title(f"loss by batch in sequences; bars: {ERRORS_WIDE:g} standard errors")
    return str(plotext.uncolorize(plotext.build())).rstrip()


def draw(answer: Answer, out: Path) -> None:
    """Write the picture: loss against batch with error bars, what is within, and the noise scale's interval.

    Raises:
        UserError: the file cannot be written, or plotly is not installed.
    """
    rows = [row for row in answer.rows if row.measured.losses]
    xs, means = [row.sequences for row in rows], [row.measured.mean for row in rows]
    bars = [ERRORS_WIDE * (row.measured.error or 0.0) for row in rows]
    name = f"best learning rate, {ERRORS_WIDE:g} standard errors"
    trace = {"x": xs, "y": means, "error_y": {"array": bars}, "mode": "lines+markers", "name": name, "showlegend": True}
    shapes: list[dict[str, Any]] = []
    if answer.verdict is not None:
        best = answer.row(answer.verdict.reference).measured.mean
        words = f"within {answer.tolerance:.2%} of the lowest"
        shapes.append(_area(words, "green", xref="paper", x0=0, x1=1, y0=best, y1=best + answer.tolerance * abs(best)))
        shapes.append(_vertical("largest batch within", "green", answer.row(answer.verdict.largest).sequences))
    noise = answer.noise
    if noise is not None:
        high = 1.2 * max([noise.low, *xs]) if noise.high is None else noise.high
        words = f"{noise.key}: {'lower bound, no upper one' if noise.high is None else 'bounds'}"
        shapes.append(_area(words, "orange", yref="paper", x0=noise.low, x1=high, y0=0, y1=1))
        if noise.value is not None:
            shapes.append(_vertical(noise.key, "orange", noise.value))
    kind = "held-out loss" if answer.study.is_held_out else "training loss"
    ticks = {"type": "log", "tickvals": xs, "ticktext": [number_text(x, 3) for x in xs]}
    layout = {
        "xaxis": {"title": {"text": "batch, sequences"}, **ticks},
        "yaxis": {"title": {"text": f"{kind} after {answer.study.tokens:,.0f} tokens"}},
        "legend": {"orientation": "v"},
        "shapes": shapes,
    }
    title = f"{answer.study.origin.run.name}, branches from step {answer.study.origin.step:,}"
    save_picture([trace], layout, out, title=title)


def _area(name: str, color: str, **ends: Any) -> dict[str, Any]:
    look = {"fillcolor": color, "opacity": 0.15, "line": {"width": 0}, "layer": "below"}
    return {"type": "rect", "name": name, "showlegend": True, **look, **ends}


def _vertical(name: str, color: str, at: float) -> dict[str, Any]:
    ends = {"yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1}
    return {"type": "line", "name": name, "showlegend": True, "line": {"color": color, "dash": "dash"}, **ends}
