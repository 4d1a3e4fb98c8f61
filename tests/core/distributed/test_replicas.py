"""Replicas are compared by digests: any bit changes them, and ranks whose weights differ end the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ranks import status
from tests.support.runs import train, write_tiny_config
from trainer.training.core_extensions import Replicas, bit_sum

pytestmark = pytest.mark.distributed
OWN = """
import torch
from trainer.training.extension import Extension

class Flip(Extension):
    '''Changes one weight by one bit on one rank, after one step.'''

    def __init__(self, run, *, rank, step):
        super().__init__(run)
        self.rank, self.step = rank, step

    def settled(self, step, sums):
        if step.number == self.step and self.run.info.rank == self.rank:
            weight = next(self.run.model.parameters()).data.view(-1).view(torch.int32)
            weight[5] ^= 1
"""


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64]),
    data=st.data(),
)
def test_any_bit_and_the_order_change_a_digest(sizes, dtype, data):
    tensors = [(torch.randn(size) * 9).to(dtype) for size in sizes]
    model, info = SimpleNamespace(parameters=lambda: tensors), SimpleNamespace(rank=0, world_size=1)
    replicas = Replicas(SimpleNamespace(model=model, info=info, first_step=0))  # of frozen weights
    before, compared = bit_sum(tensors), replicas.updated()
    changed = tensors[data.draw(st.integers(0, len(sizes) - 1))].view(torch.uint8)
    place, bit = data.draw(st.integers(0, len(changed) - 1)), data.draw(st.integers(0, 7))
    changed[place] ^= 1 << bit
    assert replicas.updated() != compared
    changed[place] ^= 1 << bit
    assert bit_sum(tensors) == before
    assert bit_sum([torch.cat([tensor, tensor])[len(tensor) :] for tensor in tensors]) == before  # wherever they lie
    if len(tensors) > 1 and bit_sum(tensors[:1]) != bit_sum(tensors[1:2]):
        assert bit_sum([tensors[1], tensors[0], *tensors[2:]]) != before


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("replicas")
    (folder / "flips.py").write_text(OWN)
    return write_tiny_config(folder)


@pytest.mark.parametrize("step", [3, 5])
def test_a_weight_of_one_rank_that_changes_by_one_bit_ends_the_run_with_the_rank(config, tmp_path, step):
    own = f'extension=[{{target="flips:Flip", args={{rank=1, step={step}}}}}]'
    sets = (own, "train.steps=6", "metrics.log_interval=2", "checkpoint.every=2")
    said = train(config, tmp_path / "run", *sets, nproc=3, code=1, cwd=config.parent)
    found = "the weights of rank 1 are not those of rank 0; they agreed after step "
    assert found + ("2" if step == 3 else "4") in said
    assert status(tmp_path / "run")["state"] == "failed"
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert saved == [f"step_{number:08d}" for number in range(2, step, 2)]  # none of weights that differ
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert '"replicas_differ"' in events
    if step == 3:
        train(config, tmp_path / "off", *sets, "metrics.compare_replicas=false", nproc=2, cwd=config.parent)


def test_shards_of_one_model_are_no_replicas(config, tmp_path):
    train(config, tmp_path / "run", "distributed.strategy=fsdp", "train.steps=3", nproc=2)
