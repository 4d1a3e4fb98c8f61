"""The hooks on one process: exact norms, the life of a window, and windows that are skipped and counted, never guessed."""

from __future__ import annotations

import gc
import itertools
import logging
import weakref
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.gns_cases import loss_sum, make_model, micro, norms_by_definition, norms_of_cuda, rows, window
from trainer.errors import UserError
from trainer.metrics import noise_scale
from trainer.metrics.gradient_noise import GradientNoiseScale, norms_of, square_sum
from trainer.metrics.noise_scale import Absent, Window


@pytest.fixture
def model() -> nn.Module:
    return make_model()


@pytest.fixture
def gns(model: nn.Module) -> Iterator[GradientNoiseScale]:
    gns = GradientNoiseScale(model)
    yield gns
    gns.close()


def known(metrics: dict[str, float | None]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if value is not None}


@pytest.fixture(params=["tensor by tensor", "many tensors at once"], autouse=True)
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    with norms_of_cuda() if request.param == "many tensors at once" else nullcontext():
        yield


@pytest.mark.parametrize("num_micros", [1, 2, 4, 5])
def test_sums_equal_separate_backwards(model: nn.Module, gns: GradientNoiseScale, num_micros: int) -> None:
    gradients, kappas, noises = [], [], []
    for k in range(num_micros):
        weights = torch.tensor([1.0, 2.0, 0.0, 5.0 + k])
        total = float(weights.sum())
        own = torch.autograd.grad(loss_sum(model, rows(k), weights), list(model.parameters()))
        gradients.append(torch.cat([each.double().flatten() for each in own]) / total)
        kappas.append(0.1 * total)
        noises.append(float(weights.square().sum()) / total**2)
    window(gns, model, num_micros)
    kappa, square, small, noise, *others = gns.local_sums()[: noise_scale.TOKENS].tolist()
    found = (square / kappa**2, small / kappa**2, noise / kappa, *(each / kappa**2 for each in others))
    expected = norms_by_definition(torch.stack(gradients), kappas, noises, 1).values
    assert (*found, float(gns.grad_sq()) / kappa**2) == pytest.approx(expected, rel=1e-5)
    assert (kappa, float(gns.local_sums()[noise_scale.TOKENS])) == pytest.approx((sum(kappas), 10.0 * sum(kappas)))


def test_a_micro_batch_that_begins_again_counts_once_and_an_unfinished_window_not_at_all(
    model: nn.Module, gns: GradientNoiseScale
) -> None:
    window(gns, model, 2)
    expected = gns.local_sums()
    window(gns, model, 3, first_seed=50)
    model.zero_grad()
    weights = [torch.tensor([1.0, 2.0, 0.0, 5.0 + k]) for k in range(2)]
    gns.begin_window(2)
    gns.begin_micro(False)
    (0.1 * loss_sum(model, rows(0), weights[0])).backward()
    gns.again()
    model.zero_grad()
    (0.1 * loss_sum(model, rows(0), weights[0])).backward()
    gns.end_micro(0.1 * float(weights[0].sum()), weights[0])
    micro(gns, model, rows(1), weights[1], last=True)
    assert torch.equal(gns.local_sums(), expected)


def test_a_model_without_trained_parameters_is_refused() -> None:
    with pytest.raises(UserError, match="no trainable parameter"):
        GradientNoiseScale(nn.Tanh())


def test_hooks_do_not_keep_an_owner_that_nobody_closed(model: nn.Module) -> None:
    """Through the owner they would keep the process group, whose threads can abort a process that exits."""
    owner = weakref.ref(GradientNoiseScale(model))
    gc.collect()
    assert owner() is None
    loss_sum(model, rows(0), torch.ones(4)).backward()  # the hooks are still registered, and do nothing


SHAPES = [(), (3,), (0,), (1024,), (1025,), (1_000_003,), (300, 257), (2, 3, 5000)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_sum_of_squares_is_exact_for_every_shape_and_type(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (1.0 + torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).to(dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert float(square_sum(norms_of([x]))) == pytest.approx(float(x.double().square().sum()), rel=tolerance)
    assert square_sum(norms_of([x])).dtype == torch.float64


def test_sum_of_squares_of_strided_and_sparse_tensors() -> None:
    x = torch.randn(70, 130)
    assert float(square_sum(norms_of([x.t()]))) == pytest.approx(float(x.double().square().sum()), rel=1e-6)
    embedding = nn.Embedding(4, 2, sparse=True)
    gns = GradientNoiseScale(embedding)
    for is_last in (False, True):
        gns.begin_micro(is_last)
        embedding(torch.tensor([1, 3, 3])).sum().backward()  # whose gradient has index 3 twice
        gns.end_micro(1.0, 1)
    sums = (float(gns.local_sums()[noise_scale.SMALL_SQUARE]), float(gns.grad_sq()))
    assert sums == pytest.approx((2 * (2 * 1.0 + 2 * 4.0), 2 * 4.0 + 2 * 16.0))


def test_a_gradient_without_tokens_is_a_fault(model: nn.Module, gns: GradientNoiseScale) -> None:
    gns.begin_window()
    micro(gns, model, rows(0), torch.ones(4))
    gns.begin_micro(True)
    loss_sum(model, rows(1), torch.ones(4)).backward()
    gns.end_micro(0.0, torch.zeros(4))
    found = gns.step()
    assert known(found) == {"gns/skipped": 1.0}
    assert found["gns/b_now"] is found["gns/b_now_low"] is None  # not that of an earlier step
    with pytest.raises(AssertionError, match="begin_micro without begin_window"):
        gns.begin_micro(True)


@pytest.mark.parametrize(("value", "kappa"), [(float("nan"), 0.0), (float("inf"), 1.0)])
def test_a_gradient_that_is_not_finite_is_a_counted_skip(
    model: nn.Module, gns: GradientNoiseScale, value: float, kappa: float
) -> None:
    for k in range(6):
        window(gns, model, 2, first_seed=2 * k)
        before = gns.step()
    model.zero_grad()
    gns.begin_window(2)
    micro(gns, model, rows(0), torch.ones(4))
    gns.begin_micro(True)
    (value * loss_sum(model, rows(1), torch.ones(4))).backward()
    gns.end_micro(kappa, torch.ones(4))
    after = gns.step()
    assert after.pop("gns/skipped") == 1.0
    before.pop("gns/skipped")
    assert after == before


@pytest.mark.parametrize(
    ("groups", "by_rank"), [([{1, 2}, {3}, {2}], False), ([{1}, {1}, {1}], True), ([{1}, {2}, {3}], True)]
)
def test_micro_batches_of_one_document_are_absent_and_leave_the_averages_alone(
    model: nn.Module, gns: GradientNoiseScale, groups: list[set[int]], by_rank: bool
) -> None:
    seeds = itertools.count()

    def finished(groups: list[set[int]], *, by_rank: bool = False) -> Window | Absent:
        model.zero_grad()
        gns.begin_window(None if by_rank else len(groups), by_rank=by_rank)
        for k, own in enumerate(groups):
            gns.begin_micro(k == len(groups) - 1, groups=torch.tensor([*own]))
            loss_sum(model, rows(next(seeds)), torch.ones(4)).backward()
            gns.end_micro(4.0, 4)
        return gns.finish(gns.local_sums().tolist(), float(gns.grad_sq()))

    apart: list[set[int]] = [{1, 2}, {3}, set(), {4}]
    assert all(isinstance(finished(apart), Window) for _ in range(6))
    before = gns.metrics()
    absent = finished(groups, by_rank=by_rank)
    assert isinstance(absent, Absent)
    assert "have rows of the same document" in absent.reason
    assert gns.metrics() == {**before, "gns/left_out": 1.0}
    assert gns.drain_metrics()["gns/left_out"] == 1.0
    assert gns.drain_metrics()["gns/left_out"] == before["gns/skipped"] == 0.0
    assert isinstance(finished(apart), Window)
    assert gns.metrics() != before
    assert (type(finished([{1}])), "gns/b_big" in gns.metrics()) == (Absent, False)


class Twice(nn.Module):
    """One linear layer used twice, each time through reentrant checkpointing: its hook runs twice a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def test_a_hook_that_runs_twice_is_a_skip_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = Twice()
    gns = GradientNoiseScale(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            gns.begin_window(2)
            for k in range(2):
                gns.begin_micro(k == 1)
                x = rows(k).requires_grad_()
                model(x).square().sum().backward()
                gns.end_micro(1.0, 4)
            assert known(gns.step()) == {"gns/skipped": 1.0}
    assert [record.message for record in caplog.records if "use_reentrant=False" in record.message] != []
    assert len(caplog.records) == 1


class Switch(nn.Module):
    """Uses the second layer only for some micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.use_second = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) if self.use_second else x


def test_the_middle_is_left_out_if_a_used_parameter_was_not_seen_in_it() -> None:
    model = Switch()
    gns = GradientNoiseScale(model)
    gns.begin_window(4)
    for k in range(4):
        model.use_second = k == 0
        micro(gns, model, rows(k), torch.ones(4), last=k == 3)
    result = gns.finish(gns.local_sums().tolist(), float(gns.grad_sq()))
    assert isinstance(result, Window)
    assert (result.between, result.within) == (None, None)


def test_hooks_that_never_run_are_a_fault_and_closing_removes_them(model: nn.Module, gns: GradientNoiseScale) -> None:
    gns.close()
    window(gns, model, 2)
    assert known(gns.step()) == {"gns/skipped": 1.0}
