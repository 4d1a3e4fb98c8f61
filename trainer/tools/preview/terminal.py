"""A preview for the terminal: tables, and plots in text."""

from __future__ import annotations

from collections.abc import Sequence

import plotext
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from trainer.data.mixing import BATCHING_MODES
from trainer.tools.fitted_table import Column, fitted_table
from trainer.tools.preview.config_warnings import ConfigWarning
from trainer.tools.preview.summary import BatchChange, LedgerView, Preview, ProbeView, SourceView
from trainer.wording import counted

PLOT_HEIGHT = 14
NUM_TICKS = 5
MAX_WIDTH = 120  # of the plots
MARKERS = "0123456789abcdefghijklmnopqrstuvwxyz"
HINT = "; --json has all"
MAX_LINES = 8  # sources in the plot, those with most batches; the table lists all


def print_preview(
    preview: Preview, warnings: Sequence[ConfigWarning], console: Console, *, num_logged: int = 0
) -> None:
    """Print tables, plots and warnings.

    Args:
        num_logged: further warnings, which were logged before.
    """
    width = min(console.width, MAX_WIDTH)
    parts: list[RenderableType] = [Text(_headline(preview))]
    if len(preview.sources) > 1:
        parts.append(Text(_blend_plot(preview, width)))
    parts += [_source_table(preview, console.width), _modality_table(preview, console.width)]
    if preview.world_size > 1:
        parts.append(_rank_table(preview, console.width))
    if preview.ledger is not None:
        parts.append(_ledger_table(preview.ledger))
    parts.append(Text(_plot(preview.curves.steps, {"": preview.curves.lr}, "learning rate by step", width)))
    parts += [Text(f"warning: {warning.message}") for warning in warnings]
    count = counted(len(warnings) + num_logged, "warning") if warnings or num_logged else "no warnings"
    parts.append(Text(f"{count}, {num_logged:,} of them above the tables" if num_logged else count))
    console.print(Group(*parts), highlight=False)


def _headline(preview: Preview) -> str:
    least, mean, most = preview.cells_per_step
    lines = [
        f"{preview.name}: {counted(preview.steps, 'step')} of {_micro_batches(preview)} on "
        f"{counted(preview.world_size, 'rank')} ({preview.num_batches:,} per rank"
        f"{' if their number never grows' if preview.auto is not None else ''}); "
        f"{mean:,.1f} cells per step ({least:,} to {most:,})"
    ]
    if preview.ends_at_step is not None:
        lines.append(f"the data is exhausted at step {preview.ends_at_step:,}")
    elif not preview.is_counted:
        lines.append(
            f"waits and absences were counted over the first {preview.counted_batches:,} of {preview.num_batches:,} batches; "
            "picks, exhausts and tokens are averages"
        )
    if preview.batch_changes:
        lines.append("micro-batches change as planned: " + "; ".join(map(_change, preview.batch_changes)))
    if preview.auto is not None:
        lines.append(preview.auto)
    lines += [f"{name}: {cost}" for name, cost in preview.costs_of_carry.items()]
    return "\n".join(lines)


def _micro_batches(preview: Preview) -> str:
    every = [preview.micro_batches, *(change.micro_batches for change in preview.batch_changes)]
    if min(every) < max(every):
        return f"{min(every)} to {max(every)} micro-batches"
    return counted(preview.micro_batches, "micro-batch") + (" at first" if preview.auto is not None else "")


def _change(change: BatchChange) -> str:
    lr = "" if change.lr_factor == 1.0 else f", learning rate x {change.lr_factor:.3g}"
    return f"{change.micro_batches} from step {change.step:,}{lr}"


def _blend_plot(preview: Preview, width: int) -> str:
    largest = sorted(preview.sources, key=lambda source: -source.batches)[:MAX_LINES]
    named = {source.name: preview.curves.shares[source.name] for source in largest}
    plot = _plot(preview.curves.batches, named, "expected share of micro-batches by batch", width, is_share=True)
    # A legend inside the plot would hide the curves.
    legend = ", ".join(f"{marker}: {name}" for marker, name in zip(MARKERS, named, strict=False))
    more = len(preview.sources) - len(largest)
    return f"{plot}\n{legend}" + (f"; {more:,} with fewer batches not drawn" if more else "")


def _plot(xs: Sequence[int], lines: dict[str, list[float]], title: str, width: int, *, is_share: bool = False) -> str:
    # plotext has one global figure: clear it before use, and read it at once.
    plotext.clear_figure()
    plotext.limit_size(False, False)
    plotext.theme("clear")
    plotext.plotsize(width, PLOT_HEIGHT)
    for marker, (name, ys) in zip(MARKERS, lines.items(), strict=False):
        plotext.plot(xs, ys, marker=marker if name else "braille")
    whole = sorted({xs[0] + round((xs[-1] - xs[0]) * part / (NUM_TICKS - 1)) for part in range(NUM_TICKS)})
    plotext.xticks(whole, [f"{x:,}" for x in whole])
    if is_share:
        plotext.ylim(0.0, 1.0)
        plotext.yticks([0.0, 0.25, 0.5, 0.75, 1.0], ["0%", "25%", "50%", "75%", "100%"])
    plotext.title(title)
    return str(plotext.uncolorize(plotext.build())).rstrip()


def _source_table(preview: Preview, width: int) -> Table:
    sources = preview.sources
    is_counted = any(each.drawn_batches is not None for each in sources)
    columns = [
        Column("source", [escape(each.name) for each in sources]),
        *([Column("batches\nper rank", [_drawn(each) for each in sources], "right")] if is_counted else []),
        Column("expected\nbatches", [f"{each.batches:,.1f}" for each in sources], "right", 1 if is_counted else 0),
        Column("expected\nshare", [f"{each.batch_share:.1%}" for each in sources], "right"),
        Column("zero from", [_zero(each) for each in sources], "right", leave_out=1),
        Column("tokens", ["unknown" if each.tokens is None else f"{each.tokens:,.0f}" for each in sources], "right"),
        Column("of tokens", ["" if s.token_share is None else f"{s.token_share:.1%}" for s in sources], "right", 3),
        Column("epochs", ["" if each.epochs is None else f"{each.epochs:.2f}" for each in sources], "right"),
        Column("K", [str(each.num_mixed or "") for each in sources], "right", leave_out=2),
        Column("picks\nper slice", [_picks(each) for each in sources], "right", leave_out=4),
    ]
    drawn = "as this run's seed draws them, and " if is_counted else ""
    title = f"Sources: micro-batches per rank {drawn}as expected over all seeds"
    return fitted_table(columns, width=width, hint=HINT, title=title, title_justify="left")


def _drawn(source: SourceView) -> str:
    return "unknown" if source.drawn_batches is None else f"{source.drawn_batches:,}"


def _picks(source: SourceView) -> str:
    if source.picks_per_slice is None:
        return ""
    least, median, most = source.picks_per_slice
    return f"{least:,}" if least == most else f"{least:,} to {most:,}\nmedian {median:,}"


def _zero(source: SourceView) -> str:
    if source.zero is None:
        return "never"
    return f"batch {source.zero.first:,}" + ("" if source.zero.last is None else f" to {source.zero.last:,}")


def _modality_table(preview: Preview, width: int) -> Table:
    pairs = [(source, view) for source in preview.sources for view in source.modalities]
    views = [view for _, view in pairs]
    columns = [
        Column("source", [escape(source.name) for source, _ in pairs]),
        Column("modality", [escape(view.name) for view in views]),
        Column("streams", [f"{view.streams:,}" for view in views], "right", leave_out=3),
        Column("batch\nsize", [str(view.batch_size) for view in views], "right", leave_out=5),
        Column("picks", [f"{view.picks:,.0f}" for view in views], "right"),
        Column("exhausts", [f"{view.exhausts:,.0f}" for view in views], "right", leave_out=2),
        Column("cells", [f"{view.cells:,.0f}" for view in views], "right", leave_out=4),
        Column("tokens", [f"{view.tokens:,.0f}" for view in views], "right", leave_out=2),
        Column("of\ncorpus", [f"{view.corpus_share:.1%}" for view in views], "right", leave_out=1),
        Column("of\ndrawn", [f"{view.drawn_share:.1%}" for view in views], "right", leave_out=1),
        Column("absent", [f"{view.absent_share:.1%}" for view in views], "right"),
        Column("longest\nwait", [f"{view.longest_wait_steps:,} steps" for view in views], "right"),
    ]
    return fitted_table(columns, width=width, hint=HINT, title="Pools, over all ranks", title_justify="left")


def _rank_table(preview: Preview, width: int) -> Table:
    sources = [source for source in preview.sources if source.rank_token_shares]
    columns = [
        Column("source", [escape(each.name) for each in sources]),
        Column("fewest\ntokens", [f"{min(each.rank_token_shares):.1%}" for each in sources], "right"),
        Column("most\ntokens", [f"{max(each.rank_token_shares):.1%}" for each in sources], "right"),
        Column("batching mode", [each.batching_mode for each in sources], leave_out=1),
        *(
            Column(f"masked,\n{mode}", [f"{each.masked_share[mode]:.1%}" for each in sources], "right")
            for mode in BATCHING_MODES
        ),
    ]
    title = f"Shares of the {preview.world_size} ranks; masked: micro-batches without rows on the worst rank"
    return fitted_table(columns, width=width, hint=HINT, title=title, title_justify="left")


def _ledger_table(ledger: LedgerView) -> Table:
    table = Table("", "", title="Ledger, per rank", title_justify="left", show_header=False)
    table.add_row("mode", ledger.mode)
    table.add_row("capacity", f"{ledger.capacity:,} groups, {ledger.megabytes:,.1f} MB")
    table.add_row(
        "groups in flight",
        f"at most {ledger.groups_in_flight:,} (K x batch size); {ledger.counted_in_flight:,} counted",
    )
    enough = "enough" if ledger.capacity >= ledger.capacity_to_change_ranks else "more than the capacity"
    table.add_row("to change ranks", f"up to {ledger.capacity_to_change_ranks:,} groups after a resume: {enough}")
    if ledger.stale_threshold is not None:
        beyond = f"{ledger.waits_beyond_threshold:,} waits are longer"
        table.add_row("stale threshold", f"{ledger.stale_threshold:,} steps; {beyond}")
    waits = (
        f"{ledger.counted_wait_steps:,} steps counted; the bound for other seeds, 2 K n, is {ledger.wait_bound_steps:,}"
    )
    table.add_row("longest wait", waits)
    if ledger.probes is not None:
        table.add_row("probes of carry", _probes(ledger.probes))
        if ledger.probes.count and ledger.probes.reach is not None:
            near = f"of the cells that continue a group: those up to {ledger.probes.cells:,} cells from its start"
            table.add_row("they measure", f"{ledger.probes.reach:.0%} {near}")
    return table


def _probes(probes: ProbeView) -> str:
    if not probes.count:
        return f"none: no logged step is a multiple of ledger.probe_every before {probes.every:,}"
    return (
        f"{probes.count:,}, one every {probes.every:,} steps: up to {probes.passes} forward passes of a micro-batch each, "
        f"at most {probes.cost:.1%} of the time"
    )
