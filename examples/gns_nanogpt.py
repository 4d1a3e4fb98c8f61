"""The gradient noise scale in a plain DDP loop, as in nanoGPT: five lines, marked GNS.

    python examples/gns_nanogpt.py                                     # one process
    torchrun --nproc_per_node=2 examples/gns_nanogpt.py --steps 50     # DDP, gloo on CPUs or nccl on GPUs

The task is counting modulo 64 with noise, so that part of the loss is irreducible.
"""

from __future__ import annotations

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.metrics.noise_scale.hooks import GradientNoiseScale

VOCAB, WIDTH, BLOCK = 64, 32, 16


class TinyGPT(nn.Module):
    """One causal transformer block; any module will do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy, [] of int64 [B, T] tokens and targets."""
        hidden = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        logits = self.head(self.block(hidden, src_mask=mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def draw(batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows that count up from a random start; one target in four is replaced by a random one."""
    start = torch.randint(VOCAB, (batch_size, 1), generator=generator)
    rows = (start + torch.arange(BLOCK + 1)) % VOCAB
    noise = torch.randint(VOCAB, rows.shape, generator=generator)
    rows = torch.where(torch.rand(rows.shape, generator=generator) < 0.25, noise, rows)
    return rows[:, :-1], rows[:, 1:]


def train(steps: int, micro_batches: int, batch_size: int) -> None:
    """The loop, on every rank."""
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model: nn.Module = TinyGPT().to(device)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    gns = GradientNoiseScale(model, weights_are_tokens=False)  # GNS: once, after DDP has wrapped the model
    # Ranks must see different examples: their difference is the noise.
    generator = torch.Generator().manual_seed(1 + rank)

    for step in range(1, steps + 1):
        gns.begin_window(micro_batches)  # GNS
        for k in range(micro_batches):
            is_last = k == micro_batches - 1
            # DDP averages over ranks in the last backward only, as nanoGPT does by hand.
            waiting = isinstance(model, DistributedDataParallel) and not is_last
            with model.no_sync() if waiting else contextlib.nullcontext():  # type: ignore[operator]
                tokens, targets = (t.to(device) for t in draw(batch_size, generator))
                loss = model(tokens, targets)
                gns.begin_micro(last=is_last)  # GNS
                (loss / micro_batches).backward()
                gns.end_micro(1 / micro_batches, batch_size)  # GNS: the factor on the mean loss, and the examples
        noise = gns.step()  # GNS: before clipping, which would change the measured norm
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0 and step % 10 == 0:
            # Unknown values are absent, never 0: without an upper bound, only the lower one is known.
            b_simple, low, high = (noise.get(f"gns/b_simple{end}") for end in ("", "_low", "_high"))
            shown = "unknown yet" if low is None else f"at least {low:.1f} sequences"
            if b_simple is not None:
                shown = f"{b_simple:.1f} ({low:.1f} to {high:.1f}) sequences"
            print(f"step {step}: loss {loss.item():.3f}, noise scale {shown}", flush=True)


def main() -> None:
    """Parse, join the process group if started by torchrun, train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per micro-batch")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(options.steps, options.micro_batches, options.batch_size)
    if dist.is_initialized():
        dist.barrier()  # gloo: a rank that leaves early may abort the others
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
