"""Another order of the data: a real data set, begun from a rewritten state."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from tests.support.runs import make_corpus
from tests.support.streams import mixing_dataset
from trainer.data.blend import BlendDataset, BlendSource
from trainer.data.layout import discover_nested
from trainer.data.tokenizer import load_tokenizer
from trainer.data.weights import ConstantWeight
from trainer.tools.branching.study import reordered


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus") / "c")


def blend(corpus, *, rank=0, world_size=1, repeat=True, batching_mode="device_per_stream"):
    def source(modality):
        dataset = mixing_dataset(
            discover_nested(str(corpus), [modality]),
            name=f"source-{modality}",
            tokenizer=load_tokenizer("bytes"),
            seq_len=16,
            num_streams_mixed=2,
            batching_mode=batching_mode,
            batch_size=2,
            max_group_cells=4,
            repeat=repeat,
            seed=7,
            rank=rank,
            world_size=world_size,
        )
        return BlendSource(f"source-{modality}", dataset, ConstantWeight(1.0))

    return BlendDataset([source("a"), source("b")], seed=7)


def read(dataset, number):
    batches = islice(dataset, number)
    return [[(int(g), int(c)) for g, c in zip(b["group_ids"], b["cell_index"], strict=True)] for b in batches]


def continued(corpus, state, order, **options):
    dataset = blend(corpus, **options)
    dataset.load_state_dict(reordered(state, order) if order else state)
    return dataset


def test_each_order_differs_and_repeats_itself(corpus):
    before = blend(corpus)
    read(before, 9)
    state = before.state_dict()
    orders = [read(continued(corpus, state, order), 40) for order in (0, 1, 2)]
    assert orders[0] == read(before, 40)
    assert orders[1] != orders[0]
    assert orders[1] != orders[2]
    assert orders[1] == read(continued(corpus, state, 1), 40)
    for number, saved in enumerate(state["sources"]):
        epochs = [reordered(state, order)["sources"][number]["epoch"] for order in (1, 2)]
        assert len({saved["epoch"], *epochs}) == 3  # other streams first, not only other picks
        assert min(epochs) > 10**6  # which the run itself never reads


def test_an_order_begins_every_group_it_reads(corpus):
    """No row continues a group that the ledger has the state of, or that nobody has begun."""
    before = blend(corpus)
    read(before, 9)
    begun = set()
    for batch in read(continued(corpus, before.state_dict(), 1), 60):
        for group, cell in batch:
            assert group < 0 or cell == 0 or (group, cell - 1) in begun
            begun.add((group, cell))


@pytest.mark.parametrize("mode", ["per_stream", "device_per_stream"])
def test_the_ranks_read_an_epoch_of_an_order_once_between_them(corpus, mode):
    cells = []
    for rank in range(2):
        options = {"rank": rank, "world_size": 2, "repeat": False, "batching_mode": mode}
        before = blend(corpus, **options)
        read(before, 5)
        for batch in read(continued(corpus, before.state_dict(), 3, **options), 100_000):
            cells += [cell for cell in batch if cell[0] >= 0]
    whole = [cell for batch in read(blend(corpus, repeat=False), 100_000) for cell in batch]
    assert len(set(cells)) == len(cells)
    # Groups have other ids in each epoch.
    sizes, expected = (sorted(Counter(group for group, _ in each).values()) for each in (cells, whole))
    assert sizes == expected
