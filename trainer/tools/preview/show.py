"""A preview as tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from trainer.data.mixing import BATCHING_MODES
from trainer.tools.fitted_table import Column, fitted_table
from trainer.tools.preview.config_warnings import ConfigWarning
from trainer.tools.preview.summary import LedgerView, Preview, SourceView
from trainer.wording import counted

OF_CELLS = ("batches\nper rank", "expected\nbatches", "batches of\na stream", "batch\nsize", "cells", "longest\nwait")
"""Columns that say nothing of full rows."""


def print_preview(
    preview: Preview, warnings: Sequence[ConfigWarning], console: Console, *, num_logged: int = 0
) -> None:
    """Print tables and warnings. `num_logged`: further warnings, which were logged before."""
    tables = [_source_columns(preview), _modality_columns(preview)]
    tables += [_rank_columns(preview)] if preview.data_shards > 1 else []
    parts: list[RenderableType] = [Text(_headline(preview))]
    for title, columns in tables:
        columns = [each for each in columns if not (preview.has_full_rows and each.heading in OF_CELLS)]
        table = fitted_table(columns, width=console.width, hint="; --json has all", title=title, title_justify="left")
        parts.append(table)
    parts += [] if preview.ledger is None else [_ledger_table(preview, preview.ledger)]
    parts += [Text(f"warning: {warning.message}") for warning in warnings]
    total = len(warnings) + num_logged
    count = counted(total, "warning") if total else "no warnings"
    parts.append(Text(f"{count}, {num_logged:,} of them above the tables" if num_logged else count))
    for part in parts:
        console.print(part, highlight=False)


def _headline(preview: Preview) -> str:
    least, mean, most = preview.cells_per_step
    ranks = counted(preview.world_size, "rank")
    if _part(preview) != "rank":
        ranks += f" with {preview.data_shards} data shards"
    size = f"{mean:,.1f} cells per step ({least:,} to {most:,})"
    if (fill := preview.fill) is not None:
        tokens = f"{fill.mean * fill.full_tokens:,.0f} tokens per step of {fill.full_tokens:,.0f}"
        part = f"{tokens} (fill {fill.mean:.1%}, by step {fill.least:.1%} to {fill.most:.1%})"
        size = part if preview.has_full_rows else f"{size}; {part}"
    lines = [
        f"{preview.name}: {counted(preview.steps, 'step')} of {preview.micro_batches} on {ranks} "
        f"({preview.num_batches:,} per {_part(preview)}); {size}"
    ]
    if preview.ends_at_step is not None:
        lines.append(f"the data is exhausted at step {preview.ends_at_step:,}")
    elif not preview.is_counted:
        what = "the fill and absences" if preview.has_full_rows else "waits and absences"
        lines.append(
            f"{what} were counted over the first {preview.counted_batches:,} of {preview.num_batches:,} batches; "
            "all other numbers are averages"
        )
    return "\n".join(lines)


def _part(preview: Preview) -> str:
    """What reads a part of the data."""
    return "rank" if preview.data_shards == preview.world_size else "data shard"


def _source_columns(preview: Preview) -> tuple[str, list[Column]]:
    sources = preview.sources
    is_counted = any(each.drawn_batches is not None for each in sources)
    drawn = ["unknown" if each.drawn_batches is None else f"{each.drawn_batches:,}" for each in sources]
    columns = [
        Column("source", [escape(each.name) for each in sources]),
        *([Column("batches\nper rank", drawn, "right")] if is_counted else []),
        Column("expected\nbatches", [f"{each.batches:,.1f}" for each in sources], "right", 1 if is_counted else 0),
        Column("expected\nshare", [f"{each.batch_share:.1%}" for each in sources], "right"),
        Column("tokens", ["unknown" if each.tokens is None else f"{each.tokens:,.0f}" for each in sources], "right"),
        Column("epochs", ["" if each.epochs is None else f"{each.epochs:.2f}" for each in sources], "right"),
        Column("open\nstreams", [str(each.num_mixed or "") for each in sources], "right", leave_out=2),
        Column("behind\ncuts", [f"{each.behind_cuts_share:.1%}" for each in sources], "right", leave_out=3),
        Column("batches of\na stream", [_picks(each) for each in sources], "right", leave_out=4),
    ]
    drawn_here = "as this run's seed draws them, and " if is_counted else ""
    title = f"Sources: micro-batches per rank {drawn_here}as expected over all seeds"
    return "Sources, over all ranks" if preview.has_full_rows else title, columns


def _picks(source: SourceView) -> str:
    if source.picks_per_slice is None:
        return ""
    least, median, most = source.picks_per_slice
    return f"{least:,}" if least == most else f"{least:,} to {most:,}\nmedian {median:,}"


def _modality_columns(preview: Preview) -> tuple[str, list[Column]]:
    pairs = [(source, view) for source in preview.sources for view in source.modalities]
    views = [view for _, view in pairs]
    begun = "documents" if preview.has_full_rows else "batches"
    columns = [
        Column("source", [escape(source.name) for source, _ in pairs]),
        Column("modality", [escape(view.name) for view in views]),
        Column("streams", [f"{view.streams:,}" for view in views], "right", leave_out=3),
        Column("batch\nsize", [str(view.batch_size) for view in views], "right", leave_out=5),
        Column(begun, [f"{view.picks:,.0f}" for view in views], "right"),
        Column("ended", [f"{view.exhausts:,.0f}" for view in views], "right", leave_out=2),
        Column("cells", [f"{view.cells:,.0f}" for view in views], "right", leave_out=4),
        Column("tokens", [f"{view.tokens:,.0f}" for view in views], "right", leave_out=2),
        Column("of\ncorpus", [f"{view.corpus_share:.1%}" for view in views], "right", leave_out=1),
        Column("of\ndrawn", [f"{view.drawn_share:.1%}" for view in views], "right", leave_out=1),
        Column("absent", [f"{view.absent_share:.1%}" for view in views], "right"),
        Column("longest\nwait", [f"{view.longest_wait_steps:,} steps" for view in views], "right"),
    ]
    return f"Modalities, over all ranks; absent: share of the {begun} drawn while no stream of it was open", columns


def _rank_columns(preview: Preview) -> tuple[str, list[Column]]:
    sources = [source for source in preview.sources if source.rank_token_shares]
    columns = [
        Column("source", [escape(each.name) for each in sources]),
        Column("fewest\ntokens", [f"{min(each.rank_token_shares):.1%}" for each in sources], "right"),
        Column("most\ntokens", [f"{max(each.rank_token_shares):.1%}" for each in sources], "right"),
        Column("batching mode", [each.batching_mode for each in sources], leave_out=1),
    ]
    part = _part(preview)
    if preview.has_full_rows:
        return f"Shares of the {preview.data_shards} {part}s", columns
    columns += [
        Column(f"masked,\n{mode}", [f"{each.masked_share[mode]:.1%}" for each in sources], "right")
        for mode in BATCHING_MODES
    ]
    return (
        f"Shares of the {preview.data_shards} {part}s; masked: micro-batches without rows on the worst {part}",
        columns,
    )


def _ledger_table(preview: Preview, ledger: LedgerView) -> Table:
    part, needed = _part(preview), "one per row" if preview.has_full_rows else "open streams x batch size"
    few = "" if ledger.capacity >= ledger.capacity_to_change_ranks else ": more than the capacity"
    rows = {
        "mode": ledger.mode,
        "capacity": f"{ledger.capacity:,} states, {ledger.megabytes:,.1f} MB",
        "needed": f"at most {ledger.groups_in_flight:,} states ({needed})",
        "on other ranks": f"a resume on another number of {part}s may need {ledger.capacity_to_change_ranks:,}{few}",
        "longest wait": f"{counted(ledger.counted_wait_steps, 'step')} from one chunk of a document to the next; with any "
        f"seed at most {ledger.wait_bound_steps:,}",
    }
    if ledger.stale_threshold is not None:
        rows["stale threshold"] = f"{ledger.stale_threshold:,} steps; {ledger.waits_beyond_threshold:,} waits exceed it"
    table = Table("", "", title=f"Ledger, per {part}", title_justify="left", show_header=False)
    for row in rows.items():
        table.add_row(*row)
    return table
