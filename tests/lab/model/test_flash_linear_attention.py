"""The kernels of flash-linear-attention as `gated_delta` runs them: against the rule in torch, compiled, and where they are
refused. On a CPU they are interpreted."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck

from tests.core.model.test_recurrence import rule_by_steps
from tests.support.kernels import DEVICE, interpreted_fla
from trainer.cli.parts import PARTS
from trainer.config.schema import ModelTable
from trainer.lab.gated_delta import DeltaMixer, build, gated_delta_rule, kernel_rule, refusal, refusal_here
from trainer.training.plan import build_model

ROWS, LENGTH, HEADS, WIDTH = 3, 100, 2, 32 if DEVICE == "cpu" else 128
MANY = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
MANY[0, [0, 7, 70]] = True
MANY[1, ::3] = True  # row 2 has none
PRODUCTS = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter has no products in bf16


@pytest.fixture(scope="module")
def fla() -> ModuleType:
    if DEVICE == "cuda" and (why := refusal_here(0, WIDTH)):
        pytest.skip(why)
    with interpreted_fla() as module:
        yield module


def drawn(dtype: torch.dtype) -> list[Tensor]:
    """What the mixer gives the rule, as rounded to a type as the kernels have it."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(ROWS, HEADS, LENGTH, WIDTH, device=DEVICE) for _ in range(3))
    wide = (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)
    decay, rate = -0.1 * torch.rand(ROWS, HEADS, LENGTH, device=DEVICE), torch.rand(ROWS, HEADS, LENGTH, device=DEVICE)
    return [*(x.to(dtype).float() for x in wide), decay, rate, torch.randn(ROWS, HEADS, WIDTH, WIDTH, device=DEVICE)]


def results(rule, given: list[Tensor], resets: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    """Output, last state, and the gradients of all inputs."""
    leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in given]
    output, end = rule(*leaves, None if resets is None else resets.to(DEVICE))
    (output.sin().sum() + end.cos().sum()).backward()
    return [output.detach(), end.detach(), *(x.grad for x in leaves)]


@pytest.mark.cuda
@pytest.mark.parametrize("products", [torch.float32, pytest.param(PRODUCTS, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("resets", [pytest.param(None, marks=pytest.mark.slow), MANY], ids=["one document", "many"])
def test_outputs_states_and_gradients_are_those_of_the_rule_in_torch(fla, resets, products):
    given = drawn(products)
    with torch.autocast(DEVICE, products, enabled=products != torch.float32):
        found = results(kernel_rule, given, resets, torch.float32)
    wanted = results(gated_delta_rule, given, resets, torch.float64)
    within = 1e-2 if products != torch.float32 else 5e-3 if DEVICE == "cuda" else 3e-5 if resets is not None else 2e-6
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= within * other.norm()
    if products == torch.float32:
        by_steps = results(rule_by_steps, given, resets, torch.float64)
        for one, other in zip(wanted, by_steps, strict=True):
            torch.testing.assert_close(one, other)


def test_the_operators_are_what_they_are_registered_as(fla):
    *wide, state = (x[:1, :1] for x in drawn(torch.float32))
    given = [x.transpose(1, 2)[:, :20] for x in wide]
    opcheck(torch.ops.trainer.gated_delta.default, [x.detach().clone().requires_grad_() for x in (*given, state)])


@pytest.mark.slow
@pytest.mark.cuda
def test_a_model_on_the_kernels_compiles_in_one_piece_and_equals_the_one_in_torch(fla, device):
    torch.manual_seed(0)
    model = build(37, 2 * WIDTH, 2, heads=2).to(device)
    tokens, marks = torch.randint(37, (ROWS, 70), device=device), MANY[:, :70].to(device)
    mixers = [module for module in model.modules() if isinstance(module, DeltaMixer)]
    for mixer in mixers:
        mixer.rule = gated_delta_rule
    wanted = model(tokens, resets=marks)
    for mixer in mixers:
        mixer.rule = kernel_rule
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    with torch.autocast(device.type, PRODUCTS):
        found = model(tokens, resets=marks)
        found.logits.float().logsumexp(-1).sum().backward()
    assert (found.logits - wanted.logits).norm() < 0.02 * wanted.logits.norm()
    assert found.state[1]["memory"].dtype == torch.float32
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("triton", "capability", "width", "says"),
    [
        ("3.7.1", 9, 128, ""),
        ("3.6.0", 8, 128, ""),
        ("3.6.0", 9, 128, "Triton 3.6.0 refuses gradients on Hopper"),
        ("3.7.1", 9, 512, "take 256 at most"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_by_name(triton, capability, width, says):
    found = refusal(triton, capability, width)
    assert says in found if says else found == ""


def test_what_runs_is_said():
    model = build_model(ModelTable(family="gated_delta", dim=192, num_layers=1), 37, parts=PARTS)
    cpu = "gated delta rule in torch: its kernels need CUDA"
    assert model.implementation(torch.device("cpu"), "bf16") == cpu
    assert "in 16 bits" in model.implementation(torch.device("cuda"), "fp32")
