"""Checks of how a source's files are read, before any is opened."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.data.documents import IdBounds
from trainer.data.formats import find_loader, is_import_path
from trainer.data.layout import refuse_unheeded
from trainer.data.tokenizer import Tokenizer
from trainer.training.setup.sources import Source


def check_reading(sources: Sequence[Source], eval_sources: Sequence[Source], tokenizer: Tokenizer) -> None:
    """Refuse options of sources that change nothing, or cannot be right.

    Raises:
        UserError: a format of the user's own cannot be imported; no file of a source heeds `dtype`, `eod` or `text_split`; or
            `eod` is outside the vocabulary.
    """
    named = [(f"source {source.name}", source) for source in sources]
    named += [(f"eval source {source.name}", source) for source in eval_sources]
    for name, source in named:
        table = source.table
        given = {"dtype": table.dtype, "eod": table.eod, "text_split": table.text_split}
        if is_import_path(table.format):
            find_loader(table.format)
        refuse_unheeded(source.streams, table.format, given, source=name)
        # In a format of the user's own, eod means what its function makes of it.
        if table.eod is not None and not is_import_path(table.format):
            IdBounds.of(name, tokenizer).check_eod(table.eod, f"{name}: eod")
