"""FSDP2 on one device: a group of one rank (nccl on CUDA, gloo on the CPU), whose shards are the whole model.

`train` itself shards nothing for one rank, so the parts that it uses with more are put together here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.on_device import settings, synchronization_forbidden, train_here
from tests.support.runs import losses, write_tiny_config
from trainer.cli.parts import PARTS
from trainer.config.load import load_config
from trainer.config.schema import RunConfig
from trainer.distributed.env import RankInfo, pick_backend
from trainer.distributed.shards import Layout, is_dtensor, own_part
from trainer.distributed.strategy import Sharded
from trainer.training.main import run_loop
from trainer.training.setup import open_run as opening
from trainer.training.setup.parts import make_state
from trainer.training.setup.plan import make_plan

pytestmark = [pytest.mark.cuda, pytest.mark.distributed]
SETS = ("train.steps=8", "checkpoint.every=0", 'distributed.strategy="fsdp"')
ALONE = RankInfo()


@pytest.fixture(scope="module")
def group(device: torch.device) -> Iterator[None]:
    """A process group of this process alone."""
    backend = pick_backend(device)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()
    dist.destroy_process_group()


def train_sharded(path: Path, config: RunConfig, run_dir: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """Train with the model in shards; gives the weights."""
    plan = make_plan(config, path, 1, parts=PARTS)
    half = torch.bfloat16 if config.train.precision == "bf16" else None
    strategy = Sharded(Layout(1, 1), device=device, param_dtype=half)
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patched:
        patched.setattr(opening, "make_strategy", lambda *_: strategy)  # which a run of one rank has not
        run = opening.open_run(plan, opening.Launch(run_dir=str(run_dir)), ALONE, device, stack, stack)
        assert run is not None
        assert all(is_dtensor(parameter) for parameter in run.model.parameters())
        assert run_loop(run) == "all steps are done"
        return {name: own_part(parameter).detach().clone() for name, parameter in run.model.named_parameters()}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_sharded_run_trains_as_the_whole_model_does(tmp_path: Path, device: torch.device, precision: str) -> None:
    sets = (*SETS, f"train.precision={precision}")
    whole = losses(train_here(tmp_path, device, *sets) / "metrics.jsonl")
    path = write_tiny_config(tmp_path)
    config = load_config(path, settings(device, *sets))
    weights = train_sharded(path, config, tmp_path / "sharded", device)
    found = losses(tmp_path / "sharded" / "metrics.jsonl")
    # With bf16 a unit's inputs and parameters are rounded where autocast would round them, not always in the same places.
    assert found == pytest.approx(whole, rel=1e-5 if precision == "fp32" else 2e-2)
    assert all(weight.device.type == device.type and bool(weight.isfinite().all()) for weight in weights.values())


@pytest.mark.usefixtures("group")
def test_sharded_gradients_do_not_make_the_host_wait(tmp_path: Path, device: torch.device) -> None:
    path = write_tiny_config(tmp_path)
    plan = make_plan(load_config(path, settings(device, *SETS)), path, 1, parts=PARTS)
    strategy = Sharded(Layout(1, 1), device=device)
    model = make_state(plan, ALONE, device, strategy).model
    strategy.wrap(model, model)
    tokens = torch.randint(0, 99, (4, 16), generator=torch.Generator().manual_seed(0)).to(device)
    for number in range(3):
        with synchronization_forbidden(device) if number else nullcontext():
            with strategy.no_sync():
                model(tokens=tokens, state=None).logits.float().square().mean().backward()
            model(tokens=tokens, state=None).logits.float().square().mean().backward()
            strategy.reduced([])
    assert all(parameter.grad is not None and is_dtensor(parameter.grad) for parameter in model.parameters())
