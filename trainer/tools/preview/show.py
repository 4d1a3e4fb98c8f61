"""A preview as tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from trainer.tools.fitted_table import Column, fitted_table
from trainer.tools.preview.config_warnings import ConfigWarning
from trainer.tools.preview.summary import LedgerView, Preview
from trainer.wording import counted


def print_preview(
    preview: Preview, warnings: Sequence[ConfigWarning], console: Console, *, num_logged: int = 0
) -> None:
    """Print tables and warnings. `num_logged`: further warnings, which were logged before."""
    tables = [_source_columns(preview), _modality_columns(preview)]
    if preview.data_shards > 1 and preview.has_full_rows:
        tables.append(_rank_columns(preview))
    parts: list[RenderableType] = [Text(_headline(preview))]
    for title, columns in tables:
        table = fitted_table(columns, width=console.width, hint="; --json has all", title=title, title_justify="left")
        parts.append(table)
    if preview.ledger is not None:
        parts.append(_ledger_table(preview, preview.ledger))
    parts += [Text(f"warning: {warning.message}") for warning in warnings]
    total = len(warnings) + num_logged
    count = counted(total, "warning") if total else "no warnings"
    if num_logged:
        count += f", {num_logged:,} of them above the tables"
    parts.append(Text(count))
    for part in parts:
        console.print(part, highlight=False)


def _headline(preview: Preview) -> str:
    ranks = counted(preview.world_size, "rank")
    if _part(preview) != "rank":
        ranks += f" with {preview.data_shards} data shards"
    size = f"at most {preview.tokens_per_step:,} tokens per step"
    fill = preview.fill
    if fill is not None:
        size = (
            f"{fill.mean * fill.full_tokens:,.0f} tokens per step of {fill.full_tokens:,.0f} "
            f"(fill {fill.mean:.1%}, by step {fill.least:.1%} to {fill.most:.1%})"
        )
    lines = [
        f"{preview.name}: {counted(preview.steps, 'step')} of {preview.micro_batches} on {ranks} "
        f"({preview.num_batches:,} per {_part(preview)}); {size}"
    ]
    if not preview.has_full_rows:
        lines.append('what the run will draw is forecast of full rows only (data.mixing.batching_mode = "per_row")')
    elif preview.ends_at_step is not None:
        lines.append(f"the data is exhausted at step {preview.ends_at_step:,}")
    elif not preview.is_counted:
        lines.append(
            f"the fill was counted over the first {preview.counted_batches:,} of {preview.num_batches:,} "
            "batches; all other numbers are averages"
        )
    return "\n".join(lines)


def _part(preview: Preview) -> str:
    """The name of a reader of a part of the data."""
    return "rank" if preview.data_shards == preview.world_size else "data shard"


def _source_columns(preview: Preview) -> tuple[str, list[Column]]:
    sources = preview.sources
    columns = [
        Column("source", [escape(each.name) for each in sources]),
        Column("expected\nshare", [f"{each.batch_share:.1%}" for each in sources], "right"),
    ]
    if preview.has_full_rows:
        tokens = [_number(each.tokens, ",.0f", "unknown") for each in sources]
        epochs = [_number(each.epochs, ".2f", "") for each in sources]
        columns += [Column("tokens", tokens, "right"), Column("epochs", epochs, "right")]
    columns += [
        Column("open\nstreams", [str(each.num_mixed or "") for each in sources], "right", leave_out=2),
        Column("behind\ncuts", [f"{each.behind_cuts_share:.1%}" for each in sources], "right", leave_out=3),
    ]
    return "Sources, over all ranks", columns


def _number(value: float | None, form: str, unknown: str) -> str:
    return unknown if value is None else format(value, form)


def _modality_columns(preview: Preview) -> tuple[str, list[Column]]:
    pairs = [(source, view) for source in preview.sources for view in source.modalities]
    views = [view for _, view in pairs]

    def numbers(heading: str, values: Sequence[float | None], leave_out: int, form: str = ",.0f") -> Column:
        return Column(heading, [format(value or 0.0, form) for value in values], "right", leave_out)

    columns = [
        Column("source", [escape(source.name) for source, _ in pairs]),
        Column("modality", [escape(view.name) for view in views]),
        numbers("streams", [view.streams for view in views], 3),
    ]
    share = numbers("of\ncorpus", [view.corpus_share for view in views], 1, ".1%")
    if not preview.has_full_rows:
        documents = numbers("documents", [view.corpus_documents for view in views], 0)
        tokens = numbers("tokens", [view.corpus_tokens for view in views], 0)
        return "Modalities, in a pass over the training documents", [*columns, documents, tokens, share]
    columns += [
        numbers("documents", [view.picks for view in views], 0),
        numbers("ended", [view.exhausts for view in views], 2),
        numbers("tokens", [view.tokens for view in views], 2),
        share,
        numbers("of\ndrawn", [view.drawn_share for view in views], 1, ".1%"),
    ]
    return "Modalities, over all ranks", columns


def _rank_columns(preview: Preview) -> tuple[str, list[Column]]:
    sources = [source for source in preview.sources if source.rank_token_shares]
    columns = [
        Column("source", [escape(each.name) for each in sources]),
        Column("fewest\ntokens", [f"{min(each.rank_token_shares):.1%}" for each in sources], "right"),
        Column("most\ntokens", [f"{max(each.rank_token_shares):.1%}" for each in sources], "right"),
    ]
    return f"Shares of the {preview.data_shards} {_part(preview)}s", columns


def _ledger_table(preview: Preview, ledger: LedgerView) -> Table:
    part, needed = _part(preview), "one per row" if preview.has_full_rows else "open streams x batch size"
    others = f"a resume on another number of {part}s may need {ledger.capacity_to_change_ranks:,}"
    if ledger.capacity < ledger.capacity_to_change_ranks:
        others += ": more than the capacity"
    rows = {
        "mode": ledger.mode,
        "capacity": f"{ledger.capacity:,} states, {ledger.megabytes:,.1f} MB",
        "needed": f"at most {ledger.groups_in_flight:,} states ({needed})",
        "on other ranks": others,
        "longest wait": f"at most {counted(ledger.wait_bound_steps, 'step')} from one chunk of a document to the next",
    }
    if ledger.stale_threshold is not None:
        rows["stale threshold"] = f"{ledger.stale_threshold:,} steps"
    table = Table("", "", title=f"Ledger, per {part}", title_justify="left", show_header=False)
    for row in rows.items():
        table.add_row(*row)
    return table
