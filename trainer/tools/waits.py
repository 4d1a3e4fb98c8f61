"""How long a group may wait for its next cell: what the ledger's stale threshold must exceed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

RARE_WAIT: Final = 1e-9
"""The probability that a single reader waits longer than its bound."""


def wait_bound(picks_per_slice: Sequence[int], num_mixed: int, share: float, micro_batches: int) -> int:
    """Upper bound on the wait of a group for its next cell, in optimizer steps.

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
