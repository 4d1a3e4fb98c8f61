"""Forward + backward of the gated recurrence against nn.GRU and causal attention of the same width, at several lengths.

Each is a full mixing layer from [B, T, D] to [B, T, D]: ours with its gates and projections, torch's GRU, attention with its
four projections around `scaled_dot_product_attention`. The number of tokens is the same at every length, so linear scaling in
T shows as constant time. The minimum bytes of our layer (inputs, outputs, coefficients and their gradients, each once) over
its time compare with the memory bandwidth.

On CUDA all of it is in 16 bits (the GRU in float16, the others in bfloat16), attention is the flash kernel, and the scan's two
kernels are also timed alone: the bytes of their operands, each once, over their time, as a share of what a copy reaches.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from bench_table import Figure, bench_parser, in_turns, over, ratio_figure, run_bench, seconds_of
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.model.encoder import GatedRecurrence
from trainer.model.recurrence import HAS_TRITON

LENGTHS = (256, 1024, 4096)
HEAD_WIDTH = 64
FASTER_THAN_ATTENTION_FROM = 1024
# Tensors of [B, T, D] that the scan and its gates cannot avoid, forward and backward: x, values, two gates, a, b (not on
# CUDA, where the kernels keep them in registers), h, output gate, their product, out; and the gradient of each.
TENSORS_MOVED = {"cpu": 20, "cuda": 16}
# What they are in the scan alone: r, i, x and h, then r, i, x, h, the gradient of h, and three gradients.
SCAN_TENSORS = {"forward": 4, "backward": 8}
DEFAULT_SIZES = {"cpu": {"dim": 256, "tokens": 4096}, "cuda": {"dim": 1024, "tokens": 32768}}
REPEATS = 20


class Attention(nn.Module):
    """Causal self-attention with heads of 64."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
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
        layer.to(device, dtype_of(device))
    if device == "cuda":
        gru.half()

    def attend(x: Tensor) -> Tensor:
        if device == "cpu":
            return attention(x)  # type: ignore[no-any-return]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return attention(x)  # type: ignore[no-any-return]

    return {
        "recurrence": lambda x: recurrence(x, torch.zeros(x.shape[0], dim, device=device), None)[0],
        "gru": lambda x: gru(x.half() if device == "cuda" else x)[0],
        "attention": attend,
    }


def dtype_of(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def seconds(layer: Callable[[Tensor], Tensor], x: Tensor) -> float:
    x = x.detach().requires_grad_()
    return seconds_of(lambda: layer(x).sum().backward(), x.device.type)  # type: ignore[no-untyped-call]


def bandwidth(moved: int, run: Callable[[], object]) -> float:
    """GB/s of what moves so many bytes on the device: the median of some rounds, each of several launches in a row."""
    times = []
    for _ in range(REPEATS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        for _ in range(REPEATS):
            run()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3 / REPEATS)
    return float(moved / statistics.median(times[1:]) / 1e9)


def scan_bandwidth(batch: int, length: int, dim: int) -> list[Figure]:
    """The scan's kernels on the CUDA device, against a copy of as many bytes."""
    forward, backward = torch.ops.trainer.gated_scan, torch.ops.trainer.gated_scan_backward
    r, i, x, grad = torch.randn(4, batch, length, dim, device="cuda", dtype=torch.bfloat16).unbind(0)
    decay, state = torch.full((dim,), -5.0, device="cuda"), torch.zeros(batch, dim, device="cuda")
    resets = torch.rand(batch, length, device="cuda") < 0.01
    with torch.no_grad():
        h, final = forward(r, i, x, decay, resets, state)
        runs: dict[str, Callable[[], object]] = {
            "forward": lambda: forward(r, i, x, decay, resets, state),
            "backward": lambda: backward(grad, final, r, i, x, decay, resets, state, h),
        }
        found = []
        for name, run in runs.items():
            moved = SCAN_TENSORS[name] * x.numel() * x.element_size()
            source = torch.empty(moved // 2, device="cuda", dtype=torch.uint8)
            target = torch.empty_like(source)
            copied = bandwidth(moved, functools.partial(target.copy_, source))
            reached = bandwidth(moved, run)
            found.append(Figure(f"T={length}: scan {name}", reached, "GB/s"))
            share = reached / copied
            found.append(Figure(f"T={length}: scan {name}, share of a copy's bandwidth", share, "x", at_least=0.75))
    return found


def measure(args: argparse.Namespace) -> list[Figure]:
    """Ratios at each length, and how our time per token grows with length."""
    if args.device == "cuda" and not HAS_TRITON:
        raise SystemExit("--device cuda measures Triton kernels, and triton is not installed")
    default = DEFAULT_SIZES[args.device]
    dim, tokens = args.dim or default["dim"], args.tokens or default["tokens"]
    torch.manual_seed(0)
    found, medians = list[Figure](), dict[int, float]()
    for length in args.lengths:
        x = torch.randn(tokens // length, length, dim, device=args.device, dtype=dtype_of(args.device))
        candidates = layers(dim, args.device)
        runs = {name: functools.partial(seconds, layer, x) for name, layer in candidates.items()}
        times = in_turns(runs, args.rounds)
        ours = times["recurrence"]
        medians[length] = statistics.median(ours)
        for other in ("gru", "attention"):
            is_promised = other == "gru" or (args.device == "cpu" and length >= FASTER_THAN_ATTENTION_FROM)
            name = f"T={length}: times faster than {other}"
            found.append(ratio_figure(name, over(times[other], ours), at_least=1.0 if is_promised else None))
        moved = TENSORS_MOVED[args.device] * x.numel() * x.element_size()
        found.append(Figure(f"T={length}: ours, seconds", medians[length], "s"))
        found.append(Figure(f"T={length}: ours, minimum bytes over time", moved / medians[length] / 1e9, "GB/s"))
        if args.device == "cuda":
            found += scan_bandwidth(tokens // length, length, dim)
    first, last = args.lengths[0], args.lengths[-1]
    # The number of tokens is fixed: linear cost gives 1, quadratic cost last / first.
    growth = medians[last] / medians[first]
    found.append(Figure(f"ours: time per token, T={last} over T={first}", growth, "x", at_most=1.25))
    return found


if __name__ == "__main__":
    parser = bench_parser(__doc__, device="cpu")
    parser.add_argument("--dim", type=int, help="default: 256 on the CPU, 1024 on CUDA")
    parser.add_argument("--tokens", type=int, help="tokens per batch, at every length; default: 4096, 32768 on CUDA")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=9)
    run_bench("recurrence", parser, measure)
