"""The encoder: carried state, resets, layout, initialisation, FLOPs, torch's transforms, and checkpointing by blocks."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.support.on_device import saved_bytes
from trainer.errors import UserError
from trainer.lab import gated_delta, transformer
from trainer.lab.models import recompute_blocks
from trainer.model import RecurrentEncoder, build
from trainer.model.encoder import RMSNorm

VOCAB = 11


def small(seed: int = 0, dtype: torch.dtype = torch.float64, **options: object) -> RecurrentEncoder:
    torch.manual_seed(seed)
    model = build(VOCAB, 6, 2, **options).to(dtype)
    with torch.no_grad():
        # Larger weights make the state matter more to the logits.
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)
    return model


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("shape", [(3, 4, 5), (5,)])
def test_the_norm_is_torchs_with_its_gradients(shape: tuple[int, ...]) -> None:
    norm = RMSNorm(5).double()
    nn.init.normal_(norm.weight)
    norm.eps = 1e-3
    x, grad = torch.randn(shape, dtype=torch.float64, requires_grad=True), torch.randn(shape, dtype=torch.float64)
    found = [each(x) for each in (norm, partial(F.rms_norm, normalized_shape=(5,), weight=norm.weight, eps=1e-3))]
    found = [(each, *torch.autograd.grad(each, (x, norm.weight), grad)) for each in found]
    torch.testing.assert_close(*found, rtol=1e-13, atol=1e-14)
    twice = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)[0].sum()
    with pytest.raises(RuntimeError, match="once_differentiable"):
        twice.backward()
    norm.bfloat16()(x.float()).sum().backward()  # weights as FSDP gathers them


@pytest.mark.parametrize("make", [build, gated_delta.build, transformer.build])
def test_under_bf16_the_gradient_is_float64s_but_for_rounding(make) -> None:
    """Above all its norm. With an eps of 1e-7 the norm after the delta rule made it up to twice as large."""
    rows, targets = torch.randint(VOCAB, (4, 64)), torch.randint(VOCAB, (4 * 64,))
    for seed in range(5):
        torch.manual_seed(seed)
        model, found = make(VOCAB, 32, 2), []
        for dtype in (torch.float32, torch.float64):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
                logits = model.to(dtype)(rows).logits.flatten(0, 1)
            gradients = torch.autograd.grad(F.cross_entropy(logits.to(dtype), targets), list(model.parameters()))
            found.append(torch.cat([each.flatten() for each in gradients]).double())
        assert (found[0] - found[1]).norm() < 0.07 * found[1].norm(), seed
        assert found[0].norm().item() == pytest.approx(found[1].norm().item(), rel=0.02), seed


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_every_parameter_gets_a_gradient(tie_embeddings: bool) -> None:
    model = small(tie_embeddings=tie_embeddings)
    model(tokens(2, 7)).logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert (model.head.weight is model.embedding.weight) == tie_embeddings


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_flops_per_token_equal_torchs_count_of_matrix_products(tie_embeddings: bool) -> None:
    torch.manual_seed(0)
    model = build(29, 16, 3, mlp_ratio=1.5, tie_embeddings=tie_embeddings)
    batch = torch.randint(0, 29, (2, 10))
    with FlopCounterMode(display=False) as counter:
        model(batch).logits.sum().backward()
    scan = 5 * model.num_layers * model.dim
    assert model.flops_per_token(10) == counter.get_total_flops() / batch.numel() + scan


def test_compiled_graph_is_whole_and_equal() -> None:
    # The aot_eager backend traces forward and backward as inductor would, without needing a C++ compiler.
    torch._dynamo.reset()
    model, row = small(), tokens(2, 9)
    state = torch.randn(2, model.state_width, dtype=torch.float64)
    plain = model(row, state)
    plain.logits.square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(row, state)
    compiled.logits.square().sum().backward()
    torch.testing.assert_close(compiled.logits, plain.logits, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close([p.grad for p in model.parameters()], expected, rtol=1e-9, atol=1e-9)


def test_autocast_keeps_the_state_and_the_scan_in_float32() -> None:
    model, row = small(dtype=torch.float32), tokens(2, 33)
    exact = model(row)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = model(row)
        first = model(row[:, :16])
        second = model(row[:, 16:], first.state)
    assert whole.logits.dtype == torch.bfloat16
    assert whole.state.dtype == torch.float32
    torch.testing.assert_close(whole.state, second.state, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole.state, exact.state, rtol=0.3, atol=0.3)
    whole.logits.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 0}, r"model\.dim: gives a size of 0; it must be >= 1"),
        ({"num_layers": -1}, r"model\.num_layers: gives a size of -1"),
        ({"mlp_ratio": "2"}, r"model\.args\.mlp_ratio: is '2', no number"),
        ({"tie_embeddings": "no"}, r"model\.args\.tie_embeddings: is 'no', neither"),
        ({"heads": 3}, r"model\.args\.heads: is 3, no whole number that divides 4"),
        ({"heads": 4}, r"model\.args\.heads: is 4, which gives each an odd width of 1"),
        ({"heads": 2, "kv_heads": 3}, r"model\.args\.kv_heads"),
    ],
)
def test_impossible_sizes_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        transformer.build(**{"vocab_size": 5, "dim": 4, "num_layers": 1, **arguments})


def gradients(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(tokens=tokens).logits.square().mean(), list(model.parameters())))


@pytest.mark.parametrize("make", [build, gated_delta.build, transformer.build])
def test_gradients_are_equal_and_less_is_kept(make):
    torch.manual_seed(0)
    model = make(31, 64, 4)
    tokens = torch.randint(31, (3, 40))
    plain, expected = saved_bytes(model, tokens), gradients(model, tokens)
    recompute_blocks(model)
    for each in (model, copy.deepcopy(model)):
        torch.testing.assert_close(gradients(each, tokens), expected, rtol=0, atol=0)
        assert saved_bytes(each, tokens) < 0.3 * plain
        assert all(block.forward.__self__ is block.kept_forward.__self__ is block for block in each.blocks)
