"""Parts on the device: each against a computation of its own, or against the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.gns_cases import loss_sum, make_model, rows
from tests.support.on_device import synchronization_forbidden
from trainer.distributed.strategy import compile_blocks
from trainer.lab import gated_delta, transformer
from trainer.ledger import Ledger, LedgerOptions
from trainer.metrics import noise_scale
from trainer.metrics.gradient_noise import GradientNoiseScale
from trainer.model.encoder import build
from trainer.options import WipeMode

pytestmark = pytest.mark.cuda
document_mask = transformer.document_mask
ROWS, LENGTH = 3, 300  # not a multiple of a block
GROUPS, BATCH = 24, 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a device captures")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_captured_forward_and_backward_repeat_the_uncaptured_ones(compiled: bool) -> None:
    if why := gated_delta.refusal_here(0, 128):
        pytest.skip(why)
    torch.manual_seed(0)
    model = gated_delta.build(257, 256, 2).cuda()
    for block in model.blocks if compiled else ():
        block.compile(fullgraph=True)
    tokens, resets = torch.randint(257, (4, 301), device="cuda"), torch.rand(4, 300, device="cuda") < 0.05

    def run() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens[:, :-1], resets=resets).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss

    def results(loss: torch.Tensor) -> list[torch.Tensor]:
        return [loss.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # compiles, and chooses the kernels' configurations
        model.zero_grad(set_to_none=True)
        wanted = results(run())
        model.zero_grad(set_to_none=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = run()
    graph.replay()
    assert all(map(torch.equal, results(loss), wanted))


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_attention_in_blocks_equals_the_mask(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, precision: torch.dtype, kv_heads: int, is_compiled: bool
) -> None:
    if device.type == "cpu":
        pytest.skip("flex attention has no backward on CPUs")
    torch.compiler.reset()
    torch.manual_seed(0)
    model = transformer.build(29, 128, 2, heads=4, kv_heads=kv_heads).to(device)
    tokens = torch.randint(0, 29, (ROWS, LENGTH), device=device)
    resets = torch.rand(ROWS, LENGTH, device=device) < 0.02
    weight = torch.randn(ROWS, LENGTH, 29, device=device)

    def results(in_blocks: bool, dtype: torch.dtype) -> list[Tensor]:
        monkeypatch.setattr(
            transformer, "document_mask", lambda resets, **_: document_mask(resets, in_blocks=in_blocks)
        )
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            logits = model(tokens, resets=resets).logits.float()
        return [logits.detach(), *torch.autograd.grad((logits * weight).sum(), list(model.parameters()))]

    truth, mask = results(False, torch.float32), results(False, precision)
    if is_compiled:
        compile_blocks(model)
    for found, other, true in zip(results(True, precision), mask, truth, strict=True):
        error, of_mask = (torch.linalg.vector_norm(x - true).item() for x in (found, other))
        assert error <= max(1.5 * of_mask, 1e-5 * torch.linalg.vector_norm(true).item())


def use(ledger: Ledger, device: torch.device, width: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], Any]:
    """Look up and store groups that come again, are evicted and end, some with states that are not finite."""
    rng = np.random.default_rng(width)
    found = []
    for step in range(1, 31):
        ledger.begin_step(step)
        groups = rng.choice(GROUPS, BATCH, replace=False)
        cells, lasts = rng.integers(0, 3, BATCH), rng.random(BATCH) < 0.2
        states = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(step)).to(dtype)
        if step % 7 == 0:
            states[0, -1] = float("nan")
        on_device = states.to(device)
        with synchronization_forbidden(device):
            found.append(ledger.lookup(groups, cells))
            ledger.store(groups, cells, lasts, on_device)
    return found, ledger.drain_metrics()


@pytest.mark.parametrize("mode", get_args(WipeMode))
@pytest.mark.parametrize(("width", "dtype"), [(512, torch.float32), (7, torch.bfloat16), (300_000, torch.float32)])
def test_states_and_counts_are_those_of_the_cpu(
    device: torch.device, mode: Any, width: int, dtype: torch.dtype
) -> None:
    def ledger(where: torch.device) -> Ledger:
        capacity = GROUPS // 2 if mode == "lru" else GROUPS  # without eviction a full ledger is an error
        options = LedgerOptions(capacity=capacity, wipe_mode=mode, stale_threshold=4, wipe_every=9)
        return Ledger(options, state_width=width, device=where, dtype=dtype)

    found, counts = use(ledger(device), device, width, dtype)
    expected, expected_counts = use(ledger(torch.device("cpu")), torch.device("cpu"), width, dtype)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))
    assert any(bool(states.any()) for states in expected)
    assert counts == expected_counts


@pytest.mark.parametrize("is_bf16", [False, True])
def test_sums_of_the_built_in_model_equal_separate_backwards(device: torch.device, is_bf16: bool) -> None:
    torch.manual_seed(1)
    model = build(33, dim=32, num_layers=2).to(device)
    tokens = torch.randint(33, (3, 4, 17), generator=torch.Generator().manual_seed(2)).to(device)
    gns = GradientNoiseScale(model)

    def backward(k: int) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=is_bf16):
            logits = model(tokens[k, :, :-1]).logits
        nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[k, :, 1:].flatten()).backward()

    gns.begin_window(3)
    for k in range(3):
        gns.begin_micro(last=k == 2)
        backward(k)
        gns.end_micro(1.0, 4)
    found = gns.local_sums().tolist()
    expected = 0.0
    for k in range(3):
        model.zero_grad()
        backward(k)
        expected += sum(p.grad.double().square().sum().item() for p in model.parameters() if p.grad is not None)
    assert found[noise_scale.SMALL_SQUARE] == pytest.approx(expected, rel=1e-5)


def test_a_window_does_not_wait_for_the_device(device: torch.device) -> None:
    model = make_model().to(device)
    gns = GradientNoiseScale(model)
    inputs = [rows(k).to(device) for k in range(4)]
    weights = torch.tensor([1.0, 2.0, 0.0, 5.0], device=device)
    for number in range(3):
        with torch.no_grad():
            kappa = 0.1 * weights.sum()
        with synchronization_forbidden(device) if number else nullcontext():
            gns.begin_window(4, spread=4, by_rank=number == 2)
            for k in range(4):
                gns.begin_micro(k == 3, groups={k}, rows_before=1.0)
                (0.1 * loss_sum(model, inputs[k], weights)).backward()
                gns.end_micro(kappa, weights)
            sums = gns.local_sums()
        model.zero_grad()
        gns.finish(sums.tolist(), 1.0, grad_factor=1.0)
