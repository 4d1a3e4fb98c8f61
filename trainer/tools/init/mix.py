"""The weights of a first config: one source per modality, so that each is drawn in the share that was asked for."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.arrays import Ints
from trainer.data.groups import CutOptions, build_groups, documents_of
from trainer.data.layout import Stream
from trainer.data.reader import plan_length
from trainer.tools.init.shares import Mix
from trainer.tools.inspection.sizing import Sizes


@dataclass(frozen=True)
class Part:
    """A modality, and what a pass over its training documents is.

    Args:
        modality: its name.
        source: name of its source.
        streams: number of them.
        tokens, batches: of a pass, on one rank.
        corpus_share, drawn_share: of all tokens.
        weight: of its source.
    """

    modality: str
    source: str
    streams: int
    tokens: int
    batches: int
    corpus_share: float
    drawn_share: float
    weight: float


def parts_of(streams: Sequence[Stream], lengths: Sequence[Ints], sizes: Sizes, mix: Mix) -> list[Part]:
    """The modalities with the weights that draw them in the shares of `mix`.

    A weight is a share of the micro-batches, whose rows are not all filled: a share of the tokens is that of the micro-batches
    times the tokens of an average one. So weight = share * batches / tokens, scaled to sum to 1.

    Args:
        streams: that were inspected.
        lengths: tokens of each of their documents.
        sizes: how documents are cut, and how many are held out.
    """
    tokens: dict[str, int] = {}
    batches: dict[str, int] = {}
    counts: dict[str, int] = {}
    for stream, each in zip(streams, lengths, strict=True):
        found = _pass(stream, each, sizes)
        name = stream.modality
        tokens[name], batches[name] = tokens.get(name, 0) + found[0], batches.get(name, 0) + found[1]
        counts[name] = counts.get(name, 0) + 1
    names = sorted(name for name in tokens if tokens[name])
    powers = {Mix.tokens: 1.0, Mix.sqrt: 0.5, Mix.equal: 0.0}
    asked = {name: math.pow(tokens[name], powers[mix]) for name in names}
    raw = {name: asked[name] * batches[name] / tokens[name] for name in names}
    sources = _source_names(names)
    return [
        Part(
            modality=name,
            source=sources[name],
            streams=counts[name],
            tokens=tokens[name],
            batches=batches[name],
            corpus_share=tokens[name] / sum(tokens.values()),
            drawn_share=asked[name] / sum(asked.values()),
            weight=raw[name] / sum(raw.values()),
        )
        for name in names
    ]


def _pass(stream: Stream, lengths: Ints, sizes: Sizes) -> tuple[int, int]:
    """(tokens, micro-batches) of a pass over the training documents of a stream, as one rank reads it."""
    kept = np.flatnonzero(documents_of("train", stream.relative_path, len(lengths), sizes.holdout_fraction))
    cut = CutOptions("", sizes.seq_len, sizes.max_group_cells, sizes.pack)
    groups = build_groups(lengths, kept, stream.relative_path, cut)
    if not groups.num_groups:
        return 0, 0
    return int(lengths[kept].sum()), plan_length(groups.num_cells, sizes.batch_size)


def _source_names(modalities: Sequence[str]) -> dict[str, str]:
    """Names of sources, which are unique and of plain characters."""
    names: dict[str, str] = {}
    for modality in modalities:
        plain = re.sub(r"[^A-Za-z0-9_-]+", "-", modality).strip("-") or "part"
        taken = set(names.values())
        names[modality] = next(
            name for name in (plain, *(f"{plain}-{n}" for n in range(2, len(modalities) + 2))) if name not in taken
        )
    return names
