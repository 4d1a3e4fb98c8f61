"""`distributed.context`: ranks that share each row compute what one rank computes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.test_data_shards import differences, resumed, weight_difference
from tests.support.gloo import run_on_ranks
from tests.support.in_process import program
from tests.support.models import recurrent64
from tests.support.runs import overrides, read_rows, train, write_tiny_config
from trainer.config.load import load_config
from trainer.config.rules import check_sharding
from trainer.distributed.context import Context
from trainer.distributed.env import RankInfo
from trainer.tools.memory import predict_memory
from trainer.training.setup.plan import make_plan

pytestmark = pytest.mark.distributed

EXTRA = """
[eval]
every = 4
batches = 2
depth = false
holdout_fraction = 0.2

[checkpoint]
every = 4
"""
SETS = (
    "train.steps=8",
    "ledger.probe_every=0",
    "data.seq_len=19",  # parts of 4 and 5
    "data.mixing.batch_size=2",
    "model.target=tests.support.models:recurrent64",
    "model.contract=false",
    "metrics.per_source=true",
)
DELTA = "model.args={family='gated_delta', heads=2}"
ENDING = ("data.mixing.repeat=false", "data.mixing.pick_mode=round_robin", "data.mixing.batch_size=4")
# The ranks without groups, and the sizes of groups.
CASES: Mapping[str, tuple[tuple[str, ...], int, tuple[int, ...]]] = {
    "rglru": (("data.pack=true", "train.activation_checkpointing=block"), 1, (2, 4)),
    "gated_delta": ((DELTA, "data.pack=true", "train.micro_batches=3"), 1, (2,)),
    "two groups": ((DELTA, "distributed.shards=4", "objective.chunk_tokens=7", "train.micro_batches=1"), 2, (2,)),
    "without noise scale": (("gns.enabled=false",), 2, (2,)),
    "exhausted": ((*ENDING, "train.micro_batches=8", "train.steps=99"), 1, (2,)),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return write_tiny_config(tmp_path_factory.mktemp("context"), EXTRA)


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_share_rows_compute_the_same_as_one(config, tmp_path, case):
    extra, readers, sizes = CASES[case]
    sets = (*SETS, *extra)
    train(config, tmp_path / "1", *sets, nproc=readers)
    for size in sizes:
        train(config, tmp_path / str(size), *sets, f"distributed.context={size}", nproc=size * readers)
        assert differences(tmp_path / "1", tmp_path / str(size)) == []
        assert weight_difference(tmp_path / "1", tmp_path / str(size)) < 1e-12
        assert consistency(tmp_path / str(size)) == pytest.approx(consistency(tmp_path / "1"), rel=1e-9)


def consistency(run_dir: Path) -> list[float]:
    rows = read_rows(run_dir / "metrics.jsonl").values()
    return [row["gns/consistency"] for row in rows if "gns/consistency" in row]


def test_a_row_of_several_cells_is_shared_as_one(config, tmp_path):
    """A float64 model in pieces would hand states on in the ledger's float32: the row of one rank is a longer cell."""
    common = (*SETS, DELTA, "eval.every=0", "data.pack=true")
    train(config, tmp_path / "1", *common, "data.seq_len=38", "data.max_group_cells=4")
    cells = ("train.tbptt_cells=2", "distributed.context=2")
    train(config, tmp_path / "2", *common, *cells, nproc=2)
    assert differences(tmp_path / "1", tmp_path / "2") == []


def test_a_skipped_step_and_a_resume_with_other_groups_change_nothing(config, tmp_path):
    spoiled = "model.args={bad_forward=5}"
    sets = (*SETS, spoiled, "train.on_non_finite=skip", "metrics.log_interval=3")
    train(config, tmp_path / "1", *sets)
    train(config, tmp_path / "2", *sets, "distributed.context=2", nproc=2)
    assert differences(tmp_path / "1", tmp_path / "2") == []
    assert read_rows(tmp_path / "2" / "metrics.jsonl")["train", 3]["non_finite_steps"] == 1
    # Counted anew, the spoiled forward is another one.
    for name, origin, size in (("1 to 1", "1", 1), ("2 to 4", "2", 4), ("2 to 1", "2", 1), ("1 to 2", "1", 2)):
        said = resumed(config, tmp_path / name, tmp_path / origin, 4, *sets, f"distributed.context={size}", ranks=size)
        assert "saved with" not in said
        assert weight_difference(tmp_path / "1 to 1", tmp_path / name) < 1e-12
        assert differences(tmp_path / "1 to 1", tmp_path / name, after=4) == []


class Counted:
    """Bytes of each collective that `torch.distributed` is asked for."""

    def __init__(self) -> None:
        self.gathered: list[int] = []
        self.reduced: list[int] = []
        gather, reduce = dist.all_gather, dist.all_reduce

        def all_gather(found: list[Tensor], own: Tensor, group: dist.ProcessGroup) -> None:
            self.gathered.append(own.nbytes)
            gather(found, own, group=group)

        def all_reduce(own: Tensor, group: dist.ProcessGroup) -> None:
            self.reduced.append(own.nbytes)
            reduce(own, group=group)

        dist.all_gather, dist.all_reduce = all_gather, all_reduce  # the process is this test's own


def rows_on_ranks(rank: int, world: int, family: str, layers: int) -> dict[str, int]:
    """Rows with resets everywhere, of many lengths: shared and whole they give the same. What one of them sends."""
    group = dist.group.WORLD
    assert group is not None
    context = Context(group, rank, world, sums_gradients=True)
    counted, rows, generator = Counted(), 3, torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = recurrent64(11, 8, layers, family)
    for length in (4 * world, 4 * world + 1, 9 * world - 1, 150):
        tokens = torch.randint(11, (rows, length), generator=generator)
        state = torch.randn(rows, model.state_width, generator=generator, dtype=torch.float64)
        weights = torch.randn(rows, length, 11, generator=generator, dtype=torch.float64)
        for density in (None, 0.0, 0.02, 0.3, 1.0):
            resets = None if density is None else torch.rand(rows, length, generator=generator) < density
            whole = model(tokens=tokens, state=state, resets=resets)
            expected = torch.autograd.grad((whole.logits * weights).sum(), list(model.parameters()))
            part = slice(length * rank // world, length * (rank + 1) // world)
            own = None if resets is None else resets[:, part]
            found = model(tokens=tokens[:, part], state=state, resets=own, context_group=context)
            torch.testing.assert_close(found.logits, whole.logits[:, part], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found.state, whole.state, rtol=1e-12, atol=1e-12)
            counted.gathered.clear()
            gradients = torch.autograd.grad((found.logits * weights[:, part]).sum(), list(model.parameters()))
            backward = counted.gathered[:]
            for one, other in zip(gradients, expected, strict=True):
                dist.all_reduce(one, group=group)
                torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    counted.gathered.clear()
    model(tokens=tokens[:, part], state=state, resets=own, context_group=context)
    forward = counted.gathered[:]
    context.sum_gradients(model)
    counted.reduced.clear()
    model(tokens=tokens[:, part], state=state, resets=own, context_group=context).logits.sum().backward()
    # In numbers, per row and number of the state; per parameter.
    per_row, size = rows * model.state_width * 8, sum(p.numel() for p in model.parameters())
    return {
        "forward": len(forward),
        "backward": len(backward),
        "forward numbers": sum(forward) / per_row,
        "backward numbers": sum(backward) / per_row,
        "gradients": sum(counted.reduced) / size / 8,
        "tensors": len(counted.reduced) / len(list(model.parameters())),
    }


@pytest.mark.parametrize(("family", "exchanges"), [("rglru", 1), ("gated_delta", 2)])
def test_any_cut_of_any_rows_is_exact_and_what_is_sent_follows_the_formula(family, exchanges):
    layers = 2
    for found in run_on_ranks(rows_on_ranks, 3, family, layers):
        assert found == {
            "forward": layers * exchanges,
            "backward": layers * exchanges,
            "forward numbers": 2,
            "backward numbers": 1,
            "gradients": 1,
            "tensors": 1,
        }


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (("distributed.context=3",), "distributed.context: groups of 3 ranks cannot be made of 4 ranks"),
        (("distributed.shards=3",), "distributed.shards: 3 data shards cannot be divided among 2 groups"),
        (("data.seq_len=7",), "distributed.context: cuts a row of 7 tokens (data.seq_len) into 2 parts"),
        (
            ("distributed.strategy=fsdp",),
            "distributed.strategy: does not go with distributed.context, whose ranks hold the whole model",
        ),
        (("train.compile=true",), "train.compile: does not go with distributed.context, since a compiled"),
        (
            ("ledger.probe_every=8", "eval.depth=true"),
            "eval.depth: does not go with distributed.context, since each rank has a part",
        ),
        (("model.family=transformer",), "distributed.context: Transformer.forward takes no context_group"),
        (("model.family=gru",), "distributed.context: TorchRnn.forward takes no context_group"),
        (("model.target=tests.support.models:dropout",), "distributed.context: DropoutModel.forward takes no"),
    ],
)
def test_what_cannot_share_rows_is_refused(config, capsys, sets, said):
    done = program(["check", "--config", config, "--nproc", 4, *overrides("distributed.context=2", *sets)], capsys)
    assert done.returncode == 2
    assert said in done.stderr


def test_the_launcher_refuses_no_default(config):
    check_sharding(load_config(config, ["distributed.context=2"]), 2)


def test_the_predicted_memory_is_that_of_a_part(config):
    sets = ["data.seq_len=512", "data.mixing.batch_size_by_modality={}", "train.micro_batches=2"]
    activations = []
    for size in (1, 2, 4):
        memory = predict_memory(make_plan(load_config(config, [*sets, f"distributed.context={size}"]), config, 4))
        activations.append(memory.peak - sum(memory.parts().values()))
    assert activations[1] < 0.6 * activations[0]
    assert activations[2] < 0.35 * activations[0]


def test_ranks_read_by_groups():
    ranks = [RankInfo(rank, rank, 6, context=3) for rank in range(6)]
    assert [each.reader.rank for each in ranks] == [0, 0, 0, 1, 1, 1]
    assert [[shard.rank for shard in each.data_shards(4)] for each in ranks] == [[0, 1]] * 3 + [[2, 3]] * 3
