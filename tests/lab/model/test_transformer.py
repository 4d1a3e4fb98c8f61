"""The Transformer: documents apart, grouped heads, a cache; generation against the uncut forward pass, and its draws."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.support.on_device import saved_bytes
from trainer.lab import gated_delta, transformer
from trainer.lab.samples import Draw, draw_token, generate
from trainer.lab.transformer import build as build_transformer
from trainer.lab.transformer import document_mask
from trainer.model import build
from trainer.model.protocol import ModelOutput


def small(**settings: object):
    torch.manual_seed(0)
    return build_transformer(29, 32, 2, **{"heads": 4, "kv_heads": 2, **settings}).double()


def test_packed_documents_equal_the_same_run_apart():
    model, generator = small(), torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 29, (3, 40), generator=generator)
    resets = torch.rand(3, 40, generator=generator) < 0.15
    packed = model(tokens, resets=resets).logits
    for row in range(3):
        bounds = sorted({0, 40, *resets[row].nonzero()[:, 0].tolist()})
        for start, stop in itertools.pairwise(bounds):
            alone = model(tokens[row : row + 1, start:stop]).logits
            torch.testing.assert_close(packed[row : row + 1, start:stop], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_attention_in_blocks_equals_the_mask(monkeypatch, kv_heads):
    """Forward only: on CPUs flex attention has no backward (tests/cuda/test_parts.py)."""
    model, generator = small(kv_heads=kv_heads), torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 29, (2, 300), generator=generator)
    resets = torch.rand(2, 300, generator=generator) < 0.02
    with torch.no_grad():
        expected = model(tokens, resets=resets).logits
        monkeypatch.setattr(
            transformer, "document_mask", lambda resets, in_blocks: document_mask(resets, in_blocks=True)
        )
        monkeypatch.setattr(transformer, "compiled_attention", lambda: transformer.flex_attention)
        torch.testing.assert_close(model(tokens, resets=resets).logits, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("make", "length", "most"),
    [(build_transformer, 64, 40.5), (build, 64, 62.5), (gated_delta.build, 64, 119), (gated_delta.build, 65, 136)],
)
def test_kept_bytes_per_token_layer_and_channel(make, length, most):
    """Under bf16; the difference of two batches leaves out the weights' copies."""

    def kept(rows: int, layers: int) -> int:
        with torch.autocast("cpu", torch.bfloat16):
            return saved_bytes(make(29, 64, layers), torch.zeros(rows, length, dtype=torch.int64))

    per_layer = [kept(rows, 3) - kept(rows, 1) for rows in (2, 6)]
    assert (per_layer[1] - per_layer[0]) / (2 * 4 * length * 64) < most


def test_grouped_heads_are_heads_with_equal_keys_and_values():
    grouped, full = small(), small(kv_heads=4)
    weights = grouped.state_dict()
    for name, weight in weights.items():
        if name.endswith("attention.inputs.weight"):
            queries, *others = weight.unflatten(0, (8, 8)).split((4, 2, 2))
            weights[name] = torch.cat([queries, *(each.repeat_interleave(2, dim=0) for each in others)]).flatten(0, 1)
    full.load_state_dict(weights)
    tokens = torch.arange(20).reshape(2, 10)
    torch.testing.assert_close(full(tokens).logits, grouped(tokens).logits)


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_flops_per_token_equal_torchs_count(tie_embeddings):
    model, batch = small(kv_heads=4, tie_embeddings=tie_embeddings), torch.randint(0, 29, (2, 16))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(batch).logits.sum().backward()
    assert model.flops_per_token(16) == counter.get_total_flops() / batch.numel()


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
    written = list(
        itertools.islice(generate(model, prompt, draw=draw, cell=cell, below=VOCABULARY - 2, eod=VOCABULARY - 1), 12)
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for position, token in enumerate(written):
            uncut = model(tokens=torch.tensor([[*prompt, *written[:position]]])).logits[0, -1]
            uncut[VOCABULARY - 2] = -torch.inf
            assert draw_token(uncut.double(), draw, generator) == token


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
    scores = torch.tensor([0.0, 2.0, 1.0, -torch.inf], dtype=torch.float64)

    def shares(draw: Draw) -> list[float]:
        drawn = [draw_token(scores, draw, generator) for _ in range(4000)]
        return [drawn.count(i) / len(drawn) for i in range(4)]

    expected = torch.tensor([0.0, 2.0, 1.0]).div(0.7).softmax(0).tolist()
    assert shares(Draw(temperature=0.7)) == pytest.approx([*expected, 0.0], abs=0.03)
    of_two = torch.tensor([2.0, 1.0]).softmax(0).tolist()
    assert shares(Draw(top_k=2)) == pytest.approx([0.0, of_two[0], of_two[1], 0.0], abs=0.03)
    assert shares(Draw(temperature=0)) == [0.0, 1.0, 0.0, 0.0]
    assert shares(Draw(temperature=1e-300)) == [0.0, 1.0, 0.0, 0.0]
