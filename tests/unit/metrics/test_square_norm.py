"""The one kernel behind all square norms: exact where fp32 throughout is not."""

from __future__ import annotations

import pytest
import torch

from trainer.metrics.noise_scale.hooks import square_norm

SHAPES = [(), (3,), (0,), (1024,), (1025,), (1_000_003,), (300, 257), (2, 3, 5000)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_square_norm_is_exact_for_every_shape_and_type(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (1.0 + torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).to(dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert float(square_norm(x)) == pytest.approx(float(x.double().square().sum()), rel=tolerance)
    assert square_norm(x).dtype == torch.float64


def test_square_norm_is_accurate_where_fp32_is_not() -> None:
    x = torch.full((20_000_000,), 1.1)
    exact = 20_000_000 * float(torch.tensor(1.1).double()) ** 2
    assert float(square_norm(x)) == pytest.approx(exact, rel=1e-6)


def test_square_norm_of_strided_and_sparse_tensors() -> None:
    x = torch.randn(70, 130)
    assert float(square_norm(x.t())) == pytest.approx(float(x.double().square().sum()), rel=1e-6)
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (4,), check_invariants=True)
    assert float(square_norm(twice)) == pytest.approx(25.0)
