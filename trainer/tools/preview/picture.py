"""A preview as a picture, PNG or SVG (extra `preview`: matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainer.tools.pictures import save_picture
from trainer.tools.preview.summary import ModalityView, Preview
from trainer.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(preview: Preview, out: str) -> None:
    """Write the picture: blend, learning rate, picks by modality, longest waits.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)  # unlike pyplot, without windows and global state
    blend, rate, picks, waits = figure.subplots(2, 2).flat
    _draw_blend(blend, preview)
    rate.plot(preview.curves.steps, preview.curves.lr)
    rate.set(title="learning rate", xlabel="step", ylim=(0, None))
    views = [(source.name, view) for source in preview.sources for view in source.modalities]
    _draw_picks(picks, views)
    _draw_waits(waits, preview, views)
    figure.suptitle(f"{preview.name}: {counted(preview.steps, 'step')} on {counted(preview.world_size, 'rank')}")
    save_picture(figure, Path(out))


def _draw_blend(axes: Axes, preview: Preview) -> None:
    shares = preview.curves.shares
    axes.stackplot(preview.curves.batches, list(shares.values()), labels=list(shares), step="post")
    for source in preview.sources:
        if source.zero is not None and source.zero.first > 0:
            axes.axvline(source.zero.first, color="black", linestyle=":", linewidth=1)
            axes.annotate(f" weight of {source.name} is 0", (source.zero.first, 0.02), rotation=90, fontsize=8)
    axes.set(title="share of micro-batches", xlabel="batch", ylim=(0, 1))
    _legend_below(axes)


def _label_bars(axes: Axes, title: str, views: list[tuple[str, ModalityView]]) -> None:
    axes.set_yticks(range(len(views)), [f"{source}: {view.name}" for source, view in views])
    axes.set_xscale("symlog")
    axes.invert_yaxis()
    axes.set(title=title)
    _legend_below(axes)


def _legend_below(axes: Axes) -> None:
    """Below the axis, since inside it would cover what is drawn."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, fontsize=8, frameon=False)


def _draw_picks(axes: Axes, views: list[tuple[str, ModalityView]]) -> None:
    for offset, name in ((-0.2, "picks"), (0.2, "exhausts")):
        positions = [position + offset for position in range(len(views))]
        axes.barh(positions, [getattr(view, name) for _, view in views], height=0.4, label=name)
    _label_bars(axes, "picks and exhausts, all ranks", views)


def _draw_waits(axes: Axes, preview: Preview, views: list[tuple[str, ModalityView]]) -> None:
    axes.barh(range(len(views)), [view.longest_wait_steps for _, view in views], height=0.5, label="counted")
    ledger = preview.ledger
    if ledger is not None:
        axes.axvline(ledger.wait_bound_steps, color="grey", linestyle="--", label="2 K n")
        if ledger.stale_threshold is not None:
            axes.axvline(ledger.stale_threshold, color="red", label="stale threshold")
        words = f"ledger: at most {ledger.groups_in_flight:,} groups in flight, capacity {ledger.capacity:,}"
        axes.set_xlabel(words, fontsize=9)
    _label_bars(axes, "longest wait of a reader, steps", views)
