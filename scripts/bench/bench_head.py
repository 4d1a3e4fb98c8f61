"""The loss in chunks (`[objective] chunk_tokens`) against all logits at once: memory and time of a step, by vocabulary.

Forward and backward of a Transformer with the trainer's objective. Memory is the growth of the peak resident memory over one
step (on CUDA, of the peak allocated), in separate processes; times are paired.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
from bench_table import Figure, bench_parser, growth_mb, in_child, in_turns, over, ratio_figure, run_bench, seconds_of
from torch import Tensor, nn

from trainer.lab import transformer
from trainer.lab.models import ChunkedObjective, Headless
from trainer.objective import Loss, Objective
from trainer.options import ObjectiveOptions

VOCABULARIES = (257, 128_000)
WAYS = ("at once", "in chunks")


def make(args: argparse.Namespace, vocab_size: int) -> dict[str, tuple[nn.Module, Loss]]:
    """Model and loss, for each of the ways."""
    torch.manual_seed(0)
    model = transformer.build(vocab_size, args.dim, args.layers).to(args.device)
    plain = Objective(ObjectiveOptions(z_loss=1e-4))
    chunked = ChunkedObjective(plain, model.head, chunk_tokens=args.chunk)
    return {WAYS[0]: (model, plain), WAYS[1]: (Headless(model, model.head), chunked)}


def step(model: nn.Module, loss: Loss, tokens: Tensor) -> float:
    """Seconds of one forward and backward on tokens [B, T]."""

    def run() -> None:
        result = loss(model(tokens=tokens, state=None).logits, tokens)
        (result.loss_sum / tokens.numel()).backward()  # type: ignore[no-untyped-call]

    model.zero_grad(set_to_none=True)
    return seconds_of(run, tokens.device.type)


def draw(args: argparse.Namespace, vocab_size: int) -> Tensor:
    return torch.randint(vocab_size, (args.rows, args.length), device=args.device)


def memory_of_step(args: argparse.Namespace, way: str, vocab_size: int) -> float:
    """MB by which a step raises the peak, in this process."""
    run, tokens = partial(step, *make(args, vocab_size)[way]), draw(args, vocab_size)
    return growth_mb(partial(run, tokens[:1, :1]), partial(run, tokens), args.device)


def measure(args: argparse.Namespace) -> list[Figure]:
    """Memory, and its ratio and that of the times, for each vocabulary."""
    found = []
    for vocab_size in args.vocabularies:
        ways, tokens = make(args, vocab_size), draw(args, vocab_size)
        times = in_turns({way: partial(step, *ways[way], tokens) for way in WAYS}, args.rounds)
        memory = {way: in_child(memory_of_step, args, way, vocab_size) for way in WAYS}
        is_large = vocab_size >= VOCABULARIES[-1]
        for way in WAYS:
            found.append(Figure(f"V = {vocab_size:,}, {way}: peak memory of a step", memory[way], "MB"))
            found.append(Figure(f"V = {vocab_size:,}, {way}: time of a step", statistics.median(times[way]), "s"))
        name = f"V = {vocab_size:,}: time in chunks over at once"
        found.append(ratio_figure(name, over(times[WAYS[1]], times[WAYS[0]]), at_most=1.4))
        ratio = memory[WAYS[1]] / memory[WAYS[0]]
        name = f"V = {vocab_size:,}: memory in chunks over at once"
        found.append(Figure(name, ratio, "x", at_most=0.3 if is_large else None))
    return found


if __name__ == "__main__":
    parser = bench_parser(__doc__, device="cpu")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="rows per micro-batch")
    parser.add_argument("--length", type=int, default=256, help="tokens per row")
    parser.add_argument("--chunk", type=int, default=128, help="chunk_tokens")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=list(VOCABULARIES), help="sizes")
    parser.add_argument("--rounds", type=int, default=3)
    run_bench("head", parser, measure)
