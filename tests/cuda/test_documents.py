"""Attention in blocks over a row's documents equals the mask, forward and backward: on CPUs it has no backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainer.distributed.strategy import compile_blocks
from trainer.lab import transformer

pytestmark = pytest.mark.cuda
document_mask = transformer.document_mask
ROWS, LENGTH = 3, 300  # not a multiple of a block


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
