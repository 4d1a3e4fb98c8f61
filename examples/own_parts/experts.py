"""A mixture of experts with a balance loss: train --config experts.toml.

`loss_keys` and `metric_keys` name the losses and metrics in the model's output. The run trains on
the loss with the weight that `[objective.losses]` gives it, and reports `objective/balance` and
`moe/*`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.metrics.catalog import register
from trainer.metrics.catalog_rows import MetricSpec
from trainer.model.protocol import ModelOutput

register(
    MetricSpec(
        name="moe/max_share",
        unit="fraction",
        description="Share of a row's tokens that the busiest expert gets; mean over rows.",
        healthy="Near 1 / experts.",
        pathological="Near 1: all tokens go to one expert; raise objective.losses.balance.",
        group="Mixture of experts",
        title="Busiest expert",
    ),
    MetricSpec(
        name="moe/router_entropy",
        unit="nats",
        description="Entropy of the router's choice, mean over tokens.",
        healthy="Falls slowly from log(experts).",
        pathological="0 from early on: the router has collapsed.",
        group="Mixture of experts",
        title="Router entropy",
    ),
)


class Experts(nn.Module):
    """Each token goes through the expert that its router prefers (Fedus et al. 2021, Switch
    Transformers)."""

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The output [B, T, D], the router's probabilities and its choices, [B, T, E] both."""
        probabilities = self.router(x).softmax(-1)
        weights, chosen = probabilities.max(-1)  # [B, T]
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens = (chosen == number).nonzero(as_tuple=True)
            # One without tokens runs too: every parameter needs a gradient under DDP and FSDP.
            out = out.index_put(tokens, (weights[tokens][:, None] * expert(x[tokens])).to(out.dtype))
        return out, probabilities, nn.functional.one_hot(chosen, len(self.experts)).to(probabilities)


class MixtureModel(nn.Module):
    """A GRU, whose state is carried, with experts behind it."""

    loss_keys = {"balance": "tokens"}  # noqa: RUF012 - by "tokens": [B, T] or []; by "rows": [B]
    metric_keys = ("moe/max_share", "moe/router_entropy")

    def __init__(self, vocab_size: int, dim: int, num_experts: int) -> None:
        super().__init__()
        self.state_width = dim
        self.embedding = nn.Embedding(vocab_size, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.mixture = Experts(dim, num_experts)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
        """Logits [B, T, V] of int64 [B, T] tokens, the state after the last token, losses and
        metrics."""
        hidden, last = self.gru(self.embedding(tokens), None if state is None else state[None].contiguous())
        mixed, probabilities, choices = self.mixture(hidden)
        shares = choices.mean(1, keepdim=True)  # [B, 1, E], of a row's tokens
        # Its mean over tokens is E sum_e f_e P_e, 1 in balance. Within a row it does not depend on
        # how rows are batched.
        balance = probabilities.shape[-1] * (shares * probabilities).sum(-1)  # [B, T]
        metrics = {
            "moe/max_share": shares.amax(-1).mean(),
            "moe/router_entropy": torch.special.entr(probabilities).sum(-1).mean(),
        }
        return ModelOutput(self.head(hidden + mixed), last[0], {"balance": balance}, metrics)


def build_model(vocab_size: int, dim: int, num_layers: int, *, num_experts: int = 4) -> nn.Module:
    """`[model] target`."""
    if num_layers != 1:
        raise ValueError(f"this model has one layer, the config asks for {num_layers}")
    return MixtureModel(vocab_size, dim, num_experts)
