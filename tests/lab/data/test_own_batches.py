"""Data sets of the user's own: batches taken apart, that outlive the next one, states that stand still, mistakes in a line."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch

from tests.support.in_process import plan_of
from tests.support.runs import write_tiny_config
from trainer.data.blend import BlendDataset, BlendSource
from trainer.data.loader import Loader, take_apart
from trainer.data.weights import ConstantWeight
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.lab.own_batches import OF_ROWS, OF_TARGETS, OwnBatches
from trainer.tools.read_step import Origin, read_step
from trainer.training.build import make_blend
from trainer.training.evaluator import eval_sets


class OneBuffer:
    """Fills the same arrays, and the same dict, for each batch, and counts in the object that it gives as its state."""

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


def loaded(dataset):
    own = OwnBatches(dataset, vocab_size=256, key="own")
    blend = BlendDataset([BlendSource("own", own, ConstantWeight(1.0))], seed=0)
    with closing(Loader(blend, device="cpu", prefetch=5)) as loader:
        return list(loader)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_batches_and_states_survive_what_is_read_ahead_of_a_data_set_with_one_buffer(kind):
    batches = loaded(OneBuffer(kind))
    assert [int(each.inputs["tokens"][0, 0]) for each in batches] == list(range(20))
    assert [each.state["sources"][0]["next"] for each in batches] == list(range(1, 21))
    assert not hasattr(OwnBatches([], vocab_size=256, key="own"), "state_dict")
    with pytest.raises(UserError, match=r"own: has a state_dict\(\) that fails: TypeError"):
        OwnBatches(OneBuffer, vocab_size=256, key="own").state_dict()


def good(**changed):
    tokens = np.arange(6).reshape(2, 3)
    groups = {"group_ids": np.array([5, -1]), "cell_index": np.zeros(2, int), "is_last": np.zeros(2, bool)}
    return {"tokens": tokens, "targets": tokens, **groups, **changed}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (None, "is a NoneType, not a dict"),
        *((bad, "no targets, or a state; it has ") for bad in ({"tokens": np.zeros((2, 3), int)}, good(state=[1.0]))),
        *((good(targets=flat), r"targets \[6\]") for flat in (np.arange(6), np.ones(6))),
        (good(tokens=np.zeros((3, 3), int)), r"tokens \[3, 3\] of int64; give integers \[2, 3\]"),
        (good(targets=np.zeros((0, 3), int)), "at least one row"),
        (good(targets=np.full((2, 3), "a")), "targets that are no integers or floats"),
        *((good(**{key: np.full((2, 3), 0.5)}), rf"has {key} \[2, 3\] of float") for key in OF_TARGETS),
        *((good(**{key: ["a", "b"]}), rf"has {key} \[2\] of <U1; give integers \[2\]") for key in OF_ROWS),
        (good(segment_ids=np.full((2, 3), 6)), "segment_ids up to 6; number its segments from 0 on"),
        (good(targets=np.full((2, 3), -1)), "target id -1, .*not to be predicted with -100"),
        (good(tokens=np.full((2, 3), 257)), "id 257, and the vocabulary has 0 to 256; set data.tokenizer"),
        (good(targets=np.full((2, 3), 256)), "target id 256, and the vocabulary has 0 to 255"),
        (good(cell_index=None), r"has cell_index \[\] of NoneType"),
        (good(cell_index=[[1, 2, 3], [4]]), "has a batch that cannot be read, number 1 of this start: ValueError"),
        (good(group_ids=np.array([5, -2])), "has -2 in group_ids"),
        (good(group_ids=np.array([5, 2**63], np.uint64)), "has 9223372036854775808 in group_ids"),
        (good(group_ids=torch.tensor([5, 5])), "the group 5 twice"),
        (good(end_ids=[7, 8]), "has only one of end_ids and end_cell_index"),
        (good(end_ids=[7, 8], end_cell_index=[0]), r"has end_cell_index \[1\]"),
        (good(end_ids=np.array([7, 7]), end_cell_index=[0, 0]), "the group 7 twice"),
    ],
)
def test_a_batch_that_cannot_be_meant_is_refused(batch, message):
    with pytest.raises(UserError, match=message) as caught:
        next(iter(OwnBatches([batch], vocab_size=257, num_targets=256, key="source own: my:data")))
    assert caught.value.message.startswith("source own: my:data")


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy, np.ndarray.tolist])
def test_arrays_tensors_and_lists_are_accepted_and_unsigned_ids_are_widened(kind):
    small = np.arange(6, dtype=np.uint16).reshape(2, 3)
    batch = next(iter(OwnBatches([good(tokens=kind(small), targets=kind(small))], vocab_size=256, key="own")))
    assert torch.as_tensor(batch["tokens"]).dtype == torch.as_tensor(batch["targets"]).dtype == torch.int64
    assert np.asarray(batch["tokens"]).tolist() == small.tolist()
    audio = good(tokens=np.full((2, 3, 4), -7.5))  # not ids
    assert next(iter(OwnBatches([audio], vocab_size=256, key="own")))["tokens"].min() == -7.5
    assert next(iter(OwnBatches([good(targets=[[-100] * 3] * 2)], vocab_size=256, key="own")))["targets"].max() == -100


class OfFeatures(torch.nn.Linear):
    def __init__(self):
        super().__init__(1, 1)

    def forward(self, features, scale=None, state=None):
        return features


def test_what_a_model_takes_arrives_as_tensors_and_what_it_needs_must_be_there():
    numbers = {"targets": np.full((2, 3, 4), np.nan), "group_ids": np.array([5, 6]), "note": ["a", "b"]}
    numbers |= {"features": np.ones((2, 3, 4)).tolist(), "scale": np.ones(2, np.uint8), "resets": np.ones((2, 3), bool)}
    missing = [{key: value for key, value in numbers.items() if key != "features"}]
    how = {"vocab_size": 256, "key": "own"}
    given = next(iter(OwnBatches([numbers], **how)))
    types = {key: value.dtype for key, value in given.items() if isinstance(value, torch.Tensor)}
    assert types == {"targets": torch.float32, "features": torch.float32, "scale": torch.int64, "resets": torch.bool}
    assert given["note"] == ["a", "b"]
    del numbers["note"], numbers["resets"]
    assert len(list(OwnBatches([numbers], model=OfFeatures(), **how))) == 1
    for wrong, problem in (
        (missing[0], "missing a required argument: 'features'"),
        ({**numbers, "odd": 1}, "got an unexpected keyword argument 'odd'"),
    ):
        wrong = {key: value for key, value in wrong.items() if key not in ("note", "resets")}
        message = f"own: cannot call the model with state, .*: {problem}; change the batches"
        with pytest.raises(UserError, match=message):
            list(OwnBatches([numbers, wrong], model=OfFeatures(), **how))


def odd(**_):
    return [good(dataset_labels=["one"], instability_meta_json='{"rows": [["a"]], "cell_indices": [1]}')]


def test_whatever_a_data_set_says_its_rows_have_its_name_and_a_model_that_it_does_not_fit_is_refused(tmp_path):
    own = f"target='{__name__}:odd'"
    sources = f"data.source=[{{name='s', {own}}}]", f"eval={{every=9, source=[{{name='v', {own}}}]}}"
    plan = plan_of(write_tiny_config(tmp_path), *sources)
    rows = read_step(Origin(plan, 0, [make_blend(plan, RankInfo())]), 1, with_text=True)
    assert [(row["tokens"], row["source"], row["documents"]) for row in rows] == [(3, "s", None)] * 2
    with pytest.raises(UserError, match=r"eval source v: .*:odd: cannot call the model with state, tokens"):
        eval_sets(plan, RankInfo(), torch.device("cpu"), OfFeatures())


def batch(**more):
    carry = {"group_ids": np.array([4, 5]), "cell_index": np.array([0, 3]), "is_last": np.array([False, True])}
    return {"tokens": torch.zeros(2, 3), "targets": torch.ones(2, 3, dtype=torch.long), **carry, **more}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"tokens": 1, "targets": 1, "group_ids": 1},
            "has no cell_index, is_last, but others of group_ids, cell_index",
        ),
        (batch(odd=1), "batch key odd: neither an input of the model .* tokens, dataset_labels, .*; accept it"),
        (batch(token_type=1), "batch key token_type: neither .*; did you mean token_types?"),
    ],
)
def test_an_incomplete_or_unknown_batch_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        take_apart(given, frozenset({"tokens"}))


def test_a_masked_copy_has_nothing_to_predict_and_no_groups():
    copy = take_apart(batch(scale=torch.tensor(0.5)), None).masked()
    assert copy.is_filler
    assert copy.targets.tolist() == [[-100] * 3] * 2
    assert (copy.carry.group_ids.tolist(), copy.carry.cell_index.tolist()) == ([-1, -1], [0, 0])
    assert copy.inputs["tokens"].shape == (2, 3)


def cells(groups, cell, is_last=False, **more):
    count = len(groups)
    given = {"group_ids": groups, "cell_index": [cell] * count, "is_last": [is_last] * count}
    return {**{name: np.zeros((count, 3), np.int64) for name in ("tokens", "targets")}, **given, **more}


def test_a_group_that_does_not_continue_where_it_was_left_is_refused():
    begun = [cells([4, 7], 0), cells([-1, 4], 1), cells([7], 1, is_last=True)]
    assert len(list(OwnBatches([*begun, cells([4], 2), cells([7], 0)], vocab_size=256, key="own"))) == 5
    ended = cells([4], 2, end_ids=np.array([8]), end_cell_index=np.array([0]))
    for batches, message in (
        ([*begun, cells([4, 9], 2)], "a batch continues group 9 at cell 2; next here is cell 0; keep"),
        ([*begun, cells([4], 3)], "continues group 4 at cell 3; next here is cell 2; keep"),
        ([*begun, cells([4], 2), cells([4], 2)], "continues group 4 at cell 2; next here is cell 3; keep"),
        # Group 8 continues behind the row in which group 4 ended.
        ([*begun, ended, cells([8], 1), cells([4], 3)], "group 4"),
        ([*begun, ended, cells([8], 1), cells([8], 3)], "group 8 at cell 3; next here is cell 2"),
    ):
        own = iter(OwnBatches(batches, vocab_size=256, key="own"))
        for _ in batches[:-1]:
            next(own)
        with pytest.raises(UserError, match=message):
            next(own)


def test_after_a_resume_no_group_is_taken_for_moved():
    """Which groups had begun, and on which rank, is not known then."""

    class Source(list):
        def load_state_dict(self, state):
            self.append(cells([4, 5], state))

    own = OwnBatches(Source([cells([4], 3)]), vocab_size=256, key="own")
    assert hasattr(own, "load_state_dict")
    with pytest.raises(UserError, match="continues group 4"):
        next(iter(own))
    own.load_state_dict(3)
    assert [batch["group_ids"] for batch in own] == [[4], [4, 5]]
