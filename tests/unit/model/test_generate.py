"""Generation against the uncut forward pass, and what the draws promise."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainer.extensions.samples import Draw, GenerationError, draw_token, generate
from trainer.model import build
from trainer.model.protocol import ModelOutput

VOCABULARY = 31


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return build(VOCABULARY, dim=24, num_layers=3).double().eval()


class Window(nn.Module):
    """Without state: predicts the sum of all that it is shown."""

    state_width = 0

    def forward(self, tokens, state=None):
        assert state is None
        target = tokens.sum(1) % VOCABULARY
        return ModelOutput(nn.functional.one_hot(target, VOCABULARY).double()[:, None] * 100, None)


@settings(max_examples=20, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20),
    cell=st.integers(1, 9),
    seed=st.integers(0, 9),
)
def test_each_token_is_drawn_from_what_the_uncut_forward_says(prompt, cell, seed):
    model, draw = make_model(), Draw(temperature=0.8, top_k=5, seed=seed)
    written = list(itertools.islice(generate(model, prompt, draw=draw, cell=cell, forbidden=[0]), 12))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for position, token in enumerate(written):
            uncut = model(tokens=torch.tensor([[*prompt, *written[:position]]])).logits[0, -1]
            assert draw_token(uncut, draw, [0], generator) == token


def test_a_model_without_state_is_shown_the_last_tokens():
    written = list(itertools.islice(generate(Window(), [1, 2, 3], draw=Draw(temperature=0), cell=3), 5))
    assert written == [6, 11, 20, 37 % VOCABULARY, (11 + 20 + 6) % VOCABULARY]


def test_the_seed_fixes_the_tokens_and_leaves_torchs_own_generator_alone():
    model = make_model()
    before = torch.get_rng_state()
    runs = [list(itertools.islice(generate(model, [1], draw=Draw(seed=s), cell=4), 20)) for s in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]
    assert torch.equal(before, torch.get_rng_state())


def test_draws_follow_the_scores():
    generator = torch.Generator().manual_seed(0)
    scores = torch.tensor([0.0, 2.0, 1.0, 9.0])

    def shares(draw: Draw) -> list[float]:
        drawn = [draw_token(scores, draw, [3], generator) for _ in range(4000)]
        return [drawn.count(i) / len(drawn) for i in range(4)]

    expected = torch.tensor([0.0, 2.0, 1.0]).div(0.7).softmax(0).tolist()
    assert shares(Draw(temperature=0.7)) == pytest.approx([*expected, 0.0], abs=0.03)
    of_two = torch.tensor([2.0, 1.0]).softmax(0).tolist()
    assert shares(Draw(top_k=2)) == pytest.approx([0.0, of_two[0], of_two[1], 0.0], abs=0.03)
    assert shares(Draw(temperature=0)) == [0.0, 1.0, 0.0, 0.0]
    assert shares(Draw(temperature=1e-300)) == [0.0, 1.0, 0.0, 0.0]


def test_scores_that_are_no_numbers_are_refused():
    with pytest.raises(GenerationError, match="not finite"):
        draw_token(torch.tensor([0.0, float("nan")]), Draw(), [], torch.Generator())
