"""Autoregressive generation, with the recurrent state carried from token to token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class GenerationError(Exception):
    """No token can be sampled from the model's scores."""


@dataclass(frozen=True)
class Draw:
    """Sampling settings.

    Args:
        temperature: divides the scores; 0 takes the most likely token.
        top_k: sample from the k most likely tokens only; 0: from all.
        seed: sampling seed; the same seed, weights and prompt give the same tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    seed: int = 0


@torch.no_grad()
def next_scores(model: nn.Module, tokens: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scores [V] and state after the last of `tokens` (int64 [1, T]), starting from `state`."""
    output: Any = model(tokens=tokens, state=state)
    return output.logits[0, -1], output.state


def generate(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    draw: Draw,
    cell: int,
    forbidden: Sequence[int] = (),
    device: torch.device | str = "cpu",
) -> Iterator[int]:
    """Yield the token ids that follow `prompt`, without end.

    A model with state reads the prompt in cells of `cell` tokens, then each new token alone with the state carried over,
    which equals one uncut forward pass. A model without state sees the last `cell` tokens each time, the length that it
    was trained on.

    Args:
        model: implements `trainer.model.protocol`, in evaluation mode.
        prompt: at least one id, starting with the id that begins a document.
        forbidden: ids that are never sampled, such as the one that begins documents.

    Raises:
        GenerationError: every allowed score is NaN or minus infinity.
    """
    generator = torch.Generator().manual_seed(draw.seed)
    carries = bool(getattr(model, "state_width", 0))
    seen, state = list(prompt), None
    fresh = seen
    while True:
        if carries:
            pieces = [fresh[start : start + cell] for start in range(0, len(fresh), cell)]
        else:
            pieces = [seen[-cell:]]
        for piece in pieces:
            scores, state = next_scores(model, torch.tensor([piece], device=device), state)
        token = draw_token(scores, draw, forbidden, generator)
        yield token
        fresh = [token]
        seen = fresh if carries else [*seen[-cell:], token]


def draw_token(scores: Tensor, draw: Draw, forbidden: Sequence[int], generator: torch.Generator) -> int:
    """Sample one id from scores [V].

    Raises:
        GenerationError: every allowed score is NaN or minus infinity.
    """
    allowed = scores.detach().to("cpu", torch.float64, copy=True)
    allowed[list(forbidden)] = -torch.inf
    if not torch.isfinite(allowed.max()):
        raise GenerationError(f"the model's scores are not finite (the largest is {float(allowed.max())})")
    if draw.temperature == 0:
        return int(allowed.argmax())
    if 0 < draw.top_k < len(allowed):
        best = allowed.topk(draw.top_k)
        allowed = torch.full_like(allowed, -torch.inf).scatter(0, best.indices, best.values)
    # Subtract the maximum first: a tiny temperature would overflow otherwise.
    probabilities = ((allowed - allowed.max()) / draw.temperature).softmax(0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
