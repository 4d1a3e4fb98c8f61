"""Initial sizes from document lengths: cells, groups, batches, steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.arrays import Ints
from trainer.data.groups import held_out

CELLS_PER_DOCUMENT = 8  # enough for carried state to matter
SEQ_LEN_RANGE = (16, 256)
PACKED_SEQ_LEN = 128
LARGEST_BATCH, LARGEST_POOL, LARGEST_GROUP, SMALLEST_GROUP = 8, 8, 64, 4
TOKENS_PER_STEP, MOST_MICRO_BATCHES = 4096, 8
STEPS_RANGE = (100, 2000)
HOLDOUT_FRACTIONS = (0.02, 0.05, 0.1, 0.2)
MOST_HELD_OUT = 0.3


@dataclass(frozen=True)
class Sizes:
    """Initial values of `[data]`, `[train]` and `[eval]`. `holdout_fraction` 0: too few documents to hold any out."""

    seq_len: int
    max_group_cells: int
    pack: bool
    num_streams_mixed: int
    batch_size: int
    micro_batches: int
    steps: int
    passes: float
    holdout_fraction: float


def choose_sizes(
    paths: Sequence[str], lengths: Sequence[Ints], *, share: float = 1.0, modalities: Sequence[str] = ()
) -> Sizes:
    """Sizes that fill the rows of a batch and let a run see the data about once, within `STEPS_RANGE`.

    Args:
        paths: relative path of each stream.
        lengths: tokens of each document, by stream; at least one document has a token.
        share: of all data that these streams are.
        modalities: of each stream; documents of each are held out, if some fraction does that.
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
    tokens_a_step = rows * seq_len * micro
    steps = int(np.clip(round(total / share / tokens_a_step), *STEPS_RANGE))
    return Sizes(
        seq_len=seq_len,
        max_group_cells=group,
        pack=pack,
        num_streams_mixed=min(LARGEST_POOL, len(lengths)),
        batch_size=batch,
        micro_batches=micro,
        steps=steps,
        passes=steps * tokens_a_step / (total / share),
        holdout_fraction=_holdout(paths, lengths, total, modalities),
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


def _holdout(paths: Sequence[str], lengths: Sequence[Ints], total: int, modalities: Sequence[str]) -> float:
    """The smallest usual fraction that holds out some tokens, of every modality if one does, and leaves most; 0 if none."""
    usable = []
    for fraction in HOLDOUT_FRACTIONS:
        by_stream = [
            int(each[held_out(path, len(each), fraction)].sum()) for path, each in zip(paths, lengths, strict=True)
        ]
        if total * fraction / 4 <= sum(by_stream) <= total * MOST_HELD_OUT:
            usable.append(fraction)
            if all(holds_out_each(paths, lengths, modalities, fraction).values()):
                return fraction
    return usable[0] if usable else 0.0


def holds_out_each(
    paths: Sequence[str], lengths: Sequence[Ints], modalities: Sequence[str], fraction: float
) -> dict[str, bool]:
    """Modality -> whether this fraction holds out some of its tokens and leaves some."""
    found: dict[str, tuple[int, int]] = {}
    for path, each, modality in zip(paths, lengths, modalities, strict=False):
        held, tokens = found.get(modality, (0, 0))
        found[modality] = held + int(each[held_out(path, len(each), fraction)].sum()), tokens + int(each.sum())
    return {modality: 0 < held < tokens for modality, (held, tokens) in found.items()}
