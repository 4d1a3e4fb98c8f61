"""Taking a data set's dict apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.data.batch import BATCH_EXTRAS, accepted_inputs, take_apart
from trainer.errors import UserError
from trainer.extensions.noise_components import halves


def batch(**more):
    carry = {"group_ids": np.array([4, 5]), "cell_index": np.array([0, 3]), "is_last": np.array([False, True])}
    return {"tokens": torch.zeros(2, 3), "targets": torch.ones(2, 3, dtype=torch.long), **carry, **more}


def test_extras_and_bookkeeping_never_reach_the_model():
    given = batch(**dict.fromkeys(BATCH_EXTRAS, 3))
    micro = take_apart(given, frozenset({"tokens"}))
    assert micro.inputs.keys() == {"tokens"}
    assert micro.extras == dict.fromkeys(BATCH_EXTRAS, 3)
    assert micro.carry.is_last.tolist() == [False, True]
    assert "tokens" in given  # the data set's dict is not changed


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
    assert (copy.carry.group_ids.tolist(), len(copy.carry.cell_index)) == ([-1], 1)
    assert len(copy.inputs["tokens"]) == len(copy.extras["dataset_labels"]) == 1
    assert len(copy.inputs["noise"]) == 5  # what has no entry for each row is shared


def test_the_model_s_own_signature_says_what_it_takes():
    model = torch.nn.Module()
    model.forward = lambda tokens, state=None, resets=None: tokens
    assert accepted_inputs(model) == {"tokens", "resets"}
    model.forward = lambda **inputs: inputs
    assert accepted_inputs(model) is None


def test_halves_have_all_rows_in_order_with_their_groups_and_extras():
    more = {"dataset_labels": ["x", "y"], "token_types": torch.tensor([[1] * 3, [2] * 3])}
    micro = take_apart(batch(**more, temperature=0.5, noise=torch.zeros(5)), None)
    first, second = halves(micro)
    assert [half.targets.tolist() for half in (first, second)] == [[row] for row in micro.targets.tolist()]
    assert (second.carry.group_ids.tolist(), second.carry.is_last.tolist()) == ([5], [True])
    assert (first.extras["dataset_labels"], second.extras["dataset_labels"]) == (["x"], ["y"])
    assert second.extras["token_types"].tolist() == [[2] * 3]
    # What has no entry for each row is shared.
    assert second.inputs["temperature"] == 0.5
    assert len(second.inputs["noise"]) == 5


def test_a_single_row_is_followed_by_a_masked_one():
    """Ranks that exchange states must do it equally often."""
    whole, nothing = halves(take_apart({key: value[:1] for key, value in batch().items()}, None))
    assert (whole.targets.tolist(), nothing.targets.tolist()) == ([[1, 1, 1]], [[-100] * 3])
    assert (whole.carry.group_ids.tolist(), nothing.carry.group_ids.tolist()) == ([4], [-1])
