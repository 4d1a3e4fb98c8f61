"""The encoder: carried state, resets, state layout, initialisation, FLOPs, and its use under torch's transforms."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from trainer.errors import UserError
from trainer.model import RecurrentEncoder, SequenceModel, build

VOCAB = 11


def small(seed: int = 0, dtype: torch.dtype = torch.float64, **options: object) -> RecurrentEncoder:
    torch.manual_seed(seed)
    model = build(VOCAB, 6, 2, **options).to(dtype)
    with torch.no_grad():
        # Larger weights make the state matter more to the logits.
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)
    return model


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(length))


def test_model_meets_the_protocol() -> None:
    assert isinstance(build(VOCAB, 4, 1), SequenceModel)


def test_state_decides_the_logits() -> None:
    model, row = small(), tokens(2, 5)
    state = torch.randn(2, model.state_width, dtype=torch.float64)
    assert not torch.allclose(model(row, state).logits, model(row).logits, atol=1e-3)


def test_state_is_laid_out_layer_by_layer() -> None:
    model, row = small(), tokens(1, 4)
    bumped = torch.zeros(1, model.state_width, dtype=torch.float64)
    bumped[:, model.dim :] = 1.0
    base, other = model(row), model(row, bumped)
    assert model.state_width == model.num_layers * model.dim
    # Layer 1's initial state cannot reach layer 0's final state.
    assert torch.equal(base.state[:, : model.dim], other.state[:, : model.dim])
    assert not torch.allclose(base.state[:, model.dim :], other.state[:, model.dim :])


def test_packed_row_equals_its_documents_alone() -> None:
    model, row = small(), tokens(1, 12)
    resets = torch.zeros(1, 12, dtype=torch.bool)
    resets[0, [0, 5, 6]] = True
    state = torch.randn(1, model.state_width, dtype=torch.float64)
    packed = model(row, state, resets)
    alone = [model(row[:, start:stop]) for start, stop in ((0, 5), (5, 6), (6, 12))]
    torch.testing.assert_close(packed.logits, torch.cat([o.logits for o in alone], 1), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(packed.state, alone[-1].state, rtol=1e-10, atol=1e-10)


def test_logits_never_see_later_tokens() -> None:
    model, row = small(), tokens(1, 9)
    changed = row.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % VOCAB
    before, after = model(row).logits, model(changed).logits
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(before[:, 5], after[:, 5])


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_every_parameter_gets_a_gradient(tie_embeddings: bool) -> None:
    model = small(tie_embeddings=tie_embeddings)
    model(tokens(2, 7)).logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert (model.head.weight is model.embedding.weight) == tie_embeddings


def test_seed_fixes_the_weights() -> None:
    torch.manual_seed(3)
    first = build(VOCAB, 8, 2).state_dict()
    torch.manual_seed(3)
    second = build(VOCAB, 8, 2).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    third = build(VOCAB, 8, 2).state_dict()
    assert not torch.equal(first["embedding.weight"], third["embedding.weight"])


def test_initial_decays_lie_in_their_range_and_residual_outputs_are_smaller() -> None:
    torch.manual_seed(0)
    model = build(VOCAB, 64, 8)
    recurrence, mlp = model.blocks[3].recurrence, model.blocks[3].mlp
    decays = torch.exp(-4.0 * torch.nn.functional.softplus(recurrence.decay))
    assert 0.9 <= decays.min() < 0.92
    assert 0.98 < decays.max() <= 0.9991
    assert recurrence.values.weight.std().item() == pytest.approx(64**-0.5, rel=0.1)
    assert recurrence.out.weight.std().item() == pytest.approx(64**-0.5 / 4, rel=0.1)
    assert mlp.out.weight.std().item() == pytest.approx(128**-0.5 / 4, rel=0.1)


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_flops_per_token_equal_torchs_count_of_matrix_products(tie_embeddings: bool) -> None:
    torch.manual_seed(0)
    model = build(29, 16, 3, mlp_ratio=1.5, tie_embeddings=tie_embeddings)
    batch = torch.randint(0, 29, (2, 10))
    with FlopCounterMode(display=False) as counter:
        model(batch).logits.sum().backward()
    scan = 5 * model.num_layers * model.dim
    assert model.flops_per_token(10) == counter.get_total_flops() / batch.numel() + scan


def test_activation_checkpointing_changes_nothing() -> None:
    model, row = small(), tokens(2, 9)
    state = torch.randn(2, model.state_width, dtype=torch.float64)
    plain = model(row, state)
    plain.logits.square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    redone = checkpoint(model, row, state, use_reentrant=False)
    redone.logits.square().sum().backward()
    assert torch.equal(plain.logits, redone.logits)
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


def test_compiled_graph_is_whole_and_equal() -> None:
    # The aot_eager backend traces forward and backward as inductor would, without needing a C++ compiler.
    torch._dynamo.reset()
    model, row = small(), tokens(2, 9)
    state = torch.randn(2, model.state_width, dtype=torch.float64)
    plain = model(row, state)
    plain.logits.square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(row, state)
    compiled.logits.square().sum().backward()
    torch.testing.assert_close(compiled.logits, plain.logits, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close([p.grad for p in model.parameters()], expected, rtol=1e-9, atol=1e-9)


def test_autocast_keeps_the_state_and_the_scan_in_float32() -> None:
    model, row = small(dtype=torch.float32), tokens(2, 33)
    exact = model(row)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = model(row)
        first = model(row[:, :16])
        second = model(row[:, 16:], first.state)
    assert whole.logits.dtype == torch.bfloat16
    assert whole.state.dtype == torch.float32
    torch.testing.assert_close(whole.state, second.state, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole.state, exact.state, rtol=0.3, atol=0.3)
    whole.logits.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocab_size": 0}, r"model\.vocab_size: must be >= 1, got 0"),
        ({"dim": 0}, r"model\.dim: must be >= 1, got 0"),
        ({"num_layers": -1}, r"model\.num_layers: must be >= 1, got -1"),
        ({"mlp_ratio": 0.0}, r"model\.mlp_ratio: must give an MLP width of at least 1"),
    ],
)
def test_impossible_sizes_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(**{"vocab_size": 5, "dim": 4, "num_layers": 1, **arguments})
