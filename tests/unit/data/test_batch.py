"""Taking a data set's dict apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.data.batch import BATCH_EXTRAS, MicroBatch, accepted_inputs, take_apart
from trainer.errors import UserError
from trainer.extensions.noise_components import halves


def in_halves(window: list[MicroBatch]) -> list[MicroBatch]:
    return [half for micro in window for half in halves(micro)]


def batch(**more: object) -> dict[str, object]:
    carry = {"group_ids": np.array([4, 5]), "cell_index": np.array([0, 3]), "is_last": np.array([False, True])}
    return {"tokens": torch.zeros(2, 3), "targets": torch.ones(2, 3, dtype=torch.long), **carry, **more}


def test_extras_and_bookkeeping_never_reach_the_model():
    given = batch(**dict.fromkeys(BATCH_EXTRAS, 3))
    micro = take_apart(given, frozenset({"tokens"}))
    assert micro.inputs.keys() == {"tokens"}
    assert micro.extras == dict.fromkeys(BATCH_EXTRAS, 3)
    assert micro.carry is not None
    assert micro.carry.is_last.tolist() == [False, True]
    assert "tokens" in given  # the data set's dict is not changed


def test_a_batch_without_groups_carries_nothing():
    micro = take_apart({"tokens": torch.zeros(2, 3), "targets": torch.zeros(2, 3)}, None)
    assert micro.carry is None
    assert micro.meta == "{}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens": 1}, "has no targets; it has tokens"),
        (
            {"tokens": 1, "targets": 1, "group_ids": 1},
            "has not all of group_ids, cell_index, is_last: it has no cell_index, is_last",
        ),
        (batch(odd=1), r"batch key odd: neither an input of the model \(tokens\).*dataset_labels.*token_types"),
    ],
)
def test_an_incomplete_or_unknown_batch_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        take_apart(given, frozenset({"tokens"}))


def test_a_masked_copy_has_one_row_with_nothing_to_predict_and_no_group():
    copy = take_apart(batch(dataset_labels=["x", "y"], noise=torch.zeros(5)), None).masked()
    assert copy.is_filler
    assert copy.targets.tolist() == [[-100, -100, -100]]
    assert copy.carry is not None
    assert (copy.carry.group_ids.tolist(), len(copy.carry.cell_index)) == ([-1], 1)
    assert len(copy.inputs["tokens"]) == len(copy.extras["dataset_labels"]) == 1
    assert len(copy.inputs["noise"]) == 5  # what has no entry for each row is shared


def test_the_model_s_own_signature_says_what_it_takes():
    class Plain(torch.nn.Module):
        def forward(self, tokens, state=None, resets=None):
            return tokens

    class Any(torch.nn.Module):
        def forward(self, **inputs):
            return inputs

    assert accepted_inputs(Plain()) == {"tokens", "resets"}
    assert accepted_inputs(Any()) is None


def test_halves_have_all_rows_in_order_with_their_groups_and_extras():
    more = {
        "dataset_labels": ["x", "y"],
        "token_types": torch.tensor([[1] * 3, [2] * 3]),
        "instability_meta_json": "{}",
    }
    micro = take_apart(batch(**more, temperature=0.5, noise=torch.zeros(5)), None)
    first, second = in_halves([micro])
    assert [half.targets.tolist() for half in (first, second)] == [[row] for row in micro.targets.tolist()]
    assert second.carry is not None
    assert (second.carry.group_ids.tolist(), second.carry.is_last.tolist()) == ([5], [True])
    assert (first.extras["dataset_labels"], second.extras["dataset_labels"]) == (["x"], ["y"])
    assert second.extras["token_types"].tolist() == [[2] * 3]
    # What has no entry for each row is shared.
    assert second.inputs["temperature"] == 0.5
    assert len(second.inputs["noise"]) == 5
    assert second.meta == micro.meta


def test_a_single_row_is_followed_by_a_masked_one():
    """Ranks that exchange states must do it equally often."""
    single = {key: value[:1] for key, value in batch().items()}
    whole, nothing = in_halves([take_apart(single, None)])
    assert whole.targets.tolist() == [[1, 1, 1]]
    assert nothing.targets.tolist() == [[-100] * 3]
    assert whole.carry is not None
    assert nothing.carry is not None
    assert (whole.carry.group_ids.tolist(), nothing.carry.group_ids.tolist()) == ([4], [-1])
