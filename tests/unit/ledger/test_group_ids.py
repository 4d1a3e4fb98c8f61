"""Group ids that are none: a state stored under one would never be kept, and no counter would show it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.ledger import Ledger


@pytest.mark.parametrize("wrong", [np.array([3, -2]), np.array([3, 2**63 + 5], np.uint64), np.array([3, hash(-7)])])
def test_an_id_outside_of_63_bits_is_refused_by_both_calls(wrong):
    ledger = Ledger(state_width=2, capacity=4, wipe_mode="lru")
    ledger.begin_step(1)
    cells, last = np.zeros(2, np.int64), np.zeros(2, np.bool_)
    with pytest.raises(ValueError, match=r"must be -1 \(no group\) or in \[0, 2\^63\)"):
        ledger.lookup(wrong, cells)
    with pytest.raises(ValueError, match="group id"):
        ledger.store(wrong, cells, last, torch.ones(2, 2))
    assert ledger.last_extra_metrics["ledger/live_groups"] == 0
    ledger.store(np.array([-1, 2**63 - 1]), cells, last, torch.ones(2, 2))
    assert ledger.last_extra_metrics["ledger/live_groups"] == 1
