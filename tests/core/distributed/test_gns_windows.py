"""The noise scale under FSDP2 and DDP: exact against a separate backward of every micro-batch, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.gloo import run_on_ranks
from tests.support.gns_cases import (
    CASES,
    Case,
    Net,
    Windows,
    make_net,
    measured,
    norms_of_cuda,
    run_window,
    separate_backwards,
    wrong_windows,
)
from trainer.errors import UserError
from trainer.metrics.gradient_noise import GradientNoiseScale
from trainer.metrics.noise_scale import Window

pytestmark = pytest.mark.distributed

SHARED = (
    "equal rows",
    "weighted rows, unequal micro-batches, one empty",
    "bf16 autocast",
    "frozen",
    "unused",
    "checkpointing",
)
BF16_PARAMETERS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(case: Case, world_size: int, policy: MixedPrecisionPolicy | None = None, *, replicas: int = 1) -> nn.Module:
    """A net in two FSDP2 groups; rows of 90 and 24 do not divide by 4 or 7, so some shards are padded."""
    net = make_net(case)
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (world_size,))
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=names)
    options = {} if policy is None else {"mp_policy": policy}
    fully_shard(net.body, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def windows_of_case(rank: int, world_size: int, case: Case) -> Windows:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    net = sharded(case, world_size)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    gns = GradientNoiseScale(net)
    results: Windows = {}
    for m in (1, 1, 2, 2, 4, 4):
        optimizer.zero_grad()
        run_window(case, net, gns, scaler, rank, m)
        results.setdefault(m, []).append(measured(gns, 1.0, is_sharded=True))
        optimizer.step()
    return results


def compare_all(rank: int, world_size: int) -> list[str]:
    cases = {name: CASES[name] for name in SHARED}
    return wrong_windows(cases, lambda case: windows_of_case(rank, world_size, case), rank, world_size)


def window_with_bf16_parameters(rank: int, world_size: int) -> tuple[Window, bool]:
    case = CASES["equal rows"]
    net = sharded(case, world_size, BF16_PARAMETERS)
    gns = GradientNoiseScale(net)
    run_window(case, net, gns, torch.amp.GradScaler("cpu", enabled=False), rank, 4)
    norms, window = measured(gns, 1.0, is_sharded=True)
    expected = separate_backwards(Case(lambda: Net().bfloat16(), is_weighted=False), world_size, 4)
    pairs = [0, 1, 2, 3, 8]  # not the middle
    same = [norms.values[k] for k in pairs] == pytest.approx([expected.values[k] for k in pairs], rel=1e-5)
    assert isinstance(window, Window)
    return window, same


def step_like_a_user(rank: int, world_size: int) -> list[dict[str, float]]:
    """`step` on the sharded model, in replicas, and on the same model in DDP."""
    case = CASES["weighted rows, unequal micro-batches, one empty"]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    results = []
    models = (sharded(case, world_size), sharded(case, world_size, replicas=2))
    for model in (*models, nn.parallel.DistributedDataParallel(make_net(case))):
        gns = GradientNoiseScale(model)
        for _ in range(2):
            model.zero_grad()
            run_window(case, model, gns, scaler, rank, 4)
            metrics = gns.step()
        results.append({key: value for key, value in metrics.items() if value is not None})
    return results


def refusals(rank: int, world_size: int) -> list[str]:
    """The messages for what cannot be measured exactly."""
    tensor_parallel = Net()
    mesh = init_device_mesh("cpu", (world_size,))
    weight = distribute_tensor(tensor_parallel.head.weight.detach(), mesh, [Shard(0)])
    tensor_parallel.head.weight = nn.Parameter(weight)
    ignored = Net()
    fully_shard(ignored, mesh=mesh, ignored_params={ignored.head.weight})
    messages = []
    for model in (tensor_parallel, ignored, Net(), nn.Sequential(DistributedDataParallel(Net()), Net())):
        with pytest.raises(UserError, match=r"gns\.enabled: not possible with") as error:
            GradientNoiseScale(model)
        messages.append(str(error.value))
    return messages


Results = tuple[list[str], tuple[Window, bool], list[dict[str, float]], list[str]]


def everything(rank: int, world_size: int) -> Results:
    """In one start of the processes, which costs more than all of it."""
    wide = window_with_bf16_parameters(rank, world_size)
    with norms_of_cuda():
        assert window_with_bf16_parameters(rank, world_size)[0].tr_sigma == pytest.approx(wide[0].tr_sigma, rel=1e-6)
    return (compare_all(rank, world_size), wide, step_like_a_user(rank, world_size), refusals(rank, world_size))


@pytest.fixture(scope="module")
def results() -> list[Results]:
    return run_on_ranks(everything, 2, torch_keeps_group=True)


def test_a_window_is_measured_as_by_separate_backwards(results: list[Results]) -> None:
    assert not results[0][0], "\n".join(results[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 4])
def test_the_number_of_ranks_makes_no_difference(world_size: int) -> None:
    wrong = run_on_ranks(compare_all, world_size, torch_keeps_group=True)[0]
    assert not wrong, "\n".join(wrong)


def test_bf16_parameters_reduced_in_fp32_are_exact_but_have_no_middle(results: list[Results]) -> None:
    """FSDP2 then keeps a rank's sum where no hook sees it, so that `gns/consistency` is absent and never wrong."""
    for _, (window, is_exact), *_ in results:
        assert is_exact
        assert (window.between, window.within) == (None, None)


def test_step_adds_up_the_shards(results: list[Results]) -> None:
    for _, _, (of_fsdp, of_hsdp, of_ddp), _ in results:
        assert of_fsdp == pytest.approx(of_ddp, rel=1e-4)
        assert of_hsdp == pytest.approx(of_ddp, rel=1e-4)
        assert of_fsdp["gns/tr_sigma"] > 0.0


def test_other_shardings_are_refused_with_the_reason(results: list[Results]) -> None:
    for *_, (tensor_parallel, ignored, *unwrapped) in results:
        assert "sharded next to unsharded parameters" in tensor_parallel
        assert "sharded next to unsharded parameters" in ignored
        assert all("that DDP does not wrap" in each for each in unwrapped)


MICRO_BATCHES = (1, 2, 4)


def windows_of_ddp(rank: int, case: Case) -> Windows:
    """Two windows of each length: static_graph and rebuilt buckets behave differently from the second on."""
    net = make_net(case)
    bucket_mb: float | None = 1e-3  # a bucket for each parameter
    if case.backend is not None:
        net.compile(backend=case.backend)
        bucket_mb = None  # compilation splits at buckets and refuses a first one (1 MB) above the others
    ddp = DistributedDataParallel(net, bucket_cap_mb=bucket_mb, **case.ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, enabled=case.has_scaler)
    gns = GradientNoiseScale(nn.Sequential(ddp) if case.is_weighted else ddp)  # as `torch.compile` wraps it
    results: Windows = {}
    for m in MICRO_BATCHES:  # 1 first: with static_graph DDP itself fails if its first backward is under no_sync
        for _ in range(2):
            optimizer.zero_grad()
            run_window(case, ddp, gns, scaler, rank, m)
            scale = scaler.get_scale()
            if case.has_scaler:
                scaler.unscale_(optimizer)
                scaler.update()
            results.setdefault(m, []).append(measured(gns, scale))
    gns.close()
    return results


def compare_ddp(rank: int, world_size: int) -> list[str]:
    return wrong_windows(CASES, lambda case: windows_of_ddp(rank, case), rank, world_size)


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_a_window_of_ddp_is_measured_as_by_separate_backwards(world_size: int) -> None:
    wrong = run_on_ranks(compare_ddp, world_size)[0]
    assert not wrong, "\n".join(wrong)
