"""A preview as tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from trainer.tools.fitted_table import Column, fitted_table
from trainer.tools.preview.config_warnings import ConfigWarning
from trainer.tools.preview.summary import LedgerView, ModalityView, Preview
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
        parts.append(fitted_table(columns, width=console.width, title=title))
    if preview.ledger is not None:
        parts.append(_ledger_table(preview, preview.ledger))
    parts += [Text(f"warning: {warning.message}") for warning in warnings]
    total, count = len(warnings) + num_logged, "no warnings"
    if total:
        count = counted(total, "warning")
    if num_logged:
        count += f", {num_logged:,} of them above the tables"
    for part in (*parts, Text(count)):
        console.print(part, highlight=False)


def _headline(preview: Preview) -> str:
    part, ranks, fill = _part(preview), counted(preview.world_size, "rank"), preview.fill
    if part != "rank":
        ranks += f" with {preview.data_shards} data shards"
    size = f"at most {preview.tokens_per_step:,} tokens per step"
    if fill is not None:
        size = f"{fill.mean * fill.full_tokens:,.0f} tokens per step of {fill.full_tokens:,.0f} "
        size += f"(fill {fill.mean:.1%}, by step {fill.least:.1%} to {fill.most:.1%})"
    text = f"{preview.name}: {counted(preview.steps, 'step')} of {preview.micro_batches} "
    text += f"on {ranks} ({preview.num_batches:,} per {part}); {size}"
    if not preview.has_full_rows:
        setting = 'data.mixing.batching_mode = "per_row"'
        return f"{text}\nwhat the run will draw is forecast of full rows only ({setting})"
    if preview.ends_at_step is not None:
        return f"{text}\nthe data is exhausted at step {preview.ends_at_step:,}"
    if not preview.is_counted:
        counted_part = f"the first {preview.counted_batches:,} of {preview.num_batches:,} batches"
        return f"{text}\nthe fill was counted over {counted_part}; all other numbers are averages"
    return text


def _part(preview: Preview) -> str:
    """The name of a reader of a part of the data."""
    if preview.data_shards == preview.world_size:
        return "rank"
    return "data shard"


def _number(value: float | None, form: str, unknown: str) -> str:
    return unknown if value is None else format(value, form)


def _numbers(heading: str, values: Sequence[float | None], leave_out: int = 0, form: str = ",.0f") -> Column:
    return Column(heading, [format(value or 0.0, form) for value in values], "right", leave_out)


def _source_columns(preview: Preview) -> tuple[str, list[Column]]:
    sources = preview.sources
    columns = [
        Column("source", [escape(each.name) for each in sources]),
        _numbers("expected\nshare", [each.batch_share for each in sources], form=".1%"),
    ]
    if preview.has_full_rows:
        tokens = [_number(each.tokens, ",.0f", "unknown") for each in sources]
        epochs = [_number(each.epochs, ".2f", "") for each in sources]
        columns += [Column("tokens", tokens, "right"), Column("epochs", epochs, "right")]
    columns += [
        Column("open\nstreams", [str(each.num_mixed or "") for each in sources], "right", leave_out=2),
        _numbers("behind\ncuts", [each.behind_cuts_share for each in sources], 3, ".1%"),
    ]
    return "Sources, over all ranks", columns


def _modality_columns(preview: Preview) -> tuple[str, list[Column]]:
    names: list[str] = []
    views: list[ModalityView] = []
    for source in preview.sources:
        names += [escape(source.name)] * len(source.modalities)
        views += source.modalities
    columns = [
        Column("source", names),
        Column("modality", [escape(view.name) for view in views]),
        _numbers("streams", [view.streams for view in views], 3),
    ]
    share = _numbers("of\ncorpus", [view.corpus_share for view in views], 1, ".1%")
    if not preview.has_full_rows:
        columns.append(_numbers("documents", [view.corpus_documents for view in views]))
        columns.append(_numbers("tokens", [view.corpus_tokens for view in views]))
        return "Modalities, in a pass over the training documents", [*columns, share]
    columns += [
        _numbers("documents", [view.picks for view in views]),
        _numbers("ended", [view.exhausts for view in views], 2),
        _numbers("tokens", [view.tokens for view in views], 2),
        share,
        _numbers("of\ndrawn", [view.drawn_share for view in views], 1, ".1%"),
    ]
    return "Modalities, over all ranks", columns


def _rank_columns(preview: Preview) -> tuple[str, list[Column]]:
    sources = [source for source in preview.sources if source.rank_token_shares]
    columns = [
        Column("source", [escape(each.name) for each in sources]),
        _numbers("fewest\ntokens", [min(each.rank_token_shares) for each in sources], form=".1%"),
        _numbers("most\ntokens", [max(each.rank_token_shares) for each in sources], form=".1%"),
    ]
    return f"Shares of the {preview.data_shards} {_part(preview)}s", columns


def _ledger_table(preview: Preview, ledger: LedgerView) -> Table:
    part, needed = _part(preview), "open streams x batch size"
    if preview.has_full_rows:
        needed = "one per row"
    others = f"a resume on another number of {part}s may need {ledger.capacity_to_change_ranks:,}"
    if ledger.capacity < ledger.capacity_to_change_ranks:
        others += ": more than the capacity"
    wait = counted(ledger.wait_bound_steps, "step")
    table = Table("", "", title=f"Ledger, per {part}", title_justify="left", show_header=False)
    table.add_row("mode", ledger.mode)
    table.add_row("capacity", f"{ledger.capacity:,} states, {ledger.megabytes:,.1f} MB")
    table.add_row("needed", f"at most {ledger.groups_in_flight:,} states ({needed})")
    table.add_row("on other ranks", others)
    table.add_row("longest wait", f"at most {wait} from one chunk of a document to the next")
    if ledger.stale_threshold is not None:
        table.add_row("stale threshold", f"{ledger.stale_threshold:,} steps")
    return table
