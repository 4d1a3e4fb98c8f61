"""Sizes and weights of a first config, from the lengths of the documents."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trainer.arrays import Ints
from trainer.data.deal import plan_length
from trainer.data.groups import CutOptions, build_groups, documents_of, held_out
from trainer.data.layout import Stream

CELLS_PER_DOCUMENT = 8  # enough for carried state to matter
SEQ_LEN_RANGE = (16, 256)
PACKED_SEQ_LEN = 128
LARGEST_BATCH, LARGEST_POOL, LARGEST_GROUP, SMALLEST_GROUP = 8, 8, 64, 4
TOKENS_PER_STEP, MOST_MICRO_BATCHES = 4096, 8
STEPS_RANGE = (100, 2000)
HOLDOUT_FRACTIONS = (0.02, 0.05, 0.1, 0.2)
MOST_HELD_OUT = 0.3

Mix = Literal["tokens", "sqrt", "equal"]
MIXES: Mapping[Mix, tuple[str, float]] = {
    "tokens": ("in its share of the training tokens", 1.0),
    "sqrt": ("by the square root of its tokens, so that small ones come more often", 0.5),
    "equal": ("equally often", 0.0),
}
"""How often each modality is drawn: in words, and as the power of its tokens."""


@dataclass(frozen=True)
class Sizes:
    """Initial values of `[data]`, `[train]` and `[eval]`. `holdout_fraction` 0: too few documents to hold any out.
    `passes`: over the documents that are not held out."""

    seq_len: int
    max_group_cells: int
    pack: bool
    num_streams_mixed: int
    batch_size: int
    micro_batches: int
    steps: int
    passes: float
    holdout_fraction: float


def choose_sizes(streams: Sequence[Stream], lengths: Sequence[Ints], *, share: float = 1.0) -> Sizes:
    """Sizes that fill the rows of a batch and let a run see its training documents about once, within `STEPS_RANGE`.

    Args:
        lengths: tokens of each document, by stream; at least one document has a token.
        share: of all data that these streams are.
    """
    all_lengths = np.concatenate(lengths)
    total = int(all_lengths.sum())
    seq_len, pack = _cell(all_lengths, total)
    cells = [-(-int(each.sum()) // seq_len) if pack else int((-(-each // seq_len)).sum()) for each in lengths]
    batch = _power_of_two(sum(cells) // 32, 1, LARGEST_BATCH)
    # The rows of a batch read different groups: long documents are cut so that a stream has enough of them.
    typical_cells = int(np.median([count for count in cells if count]))
    group = int(np.clip(typical_cells // (2 * batch), SMALLEST_GROUP, LARGEST_GROUP))
    groups = cells if pack else [int((-(-each // (seq_len * group))).sum()) for each in lengths]
    rows = float(np.mean([min(batch, count) for count in groups if count]))
    micro = int(np.clip(round(TOKENS_PER_STEP / (rows * seq_len)), 1, MOST_MICRO_BATCHES))
    holdout = _holdout(streams, lengths)
    trained = (total - sum(held for held, _ in _held_out(streams, lengths, holdout).values())) / share
    tokens_a_step = rows * seq_len * micro
    steps = int(np.clip(round(trained / tokens_a_step), *STEPS_RANGE))
    return Sizes(
        seq_len=seq_len,
        max_group_cells=group,
        pack=pack,
        num_streams_mixed=min(LARGEST_POOL, len(lengths)),
        batch_size=batch,
        micro_batches=micro,
        steps=steps,
        passes=steps * tokens_a_step / trained,
        holdout_fraction=holdout,
    )


def _cell(lengths: Ints, total: int) -> tuple[int, bool]:
    """(seq_len, pack): half of all tokens are in documents of at least about `CELLS_PER_DOCUMENT` cells."""
    ordered = np.sort(lengths)
    typical = int(ordered[np.searchsorted(np.cumsum(ordered), total / 2)])
    roomy = _power_of_two(total // 64, *SEQ_LEN_RANGE)  # little data still gives some cells
    if typical < 2 * CELLS_PER_DOCUMENT * SEQ_LEN_RANGE[0] and len(lengths) > 1:
        return min(PACKED_SEQ_LEN, roomy), True
    return min(_power_of_two(typical // CELLS_PER_DOCUMENT, *SEQ_LEN_RANGE), roomy), False


def _power_of_two(value: int, lowest: int, highest: int) -> int:
    """The largest power of two up to `value`, clipped to bounds that are powers of two."""
    return int(np.clip(1 << max(value, 1).bit_length() - 1, lowest, highest))


def _holdout(streams: Sequence[Stream], lengths: Sequence[Ints]) -> float:
    """The smallest usual fraction that holds out some tokens, of every modality if one does, and leaves most; 0 if none."""
    total = sum(int(each.sum()) for each in lengths)
    usable = []
    for fraction in HOLDOUT_FRACTIONS:
        held = sum(held for held, _ in _held_out(streams, lengths, fraction).values())
        if total * fraction / 4 <= held <= total * MOST_HELD_OUT:
            usable.append(fraction)
            if not never_held_out(streams, lengths, fraction):
                return fraction
    return usable[0] if usable else 0.0


def never_held_out(streams: Sequence[Stream], lengths: Sequence[Ints], fraction: float) -> list[str]:
    """The modalities of which this fraction holds out no token, or all."""
    return [name for name, (held, all_) in _held_out(streams, lengths, fraction).items() if not 0 < held < all_]


def _held_out(streams: Sequence[Stream], lengths: Sequence[Ints], fraction: float) -> dict[str, tuple[int, int]]:
    """Modality -> (tokens that this fraction holds out, all tokens)."""
    found: dict[str, tuple[int, int]] = {}
    for stream, each in zip(streams, lengths, strict=True):
        held, tokens = found.get(stream.modality, (0, 0))
        kept_back = each[held_out(stream.relative_path, len(each), fraction)]
        found[stream.modality] = held + int(kept_back.sum()), tokens + int(each.sum())
    return found


@dataclass(frozen=True)
class Part:
    """A modality, and a source of it alone."""

    modality: str
    source: str
    """Its name."""
    streams: int
    tokens: int
    """Of the training documents."""
    token_share: float
    """Of all training tokens."""
    drawn_share: float
    """Of those that are drawn."""
    weight: float


def parts_of(streams: Sequence[Stream], lengths: Sequence[Ints], sizes: Sizes, mix: Mix) -> list[Part]:
    """The modalities with the weights that draw them in the shares of `mix`.

    A weight is a share of the micro-batches, whose rows are not all filled: a share of the tokens is that of the micro-batches
    times the tokens of an average one. So weight = share * batches / tokens, scaled to sum to 1.
    """
    passes: dict[str, list[tuple[int, int]]] = {}
    for stream, each in zip(streams, lengths, strict=True):
        passes.setdefault(stream.modality, []).append(_pass(stream, each, sizes))
    tokens = {name: sum(each[0] for each in found) for name, found in sorted(passes.items())}
    tokens = {name: count for name, count in tokens.items() if count}
    batches = {name: sum(each[1] for each in passes[name]) for name in tokens}
    asked = {name: count ** MIXES[mix][1] for name, count in tokens.items()}
    raw = {name: asked[name] * batches[name] / tokens[name] for name in tokens}
    sources = _source_names(list(tokens))
    return [
        Part(
            modality=name,
            source=sources[name],
            streams=len(passes[name]),
            tokens=tokens[name],
            token_share=tokens[name] / sum(tokens.values()),
            drawn_share=asked[name] / sum(asked.values()),
            weight=raw[name] / sum(raw.values()),
        )
        for name in tokens
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
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", modality).strip("-") or "part"
        while name in names.values():
            name += "-"
        names[modality] = name
    return names
