"""Counts over streams: documents, tokens, groups and cells by modality, and how often each token id occurs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from trainer.arrays import Ints
from trainer.data.documents import ReadOptions, TokenArray, TokenTable
from trainer.data.formats import format_name, load_documents
from trainer.data.groups import CutOptions, build_groups
from trainer.data.layout import Stream
from trainer.data.tokenizer import Tokenizer
from trainer.metrics.progress_bar import Report

CHUNK = 1 << 20  # tokens counted together


@dataclass(frozen=True)
class StreamFacts:
    """Counts of one stream. `empty_documents` have no token and are never read; `padding_share` is of the cells' tokens.
    `cells` are those of the chosen way to cut; `unpacked_cells` and `packed_cells` of both."""

    stream: str
    modality: str
    format: str
    documents: int
    empty_documents: int
    tokens: int
    groups: int
    cells: int
    unpacked_cells: int
    packed_cells: int
    padding_share: float


@dataclass(frozen=True)
class Survey:
    """Counts of a list of streams.

    Args:
        streams: one entry per stream.
        counts: how often each id occurs, int64 [vocab_size].
    """

    streams: list[StreamFacts]
    counts: Ints = field(repr=False)

    def total(self, seq_len: int, modality: str | None = None) -> dict[str, float]:
        """Sums over one modality, or over all."""
        chosen = [facts for facts in self.streams if modality in (None, facts.modality)]
        names = ("documents", "empty_documents", "tokens", "groups", "cells", "unpacked_cells", "packed_cells")
        totals: dict[str, float] = {"streams": len(chosen)}
        totals.update({name: sum(getattr(facts, name) for facts in chosen) for name in names})
        for kind in ("", "unpacked_", "packed_"):
            totals[f"{kind}padding_share"] = _padding(int(totals["tokens"]), int(totals[f"{kind}cells"]), seq_len)
        return totals

    @property
    def modalities(self) -> list[str]:
        """All labels, sorted."""
        return sorted({facts.modality for facts in self.streams})

    def type_counts(self, tokenizer: Tokenizer) -> dict[str, int]:
        """Tokens of each type; empty if the tokenizer has none."""
        table = tokenizer.token_type_table
        if table is None:
            return {}
        by_type = np.bincount(table, weights=self.counts, minlength=len(tokenizer.token_type_names))
        return dict(zip(tokenizer.token_type_names, by_type.astype(np.int64).tolist(), strict=True))

    def top_ids(self, number: int) -> list[tuple[int, int]]:
        """(id, occurrences) of the most frequent ids; ties in ascending order of id."""
        order = np.argsort(-self.counts, kind="stable")[:number]
        return [(int(i), int(self.counts[i])) for i in order if self.counts[i]]


def _padding(tokens: int, cells: int, seq_len: int) -> float:
    return 1.0 - tokens / (cells * seq_len) if cells else 0.0


def each_stream(streams: Sequence[Stream], report: Report | None) -> Iterator[Stream]:
    """The streams, reporting (streams done, streams, the next path) on the way."""
    for number, stream in enumerate(streams):
        if report is not None:
            report(number, len(streams), stream.relative_path)
        yield stream
    if report is not None:
        report(len(streams), len(streams), "done")


def token_chunks(documents: TokenTable) -> Iterator[TokenArray]:
    """Every token of every document once, in chunks of whole or partial documents.

    Raises:
        UserError: the file is damaged.
    """
    waiting: list[TokenArray] = []
    num_waiting = 0
    for document, length in enumerate(documents.lengths.tolist()):
        for start in range(0, length, CHUNK):
            waiting.append(documents.read(document, start, min(start + CHUNK, length)))
            num_waiting += len(waiting[-1])
            if num_waiting >= CHUNK:
                yield np.concatenate(waiting)
                waiting, num_waiting = [], 0
    if waiting:
        yield np.concatenate(waiting)


def survey(
    streams: Sequence[Stream],
    options: ReadOptions,
    cut: CutOptions,
    *,
    report: Report | None = None,
) -> Survey:
    """Read every stream once and count.

    Args:
        streams: from `discover_nested` or `discover_direct`.
        options, cut: how files are read and documents would be cut.
        report: see `each_stream`.

    Raises:
        UserError: for the first file that is unreadable or damaged.
    """
    found = []
    counts = np.zeros(options.tokenizer.vocab_size, dtype=np.int64)
    for stream in each_stream(streams, report):
        documents = load_documents(stream.path, options)
        lengths = documents.lengths
        both = [
            build_groups(lengths, np.arange(len(lengths)), stream.relative_path, replace(cut, pack=is_packed))
            for is_packed in (False, True)
        ]
        unpacked_cells, packed_cells = (int(each.cell_offsets[-1]) for each in both)
        groups, cells = both[cut.pack], (packed_cells if cut.pack else unpacked_cells)
        for chunk in token_chunks(documents):
            counts += np.bincount(chunk.astype(np.intp, copy=False), minlength=len(counts))
        tokens = int(lengths.sum())
        facts = StreamFacts(
            stream=stream.relative_path,
            modality=stream.modality,
            format=format_name(Path(stream.path), options.format),
            documents=len(lengths),
            empty_documents=int((lengths == 0).sum()),
            tokens=tokens,
            groups=groups.num_groups,
            cells=cells,
            unpacked_cells=unpacked_cells,
            packed_cells=packed_cells,
            padding_share=_padding(tokens, cells, cut.seq_len),
        )
        found.append(facts)
    return Survey(found, counts)
