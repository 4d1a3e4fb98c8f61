"""The loader: the same batches with and without a thread, states that count what was consumed, errors that arrive."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import numpy as np
import pytest
import torch

from trainer.data import groups
from trainer.data.blend import BlendDataset, BlendSource
from trainer.data.loader import Loader
from trainer.data.weights import ConstantWeight
from trainer.on_device import copied_together

LAYOUT = {"a": [[40, 9, 3], [30, 30]], "b": [[8] * 9]}


class Counting:
    """Batches 0, 1, 2, ...; raises at `fail`."""

    def __init__(self, size, fail=-1):
        self.made, self.size, self.fail = 0, size, fail
        self.drain_step_metrics, self.metric_keys = float, None  # no mapping, which costs the metrics

    def __iter__(self):
        while self.made < self.size:
            if self.made == self.fail:
                raise ValueError("broken stream")
            self.made += 1
            yield {"tokens": np.full((1, 2), self.made - 1), "targets": np.zeros((1, 2), np.int64), "name": "kept"}


@pytest.mark.parametrize("prefetch", [0, 3])
def test_batches_metrics_and_states_are_those_of_the_dataset(write_streams, mixing, prefetch):
    streams = write_streams(LAYOUT)
    plain = mixing(streams)
    with closing(Loader(mixing(streams), device="cpu", prefetch=prefetch)) as loader:
        for loaded in (next(loader) for _ in range(25)):
            expected = next(plain)
            is_target = expected["targets"] != -100
            shares = {
                "stream_mixing/masked_share": float(not is_target.any()),
                "data/fill": (is_target.sum(), is_target.size),
            }
            assert loaded.metrics == plain.drain_step_metrics() | shares
            assert loaded.state == plain.state_dict()
            carry = {key: value for key, value in vars(loaded.carry).items() if value is not None}
            found = loaded.inputs | loaded.extras | carry | {"targets": loaded.targets}
            assert found.keys() == expected.keys()
            for key in ("tokens", "targets", "token_types"):
                assert isinstance(found[key], torch.Tensor)
                assert (found[key].numpy() == expected[key]).all()
            assert isinstance(found["group_ids"], np.ndarray)
            assert found["dataset_labels"] == expected["dataset_labels"]


def test_what_is_copied_together_stays_what_it_was():
    made = {"a": torch.arange(7), "b": torch.zeros(0, 3), "c": torch.eye(3) > 0, "d": torch.rand(2, 5).t()}
    found = copied_together(made, torch.device("cpu"))
    torch.testing.assert_close(found, made, rtol=0, atol=0)
    assert len({each.untyped_storage().data_ptr() for each in found.values()}) == 1


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_dataset_may_be_any_iterable_and_its_end_is_the_loaders(prefetch):
    loader = Loader(Counting(5), device="cpu", prefetch=prefetch)
    loaded = list(loader)
    assert [int(each.inputs["tokens"][0, 0]) for each in loaded] == [0, 1, 2, 3, 4]
    assert all(each.state is None and len(each.metrics) == 2 and each.inputs["name"] == "kept" for each in loaded)
    with pytest.raises(StopIteration):
        next(loader)
    loader.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_arrives_after_the_batches_before_it_and_stays(prefetch):
    with closing(Loader(Counting(5, fail=3), device="cpu", prefetch=prefetch)) as loader:
        assert [int(next(loader).inputs["tokens"][0, 0]) for _ in range(3)] == [0, 1, 2]
        for _ in range(2 if prefetch else 1):
            with pytest.raises(ValueError, match="broken stream"):
                next(loader)


def test_closing_ends_the_thread_even_if_nobody_took_its_batches():
    before = threading.active_count()
    dataset = Counting(10**9)
    loader = Loader(dataset, device="cpu", prefetch=2)
    next(loader)
    deadline = time.monotonic() + 5
    while dataset.made < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert dataset.made <= 5  # two waiting, one in hand, one taken; the generator may be one further
    loader.close()
    loader.close()
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(loader)


def test_what_is_being_loaded_is_known_down_to_the_file_also_while_it_is_opened(write_streams, mixing, monkeypatch):
    opened: list[str] = []
    is_stuck, may_go_on = threading.Event(), threading.Event()
    load = groups.load_documents

    def stuck_at_the_third(path, *args):
        opened.append(str(path))
        if len(opened) == 3:
            is_stuck.set()
            may_go_on.wait(60)
        return load(path, *args)

    monkeypatch.setattr(groups, "load_documents", stuck_at_the_third)
    streams = write_streams({"a": [[9, 3]] * 5})
    blend = BlendDataset([BlendSource("first", mixing(streams, num_streams_mixed=2), ConstantWeight(1.0))], seed=0)
    assert blend.now_reading == ""
    with closing(Loader(blend, device="cpu", prefetch=8)) as loader:
        assert is_stuck.wait(60)
        number, _, where = loader.reading.partition(" from ")
        assert number.startswith("micro-batch ")
        assert where == f"source first: {opened[2]}"
        may_go_on.set()
        for _ in range(20):
            next(loader)
        assert loader.reading.partition(" from ")[0] != number


def test_closing_does_not_wait_for_a_read_that_never_ends(monkeypatch):
    monkeypatch.setattr("trainer.data.loader.CLOSE_SEC", 0.1)
    may_go_on = threading.Event()
    loader = Loader((may_go_on.wait(600) for _ in range(1)), device="cpu", prefetch=1)
    loader.close()
    may_go_on.set()
