"""Generation: one token after another, each from the state that the one before left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class GenerationError(Exception):
    """The model's scores cannot be drawn from."""


@dataclass(frozen=True)
class Draw:
    """How a token is drawn from the scores.

    Args:
        temperature: divides the scores; 0 takes the most likely token.
        top_k: draw from the k most likely only; 0: from all.
        seed: of the draws; the same seed, weights and prompt give the same tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    seed: int = 0


@torch.no_grad()
def next_scores(model: nn.Module, tokens: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(scores [V] after the last of `tokens`, int64 [1, T]; the state there), going on from `state`."""
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
    """Token ids that follow `prompt`, without end.

    A model with state reads the prompt in cells of `cell` tokens and then each new token alone, with the state carried
    on; what it computes is what one uncut forward pass would give. A model without state is shown the last `cell` tokens
    each time, as many as it was trained on.

    Args:
        model: as `trainer.model.protocol` describes it, in evaluation mode.
        prompt: at least one id; the one that begins a document first.
        forbidden: ids that are never drawn, such as the one that begins documents.

    Raises:
        GenerationError: every score that may be drawn is NaN or minus infinity.
    """
    generator = torch.Generator().manual_seed(draw.seed)
    carries = bool(getattr(model, "state_width", 0))
    seen, state = list(prompt), None
    fresh = seen
    while True:
        # Without a state the window is all that the model knows.
        pieces = _cells(fresh, cell) if carries else [seen[-cell:]]
        for piece in pieces:
            scores, state = next_scores(model, torch.tensor([piece], device=device), state)
        token = draw_token(scores, draw, forbidden, generator)
        yield token
        fresh = [token]
        seen = fresh if carries else [*seen[-cell:], token]


def _cells(tokens: Sequence[int], cell: int) -> list[Sequence[int]]:
    return [tokens[start : start + cell] for start in range(0, len(tokens), cell)]


def draw_token(scores: Tensor, draw: Draw, forbidden: Sequence[int], generator: torch.Generator) -> int:
    """One id from scores [V].

    Raises:
        GenerationError: as `generate`.
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
    # The largest is taken off first: a tiny temperature would overflow otherwise.
    probabilities = ((allowed - allowed.max()) / draw.temperature).softmax(0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
