"""The objective against its formulas, written out token by token, and its composition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.objective import Objective, ObjectiveError, token_type_sums
from trainer.options import CoordOptions, ObjectiveOptions

VOCAB = 12
COORD = CoordOptions(first_token=4, num_bins=6, sigma=0.8, weight=0.5)


def batch(seed: int = 0, masked: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(2, 9, VOCAB, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (2, 9), generator=generator)
    targets[torch.rand(2, 9, generator=generator) < masked] = -100
    return logits.requires_grad_(), targets


def coord_by_hand(logits: list[float], target: int, settings: CoordOptions) -> float:
    """The component for one token, in plain Python."""
    true_bin = target - settings.first_token
    bins = range(settings.num_bins)
    weights = [math.exp(logits[settings.first_token + j]) for j in bins]
    p = [w / sum(weights) for w in weights]
    soft = [math.exp(-((j - true_bin) ** 2) / (2 * settings.sigma**2)) for j in bins]
    cross_entropy = -sum(s / sum(soft) * math.log(p[j]) for j, s in enumerate(soft))
    # 1-Wasserstein as the area between the two cumulative distributions, the other way to compute it.
    area = sum(abs(sum(p[: j + 1]) - (1.0 if j >= true_bin else 0.0)) for j in bins)
    return settings.weight * (cross_entropy + area / settings.num_bins)


def test_token_ce_equals_torchs_cross_entropy() -> None:
    logits, targets = batch()
    out = Objective()(logits, targets)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    torch.testing.assert_close(out.token_loss.flatten(), expected.detach())
    torch.testing.assert_close(out.loss_sum, expected.sum())
    assert out.num_tokens == (targets != -100).sum()
    assert list(out.parts) == ["token_ce"]
    grads = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (out.loss_sum, expected.sum())]
    torch.testing.assert_close(*grads)


def test_z_loss_is_the_squared_normaliser_of_unmasked_targets() -> None:
    logits, targets = batch()
    out = Objective(ObjectiveOptions(z_loss=0.01))(logits, targets)
    expected = sum(
        0.01 * math.log(sum(math.exp(x) for x in row)) ** 2
        for row, target in zip(logits.flatten(0, 1).tolist(), targets.flatten().tolist(), strict=True)
        if target != -100
    )
    assert out.parts["z_loss"].sum.item() == pytest.approx(expected)
    assert out.parts["z_loss"].num_tokens == out.num_tokens


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    first=st.integers(0, 8),
    num_bins=st.integers(2, 12),
    sigma=st.floats(0.3, 5.0),
    weight=st.floats(0.01, 3.0),
)
def test_coord_equals_its_formula(seed: int, first: int, num_bins: int, sigma: float, weight: float) -> None:
    coord = CoordOptions(first_token=first, num_bins=min(num_bins, VOCAB - first), sigma=sigma, weight=weight)
    logits, targets = batch(seed)
    part = Objective(ObjectiveOptions(coord=coord))(logits, targets).parts["coord"]
    by_hand = [
        coord_by_hand(row, target, coord)
        for row, target in zip(logits.flatten(0, 1).tolist(), targets.flatten().tolist(), strict=True)
        if first <= target < first + coord.num_bins
    ]
    assert part.num_tokens == len(by_hand)
    assert part.sum.item() == pytest.approx(sum(by_hand), rel=1e-9, abs=1e-12)


def test_parts_add_up_to_the_loss_and_are_detached() -> None:
    logits, targets = batch()
    objective = Objective(ObjectiveOptions(z_loss=0.1, coord=COORD))
    out = objective(logits, targets)
    assert tuple(out.parts) == ("token_ce", "z_loss", "coord")
    torch.testing.assert_close(out.loss_sum.detach(), torch.stack([p.sum for p in out.parts.values()]).sum())
    assert not any(part.sum.requires_grad for part in out.parts.values())


def test_fully_masked_batch_costs_nothing_and_has_zero_gradients() -> None:
    logits, targets = batch(masked=1.1)
    out = Objective(ObjectiveOptions(z_loss=0.1, coord=COORD))(logits, targets)
    out.loss_sum.backward()
    assert out.loss_sum == 0
    assert out.num_tokens == out.is_correct.sum() == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_half_precision_logits_are_summed_in_float32() -> None:
    logits, targets = batch()
    low = logits.detach().to(torch.bfloat16)
    out = Objective(ObjectiveOptions(z_loss=0.1, coord=COORD))(low, targets)
    exact = Objective(ObjectiveOptions(z_loss=0.1, coord=COORD))(low.double(), targets)
    assert out.loss_sum.dtype == torch.float32
    assert out.loss_sum.item() == pytest.approx(exact.loss_sum.item(), rel=1e-6)


def test_non_finite_logits_give_a_non_finite_loss_and_no_error() -> None:
    logits = torch.full((1, 1, VOCAB), float("nan"))
    assert Objective(ObjectiveOptions(z_loss=0.1, coord=COORD))(logits, torch.tensor([[5]])).loss_sum.isnan()


def test_the_weight_of_the_cross_entropy_is_that_of_its_part_alone() -> None:
    half, whole = (Objective(ObjectiveOptions(token_ce=weight))(*batch()) for weight in (0.5, 1.0))
    assert (half.loss_sum, half.parts["token_ce"].sum) == (0.5 * whole.loss_sum, 0.5 * whole.loss_sum)
    assert torch.equal(half.token_loss, whole.token_loss)


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_sum_over_another_number_of_tokens_is_no_loss_and_other_outputs_no_scores(wrong: int) -> None:
    logits, targets = batch()
    num_tokens = int((targets != -100).sum()) + wrong
    out = Objective(own=lambda given, _: (given.sum(), num_tokens), vocab_size=VOCAB + wrong)(logits, targets)
    assert (bool(out.loss_sum.isnan()), out.is_correct is None, out.token_loss) == (bool(wrong), bool(wrong), None)


def test_bins_beyond_the_vocabulary_raise_with_the_component_and_the_batch() -> None:
    objective = Objective(ObjectiveOptions(coord=CoordOptions(first_token=10, num_bins=3, sigma=1.0)))
    logits, targets = batch()
    with pytest.raises(ObjectiveError, match=r"coord: bins end at token 12, .* at 11; batch: .\"source"):
        objective(logits, targets, meta='{"source": "a"}')


def test_logits_that_do_not_fit_the_targets_raise() -> None:
    with pytest.raises(ObjectiveError, match=r"token_ce: logits \(1, 3, 12\) .* \(1, 4\); batch: unknown"):
        Objective()(torch.zeros(1, 3, VOCAB), torch.zeros(1, 4, dtype=torch.int64))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(types=st.lists(st.integers(-1, 4), min_size=1, max_size=30), seed=st.integers(0, 99))
def test_sums_equal_a_loop_over_the_tokens(types: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    loss = torch.rand(1, len(types), generator=generator)
    correct = torch.rand(1, len(types), generator=generator) < 0.5
    everywhere = torch.ones_like(correct)
    sums = token_type_sums(loss, correct, torch.tensor([types], dtype=torch.int8), 4, mask=everywhere)
    for kind in range(4):
        members = [i for i, other in enumerate(types) if other == kind]
        assert sums.num_tokens[kind] == len(members)
        assert sums.num_correct[kind] == sum(bool(correct[0, i]) for i in members)
        assert sums.loss[kind].item() == pytest.approx(sum(loss[0, i].item() for i in members), rel=1e-5)
