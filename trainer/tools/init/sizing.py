"""Sizes and weights of a first config, from the lengths of the documents."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.arrays import Ints
from trainer.data.groups import held_out
from trainer.data.layout import Stream

CELLS_PER_DOCUMENT = 8  # enough for carried state to matter
SEQ_LEN_RANGE = (16, 256)
SHORT_SEQ_LEN = 128  # of documents that are shorter, several of which a row holds
LARGEST_BATCH, LARGEST_POOL = 8, 8
TOKENS_PER_STEP, MOST_MICRO_BATCHES = 4096, 8
STEPS_RANGE = (100, 2000)
HOLDOUT_FRACTIONS = (0.02, 0.05, 0.1, 0.2)
MOST_HELD_OUT = 0.3


@dataclass(frozen=True)
class Sizes:
    """Initial values of `[data]`, `[train]` and `[eval]`. `holdout_fraction` 0: too few documents
    to hold any out. `passes`: over the documents that are not held out."""

    seq_len: int
    num_streams_mixed: int
    batch_size: int
    micro_batches: int
    steps: int
    passes: float
    holdout_fraction: float


def choose_sizes(streams: Sequence[Stream], lengths: Sequence[Ints], *, share: float = 1.0) -> Sizes:
    """Sizes with which rows are full, and a run is about one epoch within `STEPS_RANGE`.
    `lengths`: tokens of each document, by stream; at least one document has a token. `share`: of
    all data that these streams are."""
    holdout = _holdout(streams, lengths)
    kept = np.concatenate(
        [
            each[~held_out(stream.relative_path, len(each), holdout)]
            for stream, each in zip(streams, lengths, strict=True)
        ]
    )
    trained = int(kept.sum()) / share
    seq_len = _seq_len(kept, int(kept.sum()))
    # A row reads documents in turn; an epoch has to last longer than its longest document.
    longest = max(int(kept.max()), 32 * seq_len)
    fitting = min(np.count_nonzero(kept) / share, trained / longest)
    batch = _power_of_two(int(fitting), 1, LARGEST_BATCH)
    micro = int(np.clip(round(TOKENS_PER_STEP / (batch * seq_len)), 1, MOST_MICRO_BATCHES))
    tokens_a_step = batch * seq_len * micro
    steps = int(np.clip(round(trained / tokens_a_step), *STEPS_RANGE))
    return Sizes(
        seq_len=seq_len,
        num_streams_mixed=min(LARGEST_POOL, len(lengths)),
        batch_size=batch,
        micro_batches=micro,
        steps=steps,
        passes=steps * tokens_a_step / trained,
        holdout_fraction=holdout,
    )


def _seq_len(lengths: Ints, total: int) -> int:
    """Half of all tokens are in documents of `CELLS_PER_DOCUMENT` cells, unless most are short."""
    ordered = np.sort(lengths)
    typical = int(ordered[np.searchsorted(np.cumsum(ordered), total / 2)])
    roomy = _power_of_two(total // 64, *SEQ_LEN_RANGE)  # little data still gives some cells
    # Most documents fit into a row or two: rows need not be short for the state to matter.
    if typical < 2 * CELLS_PER_DOCUMENT * SEQ_LEN_RANGE[0] and len(lengths) > 1:
        return min(SHORT_SEQ_LEN, roomy)
    return min(_power_of_two(typical // CELLS_PER_DOCUMENT, *SEQ_LEN_RANGE), roomy)


def _power_of_two(value: int, lowest: int, highest: int) -> int:
    """The largest power of two up to `value`, clipped to bounds that are powers of two."""
    return int(np.clip(1 << max(value, 1).bit_length() - 1, lowest, highest))


def _holdout(streams: Sequence[Stream], lengths: Sequence[Ints]) -> float:
    """The smallest usual fraction that holds out some of every modality, if one does; 0 if none."""
    total = sum(int(each.sum()) for each in lengths)
    usable = []
    for fraction in HOLDOUT_FRACTIONS:
        held = sum(held for held, _ in _held_out(streams, lengths, fraction).values())
        # Whole documents are held out: a fraction of few may hold out none, or most of the text.
        if total * fraction / 4 <= held <= total * MOST_HELD_OUT:
            usable.append(fraction)
            if not never_held_out(streams, lengths, fraction):
                return fraction
    return usable[0] if usable else 0.0


def never_held_out(streams: Sequence[Stream], lengths: Sequence[Ints], fraction: float) -> list[str]:
    """The modalities of which this fraction holds out no token, or all."""
    found = _held_out(streams, lengths, fraction)
    return [name for name, (held, all_) in found.items() if not 0 < held < all_]


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
    source: str  # its name
    streams: int
    tokens: int  # of the training documents
    weight: float  # its share of all training tokens


def parts_of(streams: Sequence[Stream], lengths: Sequence[Ints], sizes: Sizes) -> list[Part]:
    """The modalities with the weights that draw each in its share of the training tokens."""
    tokens: dict[str, int] = dict.fromkeys(sorted(stream.modality for stream in streams), 0)
    for stream, each in zip(streams, lengths, strict=True):
        kept = ~held_out(stream.relative_path, len(each), sizes.holdout_fraction)
        tokens[stream.modality] += int(each[kept].sum())
    tokens = {name: count for name, count in tokens.items() if count}
    sources = _source_names(list(tokens))
    return [
        Part(
            modality=name,
            source=sources[name],
            streams=sum(stream.modality == name for stream in streams),
            tokens=tokens[name],
            weight=tokens[name] / sum(tokens.values()),
        )
        for name in tokens
    ]


def _source_names(modalities: Sequence[str]) -> dict[str, str]:
    """Names of sources, which are unique and of plain characters."""
    names: dict[str, str] = {}
    for modality in modalities:
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", modality).strip("-") or "part"
        while name in names.values():
            name += "-"
        names[modality] = name
    return names
