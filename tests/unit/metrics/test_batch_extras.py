"""Batch extras leave the batch before the model sees it, and what nobody knows is refused."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.errors import UserError
from trainer.metrics.batch_extras import check_inputs, pop_extras

NAMES = [
    "dataset_labels",
    "dataset_segments",
    "pack_num_samples",
    "token_types",
    "tokens_before",
    "resets_before",
    "instability_meta_json",
]


def test_extras_are_taken_out_and_inputs_stay() -> None:
    batch: dict[str, Any] = {"tokens": 1, "targets": 2, **dict.fromkeys(NAMES, 3)}
    assert pop_extras(batch) == dict.fromkeys(NAMES, 3)
    assert batch == {"tokens": 1, "targets": 2}


def test_an_unregistered_key_is_refused_with_both_lists() -> None:
    with pytest.raises(UserError, match=r"batch key speed: neither .*\(state, tokens\).*dataset_labels.*token_types"):
        check_inputs({"tokens": 1, "speed": 2}, ["tokens", "state"])
    check_inputs(["tokens"], ["tokens", "state"])
