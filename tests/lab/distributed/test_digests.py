"""Digests of logged steps: any bit changes them, equal runs have equal ones, and ranks whose weights differ end the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.grouped import train
from tests.support.ranks import status
from tests.support.runs import write_tiny_config
from trainer.training.step.core_extensions import bit_sum

pytestmark = pytest.mark.distributed
OWN = """
import torch
from trainer.training.extension import Extension

class Flip(Extension):
    '''Changes one weight by one bit on one rank, after one step.'''

    def __init__(self, run, *, rank, step):
        super().__init__(run)
        self.rank, self.step = rank, step

    def step_launched(self, step):
        if step == self.step and self.run.info.rank == self.rank:
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
    before = bit_sum(tensors)
    changed = tensors[data.draw(st.integers(0, len(sizes) - 1))].view(torch.uint8)
    place, bit = data.draw(st.integers(0, len(changed) - 1)), data.draw(st.integers(0, 7))
    changed[place] ^= 1 << bit
    low = 2**22 - 1  # what ranks compare
    assert (bit_sum(tensors) & low) != (before & low)
    changed[place] ^= 1 << bit
    assert bit_sum(tensors) == before
    assert bit_sum([torch.cat([tensor, tensor])[len(tensor) :] for tensor in tensors]) == before  # wherever they lie
    if len(tensors) > 1 and bit_sum(tensors[:1]) != bit_sum(tensors[1:2]):
        assert bit_sum([tensors[1], tensors[0], *tensors[2:]]) != before


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("digests")
    (folder / "flips.py").write_text(OWN)
    return write_tiny_config(folder)


def digests(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "digests.jsonl").read_text().splitlines()]


def test_equal_runs_have_equal_digests_and_others_differ_where_they_do(config, tmp_path):
    sets = ("metrics.digests=write", "train.steps=5", "metrics.log_interval=2")
    for name, more in (("a", ()), ("b", ()), ("lr", ("optimizer.lr=0.002",)), ("seed", ("run.seed=8",))):
        train(config, tmp_path / name, *sets, *more, nproc=2)
    a, b, lr, seed = (digests(tmp_path / name) for name in ("a", "b", "lr", "seed"))
    assert a == b
    assert [each["global_step"] for each in a] == [1, 2, 4, 5]
    first = {kind for kind in a[0] if a[0][kind] != lr[0][kind]}
    assert first == {"weights"}  # the first step's batch, states and gradient are the same
    assert {"batch", "gradient", "weights"} <= {kind for kind in a[0] if a[0][kind] != seed[0][kind]}


@pytest.mark.parametrize("step", [3, 5])
def test_a_weight_of_one_rank_that_changes_by_one_bit_ends_the_run_with_the_rank(config, tmp_path, step):
    own = f'extension=[{{target="flips:Flip", args={{rank=1, step={step}}}}}]'
    sets = (own, "train.steps=6", "metrics.log_interval=2", "checkpoint.every=2")
    said = train(config, tmp_path / "run", *sets, nproc=3, code=1, cwd=config.parent)
    found = "the weights of rank 1 are not those of most ranks; they agreed after step "
    assert found + ("2" if step == 3 else "4") in said
    assert status(tmp_path / "run")["state"] == "failed"
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert saved == [f"step_{number:08d}" for number in range(2, step, 2)]  # none of weights that differ
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert '"replicas_differ"' in events
    if step == 3:
        train(config, tmp_path / "off", own, "train.steps=6", "metrics.digests=off", nproc=2, cwd=config.parent)


def test_shards_of_one_model_are_no_replicas(config, tmp_path):
    train(config, tmp_path / "run", "distributed.strategy=fsdp", "metrics.digests=write", "train.steps=3", nproc=2)
    assert len(digests(tmp_path / "run")) == 3
