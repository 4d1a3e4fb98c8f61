"""Waits of groups: 2 K n is a safe stale threshold where docs/preview.md claims it, and not where it does not."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.tools.preview.forecast import CountedMixing, SliceShape, SourceShape, StreamShape


def waits(num_mixed: int, picks: int, seed: int) -> list[int]:
    """Waits of a pool of K readers with n picks per slice, refilled from 4 K streams, over 10 K n picks."""
    part = SliceShape(np.full(4, picks), 4 * picks)
    streams = tuple(StreamShape("m", 4, (part,)) for _ in range(4 * num_mixed))
    shape = SourceShape("pool", streams, num_mixed, shared=True)
    mixing = CountedMixing(shape, "weighted", seed, 0)
    for step in range(1, 10 * num_mixed * picks + 1):
        mixing.step = step
        next(mixing)
    return list(mixing.tally.waits["m"].elements())


@pytest.mark.parametrize("num_mixed", [4, 8])
@pytest.mark.parametrize("picks", [20, 50, 100])
def test_no_wait_is_longer_than_2_k_n(num_mixed: int, picks: int) -> None:
    longest = max(max(waits(num_mixed, picks, seed)) for seed in range(3))
    assert longest <= 2 * num_mixed * picks
    assert longest > 0.4 * num_mixed * picks  # the bound is tight: a threshold far below is not safe
