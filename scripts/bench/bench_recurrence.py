"""Forward + backward of the gated recurrence against nn.GRU and causal attention of the same width, at several lengths.

Each of the three is a full mixing layer from [B, T, D] to [B, T, D]: ours with its gates and projections, the GRU as torch
provides it, attention with its four projections around `scaled_dot_product_attention`. The number of tokens is the same at
every length, so linear scaling in T shows as constant time. The bytes that our layer must move at least (its inputs,
outputs, coefficients and their gradients, each once) divided by its time can be compared with the memory bandwidth.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from bench_table import Figure, print_figures, ratio_figure
from torch import Tensor, nn

from trainer.model.blocks import GatedRecurrence

LENGTHS = (256, 1024, 4096)
HEAD_WIDTH = 64
FASTER_THAN_ATTENTION_FROM = 1024
# Tensors of [B, T, D] in float32 that the scan and its gates cannot avoid, forward and backward: x, values, two gates,
# a, b, h, output gate, their product, out; and the gradient of each.
TENSORS_MOVED = 20


class Attention(nn.Module):
    """Causal self-attention with heads of 64."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, T, D]."""
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, dim // HEAD_WIDTH, HEAD_WIDTH).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, T, 64]
        mapped: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return mapped


def layers(dim: int, device: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """The three layers, as functions of x [B, T, D]."""
    recurrence, gru, attention = GatedRecurrence(dim), nn.GRU(dim, dim, batch_first=True), Attention(dim)
    recurrence.init_weights(1.0)
    for layer in (recurrence, gru, attention):
        layer.to(device)
    return {
        "recurrence": lambda x: recurrence(x, torch.zeros(x.shape[0], dim, device=device), None)[0],
        "gru": lambda x: gru(x)[0],
        "attention": attention,
    }


def seconds(layer: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """One forward and backward."""
    x = x.detach().requires_grad_()
    if x.is_cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    layer(x).sum().backward()  # type: ignore[no-untyped-call]
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(args: argparse.Namespace) -> list[Figure]:
    """Ratios at each length, and how our time per token grows with length."""
    torch.manual_seed(0)
    found: list[Figure] = []
    medians: dict[int, float] = {}
    for length in args.lengths:
        x = torch.randn(args.tokens // length, length, args.dim, device=args.device)
        candidates = layers(args.dim, args.device)
        times: dict[str, list[float]] = {name: [] for name in candidates}
        for turn in range(args.rounds + 1):
            for name, layer in candidates.items():
                spent = seconds(layer, x)
                if turn:
                    times[name].append(spent)
        ours = times["recurrence"]
        medians[length] = statistics.median(ours)
        for other in ("gru", "attention"):
            ratios = [theirs / own for own, theirs in zip(ours, times[other], strict=True)]
            is_promised = other == "gru" or length >= FASTER_THAN_ATTENTION_FROM
            name = f"T={length}: times faster than {other}"
            found.append(ratio_figure(name, ratios, at_least=1.0 if is_promised else None))
        moved = TENSORS_MOVED * x.numel() * x.element_size()
        found.append(Figure(f"T={length}: ours, seconds", medians[length], "s"))
        found.append(Figure(f"T={length}: ours, minimum bytes over time", moved / medians[length] / 1e9, "GB/s"))
    first, last = args.lengths[0], args.lengths[-1]
    # The number of tokens is fixed: linear cost gives 1, quadratic cost last / first.
    growth = medians[last] / medians[first]
    found.append(Figure(f"ours: time per token, T={last} over T={first}", growth, "x", at_most=1.25))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print; exits with 1 when --check is given and a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per batch, at every length")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 unless every goal is met")
    args = parser.parse_args(argv)
    if args.device == "cpu":
        torch.set_num_threads(1)
    print_figures("recurrence", measure(args), as_json=args.json, check=args.check)


if __name__ == "__main__":
    main()
