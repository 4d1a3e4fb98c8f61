"""Reads which tokens are trained (`loss_mask`). Tables then hold 2 * id, and 1 more for a token that is not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.arrays import IGNORED, Ints, is_known
from trainer.data.collate import TRAINED, Batch, Collator, Lane, Pieces
from trainer.data.documents import (
    Reader,
    ReadOptions,
    TokenArray,
    TokenTable,
    damaged,
    load_megatron,
    table_from_pieces,
)
from trainer.data.formats import FORMATS, format_name, takes_option
from trainer.data.tokenizer import BytesTokenizer, IdsTokenizer, Tokenizer
from trainer.lab.tokenizer_json import HuggingFaceTokenizer


def refuse_missing(where: Path | str, names: Iterable[str], fields: Collection[str]) -> None:
    """Refuse a record or a file of `fields` that lacks one of these names."""
    for name in names:
        if name not in fields:
            problem = f"has no field {name} (its fields: {', '.join(fields)})"
            raise damaged(where, problem, "name one that it has")


class MaskedTable(TokenTable):
    def read(self, document: int, start: int, stop: int) -> TokenArray:
        """The ids [start, stop) of a document."""
        return super().read(document, start, stop) >> 1

    def trained(self, document: int, start: int, stop: int) -> Iterator[slice]:
        """The stretches of trained tokens of what `read` gives."""
        untrained = np.concatenate([[1], super().read(document, start, stop) & 1, [1]])
        yield from map(slice, *np.flatnonzero(np.diff(untrained)).reshape(-1, 2).T.tolist())


class CountingCollator(Collator):
    """Counts the targets of documents that are known, and all: the others fill rows, too."""

    def batch(self, lanes: Sequence[Lane]) -> Batch:
        """The next row of each lane."""
        batch = super().batch(lanes)
        known = is_known(batch["targets"])[batch["segment_ids"] >= 0]
        return {**batch, TRAINED: (int(known.sum()), known.size)}


class MaskedCollator(CountingCollator):
    """Takes the tokens of a `MaskedTable` apart."""

    def _content(self, found: Pieces, begins: Ints) -> Batch:
        untrained = [np.zeros(len(piece), np.bool_) for piece in found.tokens]
        for at, read in enumerate(found.reads):
            if read is not None and isinstance(read[0].source.documents, MaskedTable):
                of, offset, _ = read
                untrained[at] = (found.tokens[at] & 1).astype(np.bool_)
                found.tokens[at] = found.tokens[at] >> 1
                if of.first or offset:  # not the id that begins documents
                    found.inputs[at] >>= 1
        flat = super()._content(found, begins)
        flat["targets"][np.concatenate(untrained)] = IGNORED
        return flat


class LossMask(NamedTuple):
    """Reads files with such a field."""

    field: str

    def refuse_absent(self, where: Path | str, fields: Collection[str]) -> None:
        """Refuse a record or a file without the field."""
        refuse_missing(where, [self.field], fields)

    @property
    def collator(self) -> type[Collator]:
        """Makes the batches."""
        return MaskedCollator

    def load(self, path: Path, format: str, options: ReadOptions) -> TokenTable:
        """The documents of a file, or of a copy of its tokens."""
        codes = IdsTokenizer(2 * options.tokenizer.vocab_size)
        if options.format == "megatron":  # which no file with such a field is
            found = load_megatron(path, ReadOptions(codes))
            return MaskedTable(found.tokens, found.starts, found.lengths)
        return self.table(self.pieces(path, options), str(path), codes.vocab_size)

    def table(self, pieces: Iterable[TokenArray], where: str, num_codes: int = 1 << 32) -> TokenTable:
        found = table_from_pieces(pieces, num_codes, where=where)
        if not found.num_documents:
            raise damaged(where, "has no documents", "remove the file")
        return MaskedTable(found.tokens, found.starts, found.lengths)

    def pieces(self, path: Path, options: ReadOptions) -> Iterator[TokenArray]:
        """The tokens of each document. Raises UserError: the file has no such field."""
        name = format_name(path, options.format)
        if not takes_option(name, "loss_mask") or isinstance(options.tokenizer, Reader):
            raise damaged(path, f"is read as {name}, without loss_mask", "make it a source of its own")
        return FORMATS[name].pieces(path, options)  # type: ignore[misc]

    def refuse_untrained(self, opened: Iterable[Any], source: str) -> Iterator[Any]:
        """The same files. Raises UserError behind them if no token of theirs is trained."""
        num_trained = 0
        for each in opened:
            num_trained += int(np.count_nonzero(each.documents.tokens & 1 == 0))
            yield each
        if not num_trained:
            raise damaged(f"source {source}: loss_mask", f"{self.field} lets no token be trained", "name another field")

    def coded(self, where: str, content: str | TokenArray, mask: Any, options: ReadOptions) -> TokenArray:
        """The tokens of a document. One of a text is trained if its first character lies in a span."""
        size, given = len(content), mask if isinstance(mask, list) else [None]
        if not isinstance(content, str):
            if len(given) != size or any(flag not in (0, 1) for flag in given):
                raise damaged(where, f"{self.field} is not a list of 0 and 1, one for each of {size} ids")
            return np.asarray(2 * content.astype(np.int64) + ~np.array(given, np.bool_))
        is_trained = np.zeros(size, np.bool_)
        for span in given:
            if not isinstance(span, list) or [*map(type, span)] != [int, int]:
                raise damaged(where, f"{self.field} is not a list of [start, end], which are characters of the text")
            if not 0 <= span[0] <= span[1] <= size:
                problem = f"{self.field}: {span} is no span of a text of {size} characters"
                raise damaged(where, problem, "count Unicode characters from 0, not bytes; the end is not in it")
            is_trained[slice(*span)] = True
        try:
            ids, begins = _encoded(options.tokenizer, content)
        except UnicodeEncodeError as error:
            raise damaged(where, "text has an unpaired surrogate", "write the text as UTF-8") from error
        flags, eod = is_trained[begins], options.text_eod
        if eod is not None and len(ids):
            if ids[-1] != eod:
                ids, flags = np.append(ids, eod), np.append(flags, False)
            flags[-1] |= flags[-2:][0]  # trained if the token before it is
        return np.asarray(2 * ids + ~flags)


def _encoded(tokenizer: Tokenizer, text: str) -> tuple[Ints, Ints]:
    """The ids of a text, and the character in which each begins."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        if not isinstance(tokenizer, BytesTokenizer):
            raise damaged("data.tokenizer", f"{tokenizer.name} does not say where tokens begin", "leave out loss_mask")
        ids = tokenizer.encode(text)
        return ids, np.cumsum((ids & 0xC0) != 0x80) - 1  # bytes of UTF-8
    found = tokenizer.encoding(text)
    return np.asarray(found.ids, np.int64), np.asarray(found.offsets, np.int64).reshape(-1, 2)[:, 0]
