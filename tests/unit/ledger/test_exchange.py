"""Ownership by hash."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from trainer.ledger import owner_of, splitmix64


def test_hash_is_splitmix64() -> None:
    # The first three outputs of the reference generator seeded with 0; each call adds the golden gamma to the state.
    gamma = 0x9E3779B97F4A7C15
    seeds = np.array([0, gamma, 2 * gamma % 2**64], np.uint64).view(np.int64)
    assert [hex(x) for x in splitmix64(seeds).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


@pytest.mark.parametrize("stride", [1, 8, 4096])
def test_owners_are_spread_whatever_the_stride_of_the_ids(stride: int) -> None:
    shares = Counter(owner_of(np.arange(8000) * stride, 8).tolist())
    assert len(shares) == 8
    assert max(shares.values()) < 1150
