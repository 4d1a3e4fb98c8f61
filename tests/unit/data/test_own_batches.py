"""Data sets of the user's own: batches that outlive the next one, states that stand still, and mistakes in one line."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.data.blend import BlendDataset, BlendSource
from trainer.data.loader import Loader
from trainer.data.own_batches import OwnBatches
from trainer.data.weights import ConstantWeight
from trainer.errors import UserError


class OneBuffer:
    """Fills the same arrays, and the same dict, for each batch, and counts in the object that it gives as its state."""

    metric_keys = ("my/thing",)

    def __init__(self, kind=np.asarray):
        self.state = {"next": 0}
        self.batch = {key: kind(np.zeros((2, 3), np.int64)) for key in ("tokens", "targets")}

    def __iter__(self):
        while self.state["next"] < 20:
            for array in self.batch.values():
                array[:] = self.state["next"]
            self.state["next"] += 1
            yield self.batch

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = dict(state)

    def drain_step_metrics(self):
        return {"my/thing": 1.0}


def loaded(dataset):
    own = OwnBatches(dataset, vocab_size=256, key="own")
    blend = BlendDataset([BlendSource("own", own, ConstantWeight(1.0))], seed=0)
    with Loader(blend, device="cpu", prefetch=5) as loader:
        return list(loader)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_batches_and_states_survive_what_is_read_ahead_of_a_data_set_with_one_buffer(kind):
    batches = loaded(OneBuffer(kind))
    assert [int(each.inputs["tokens"][0, 0]) for each in batches] == list(range(20))
    assert [each.state["sources"][0]["next"] for each in batches] == list(range(1, 21))


def test_what_a_data_set_offers_beside_its_batches_is_its_own():
    own, plain = (OwnBatches(each, vocab_size=256, key="own") for each in (OneBuffer(), []))
    assert own.metric_keys == ("my/thing",)
    assert own.drain_step_metrics() == {"my/thing": 1.0}
    own.load_state_dict({"next": 7})
    assert own.state_dict() == {"next": 7}
    assert not hasattr(plain, "state_dict")
    assert not hasattr(plain, "metric_keys")


def good(**changed):
    tokens = np.arange(6).reshape(2, 3)
    groups = {"group_ids": np.array([5, -1]), "cell_index": np.zeros(2, int), "is_last": np.zeros(2, bool)}
    return {"tokens": tokens, "targets": tokens, **groups, **changed}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (None, "is a NoneType, not a dict"),
        ({"targets": np.zeros((2, 3), int)}, "no tokens; it has targets"),
        (good(targets=np.arange(6)), r"targets \[6\]"),
        (good(tokens=np.zeros((3, 3), int)), r"tokens \[3, 3\] and targets \[2, 3\]"),
        (good(targets=np.zeros((0, 3), int)), "at least one row"),
        (good(targets=np.zeros((2, 3))), "targets of type float64"),
        (good(targets=np.full((2, 3), -1)), "target id -1, .*not to be predicted with -100"),
        (good(tokens=np.full((2, 3), 256)), "token id 256, and the vocabulary has 0 to 255"),
        (good(targets=torch.full((2, 3), 300)), "target id 300, and the vocabulary has 0 to 255"),
        (good(group_ids=np.array([5])), r"2 rows has group_ids \[1\]"),
        (good(group_ids=np.array([5, -2])), "group id -2"),
        (good(group_ids=np.array([5, 2**63], np.uint64)), "group id 9223372036854775808"),
        (good(group_ids=torch.tensor([5, 5])), "the group 5 twice"),
    ],
)
def test_a_batch_that_cannot_be_meant_is_refused(batch, message):
    with pytest.raises(UserError, match=message) as caught:
        next(iter(OwnBatches([batch], vocab_size=256, key="source own: my:data")))
    assert caught.value.message.startswith("source own: my:data")


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy, np.ndarray.tolist])
def test_arrays_tensors_and_lists_are_accepted_and_unsigned_ids_are_widened(kind):
    small = np.arange(6, dtype=np.uint16).reshape(2, 3)
    batch = next(iter(OwnBatches([good(tokens=kind(small), targets=kind(small))], vocab_size=256, key="own")))
    assert torch.as_tensor(batch["tokens"]).dtype == torch.as_tensor(batch["targets"]).dtype == torch.int64
    assert np.asarray(batch["tokens"]).tolist() == small.tolist()
    audio = good(tokens=np.full((2, 3, 4), -7.5))  # not ids
    assert next(iter(OwnBatches([audio], vocab_size=256, key="own")))["tokens"].min() == -7.5
    masked = good(targets=np.full((2, 3), -100))
    assert next(iter(OwnBatches([masked], vocab_size=256, key="own")))["targets"].tolist() == masked["targets"].tolist()
