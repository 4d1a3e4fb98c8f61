"""Limits that hold before a run and after it: `preview` asks them of its forecast, `diagnostics` of the record.

Each limit is a function of plain numbers and says what to set instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

RARE_WAIT: Final = 1e-9
"""The probability that a single reader waits longer than its bound."""
LOW_FILL: Final = 0.9
"""Share of the positions of full rows: with fewer that hold a token, a run computes padding, or its batches are small."""
OVERSIZE_FILL: Final = 0.25
OVERSIZE_BYTES: Final = 1e9
OVERSIZE_DEVICE_SHARE: Final = 0.05


@dataclass(frozen=True)
class Assessment:
    """Whether some numbers exceed a limit, in words, and the value to set then."""

    is_beyond: bool
    words: str
    better: int


def ledger_oversize(capacity: int, used: float, row_bytes: int, device_bytes: float = 0.0) -> Assessment:
    """At most `OVERSIZE_FILL` of the rows of a rank's ledger are used at once, and the rest takes much of the device (0: of
    unknown size)."""
    spare = (capacity - used) * row_bytes
    is_beyond = used < OVERSIZE_FILL * capacity and spare > (OVERSIZE_DEVICE_SHARE * device_bytes or OVERSIZE_BYTES)
    share = f"at most {used / max(capacity, 1):.1%} of its room for {capacity:,} states"
    words = f"the ledger uses {share}; the rest takes {spare / 1e9:.2g} GB per rank"
    return Assessment(is_beyond, words, 2 ** math.ceil(math.log2(max(2 * used, 1))))


def wait_bound(picks_per_slice: Sequence[int], num_mixed: int, share: float, micro_batches: int) -> int:
    """Upper bound on the wait of a group for its next cell, in optimizer steps: what the stale threshold must exceed.

    With weighted picks, a reader with one pick left waits for about the remaining picks of the whole pool, at most K n; waits
    beyond 2 K n are negligible (docs/ledger.md; counted in docs/preview.md). This holds from about 20 picks per slice; below
    that, use the counted waits. A single reader waits only for its source, whose draws are independent: longer than w
    micro-batches with probability (1 - share)^w. As slices differ, K n is the sum of the K longest slices. A source with a
    share of the m micro-batches per step needs 1 / (share m) steps per pick.

    Args:
        picks_per_slice: n of every slice.
        num_mixed: K.
        share: of the micro-batches.
        micro_batches: m, the smallest of the run.
    """
    if share <= 0:
        return 0
    if num_mixed <= 1 or not picks_per_slice:
        return math.ceil(max(math.log(RARE_WAIT) / math.log1p(-share), 1) / micro_batches) if share < 1 else 1
    longest = sorted(picks_per_slice)[-num_mixed:]
    return math.ceil(2 * sum(longest) / (share * micro_batches))
