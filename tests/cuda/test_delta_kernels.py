"""The kernels of gated_delta on a device: a step is captured by a CUDA graph, and replayed bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from trainer.lab.gated_delta import build, refusal_here

pytestmark = pytest.mark.cuda


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a device captures")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_captured_forward_and_backward_repeat_the_uncaptured_ones(compiled: bool) -> None:
    if why := refusal_here(0, 128):
        pytest.skip(why)
    torch.manual_seed(0)
    model = build(257, 256, 2).cuda()
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
