"""The Transformer: documents apart, grouped heads, and generation from a cache."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trainer.errors import UserError
from trainer.extensions.samples import Draw, generate
from trainer.model.transformer import build


def small(**settings: object):
    torch.manual_seed(0)
    return build(29, 32, 2, **{"heads": 4, "kv_heads": 2, **settings}).double()


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


def test_grouped_heads_are_heads_with_equal_keys_and_values():
    grouped, full = small(), small(kv_heads=4)
    weights = grouped.state_dict()
    for name, weight in weights.items():
        if name.endswith(("attention.keys.weight", "attention.values.weight")):
            weights[name] = weight.unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    tokens = torch.arange(20).reshape(2, 10)
    torch.testing.assert_close(full(tokens).logits, grouped(tokens).logits)


@pytest.mark.parametrize("pieces", [(12,), (1,) * 12, (5, 1, 4, 2)])
def test_a_cache_gives_the_scores_of_the_uncut_row(pieces):
    model = small().eval()
    tokens, cache, start, found = torch.arange(12)[None] % 29, model.new_cache(), 0, []
    for piece in pieces:
        found.append(model(tokens[:, start : start + piece], cache=cache).logits)
        start += piece
    torch.testing.assert_close(torch.cat(found, dim=1), model(tokens).logits, rtol=1e-10, atol=1e-10)


def test_samples_read_each_token_once_until_the_window_is_full():
    model, lengths = small().eval(), []
    model.register_forward_pre_hook(lambda _, args, given: lengths.append(given["tokens"].shape[1]), with_kwargs=True)
    prompt, draw = [3, 1, 4, 1, 5], Draw(temperature=0)
    sampled = list(itertools.islice(generate(model, prompt, draw=draw, cell=16), 30))
    # 5 of the prompt, 11 more until 16 are held; then the last 8 are read again, and 8 more alone.
    assert lengths == [5, *[1] * 11, 8, *[1] * 8, 8, *[1] * 8]
    seen = list(prompt)
    for token in sampled[:12]:
        assert token == int(model(tokens=torch.tensor([seen])).logits[0, -1].argmax())
        seen.append(token)


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_flops_per_token_equal_torchs_count(tie_embeddings):
    model, batch = small(kv_heads=4, tie_embeddings=tie_embeddings), torch.randint(0, 29, (2, 16))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(batch).logits.sum().backward()
    assert model.flops_per_token(16) == counter.get_total_flops() / batch.numel()


@pytest.mark.parametrize(("settings", "key"), [({"heads": 5}, "heads"), ({"heads": 4, "kv_heads": 3}, "kv_heads")])
def test_sizes_that_do_not_divide_are_refused(settings, key):
    with pytest.raises(UserError, match=f"model.args.{key}"):
        build(29, 32, 2, **settings)
