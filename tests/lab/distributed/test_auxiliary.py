"""Losses of a model's output: any layout is one big batch, and the noise scale is that of all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.gloo import make_step, run_on_ranks
from trainer.config.schema import RunConfig
from trainer.data.loader import MicroBatch
from trainer.distributed.strategy import Layout, Replicated, Strategy
from trainer.lab.auxiliary import AuxiliaryLoss, AuxiliaryLosses
from trainer.lab.sharding import Sharded
from trainer.metrics.gradient_noise import GradientNoiseScale
from trainer.model.protocol import ModelOutput
from trainer.objective import Objective
from trainer.options import ObjectiveOptions
from trainer.training.extension import StepOutcome

CPU = torch.device("cpu")
CONFIG = RunConfig.model_validate({"train": {"steps": 1}, "data": {"source": [{"name": "a", "root": "a"}]}})
VOCABULARY, LENGTH, EXPERTS = 11, 12, 3
LENGTHS = (12, 1, 7, 3, 12, 0, 5, 9)  # of the rows: uneven, and one has nothing to predict
WEIGHTS = {"balance": 0.5, "spread": 0.3, "router": 0.1, "peak": 0.4, "never": 0.0}
BY_ROWS = ("spread", "peak")
CE_WEIGHTS = {"token_ce": 1.0, "half": 0.5, "off": 0.0}
Numbers = tuple[StepOutcome, dict[str, Tensor], dict[str, float]]


class Experts(nn.Module):
    """Has a loss of each shape."""

    state_width = 0

    def __init__(self, poison: float = 1.0) -> None:
        super().__init__()
        self.poison = poison
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.router = nn.Linear(8, EXPERTS)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(EXPERTS))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor, state: None = None) -> ModelOutput:
        x = self.embedding(tokens)
        p = self.router(x).softmax(-1)  # [B, T, E]
        shares = nn.functional.one_hot(p.argmax(-1), EXPERTS).to(p).mean(1, keepdim=True)  # [B, 1, E]
        x = x + torch.stack([p[..., [i]] * block(x) for i, block in enumerate(self.blocks)]).sum(0)
        logits = self.head(x)
        losses = {
            "balance": EXPERTS * (shares * p).sum(-1),  # [B, T]
            "spread": p.mean(1).square().sum(-1) * self.poison,  # [B]
            "router": self.router.weight.square().mean(),  # []
            "peak": logits.amax((1, 2)).square(),  # [B]
            "never": self.router.weight.sum() + torch.inf,  # []
        }
        return ModelOutput(logits, None, losses, {"moe/max_share": shares.max()})


def missed(logits: Tensor, targets: Tensor) -> Tensor:
    return 1 - logits.softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]  # [B, T], also where masked


OBJECTIVES = {name: Objective(ObjectiveOptions(token_ce=weight)) for name, weight in CE_WEIGHTS.items()}
OBJECTIVES["own"] = Objective(own=missed)
OBJECTIVES["sum"] = Objective(own=lambda x, y: (missed(x, y)[y != -100].sum(), (y != -100).sum()))
pytestmark = pytest.mark.parametrize("loss", OBJECTIVES)


def auxiliary() -> AuxiliaryLosses:
    losses = {name: AuxiliaryLoss("rows" if name in BY_ROWS else "tokens", each) for name, each in WEIGHTS.items()}
    return AuxiliaryLosses(losses, ("moe/max_share",))


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(0, VOCABULARY, (2, len(LENGTHS), LENGTH), generator=generator)
    for row, length in enumerate(LENGTHS):
        targets[row, length:] = -100
    return tokens, targets


def sums(kind: str, model: nn.Module, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Each part of the loss summed over tokens or rows, written down plainly."""
    output, mask = model(tokens), targets != -100
    of_rows = mask.any(1)
    cross_entropy = nn.functional.cross_entropy(output.logits[mask], targets[mask], reduction="sum")
    return {
        "first": CE_WEIGHTS[kind] * cross_entropy if kind in CE_WEIGHTS else missed(output.logits, targets)[mask].sum(),
        "balance": output.losses["balance"][mask].sum(),
        "spread": output.losses["spread"][of_rows].sum(),
        "router": output.losses["router"] * mask.sum(),
        "peak": output.losses["peak"][of_rows].sum(),
    }


def mean(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parts of the whole loss, of sums over all rows or some."""
    counts = {name: sum(map(bool, LENGTHS)) if name in BY_ROWS else sum(LENGTHS) for name in parts}
    return {name: WEIGHTS.get(name, 1.0) * value / counts[name] for name, value in parts.items()}


def reference(kind: str) -> tuple[dict[str, float], dict[str, Tensor]]:
    """One big batch."""
    torch.manual_seed(0)
    model = Experts().double()
    parts = mean(sums(kind, model, *rows()))
    torch.stack(list(parts.values())).sum().backward()
    return {name: value.item() for name, value in parts.items()}, {
        name: parameter.grad for name, parameter in model.named_parameters()
    }


def one_step(rank: int, world: int, micros: int, kind: str, loss: str, poison: float = 1.0) -> Numbers:
    """The outcome, the gradient and the parts of the loss on this rank."""
    torch.manual_seed(0)
    model = Experts(poison).double()
    strategy: Strategy = Strategy()
    if world > 1:
        is_sharded = kind == "fsdp"
        strategy = Sharded(Layout(1, world), CONFIG, CPU) if is_sharded else Replicated(world_size=world, device=CPU)
    strategy.shard(model)
    group = torch.distributed.group.WORLD if world > 1 else None
    gns = GradientNoiseScale(model, process_group=group)
    losses = {"objective": OBJECTIVES[loss], "auxiliary": auxiliary()}
    step = make_step(model, strategy, **losses, gns=gns, world_size=world)
    tokens, targets = rows()
    share = len(LENGTHS) // (world * micros)
    parts = [slice(first, first + share) for first in range(rank * micros * share, (rank + 1) * micros * share, share)]
    before = {name: whole(value) for name, value in model.named_parameters()}
    step.accumulate(1, [MicroBatch({"tokens": tokens[part]}, targets[part], None, {}) for part in parts])
    outcome = step.finish(step.launch(lr=1.0))
    change = {name: before[name] - whole(value) for name, value in model.named_parameters()}
    return outcome, change, step.gns.metrics()


def whole(parameter: Any) -> Tensor:
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()


def all_layouts(rank: int, world: int) -> dict[str, list[Numbers]]:
    """By objective; last, steps with a bad number on rank 1."""
    kinds, poison = ("ddp", "fsdp") if world > 1 else ("ddp",), torch.nan if rank == 1 else 1.0
    return {
        loss: [one_step(rank, world, micros, kind, loss) for kind in kinds for micros in (1, 2)]
        + [one_step(rank, world, 2, kind, loss, poison) for kind in kinds if world > 1]
        for loss in OBJECTIVES
    }


RANKS = [
    1,
    pytest.param(2, marks=pytest.mark.distributed),
    pytest.param(4, marks=(pytest.mark.distributed, pytest.mark.slow)),
]


@pytest.fixture(scope="module", params=RANKS)
def layouts(request) -> list[dict[str, list[Numbers]]]:
    """Of each rank."""
    world = request.param
    return [all_layouts(0, 1)] if world == 1 else run_on_ranks(all_layouts, world, torch_keeps_group=True)


def test_any_layout_is_one_big_batch(layouts, loss):
    parts, gradient = reference(loss)
    for steps in layouts:
        for outcome, change, _ in steps[loss][: 4 if len(layouts) > 1 else 2]:
            assert outcome.tokens == sum(LENGTHS)
            assert outcome.loss == pytest.approx(sum(parts.values()), rel=1e-12)
            for name, expected in gradient.items():
                torch.testing.assert_close(change[name], expected, rtol=1e-9, atol=1e-12)


def test_a_bad_number_in_one_of_them_skips_the_step_on_all_ranks(layouts, loss):
    for steps in layouts if len(layouts) > 1 else ():
        for outcome, change, _ in steps[loss][4:]:
            assert not outcome.is_finite
            assert all(not value.any() for value in change.values())


def test_the_noise_scale_is_that_of_the_whole_loss(layouts, loss):
    """Its two unknowns from the inner products of micro-batches and from their squares."""
    torch.manual_seed(0)
    model, world = Experts().double(), len(layouts)
    tokens, targets = rows()
    share, num = len(LENGTHS) // (2 * world), torch.tensor(LENGTHS, dtype=torch.float64)
    kappas, squares, noises, total = [], [], [], 0.0
    for first in range(0, len(LENGTHS), share):
        part = slice(first, first + share)
        parts = mean(sums(loss, model, tokens[part], targets[part]))
        found = torch.autograd.grad(torch.stack(list(parts.values())).sum(), list(model.parameters()))
        flat = torch.cat([each.flatten() for each in found])
        total = total + flat
        if (weight := num[part].sum() / num.sum()) > 0:
            kappas.append(weight)
            squares.append((flat / weight).square().sum())
            noises.append(num[part].square().sum() / num[part].sum().square())
    kappa, square, noise = map(torch.stack, (kappas, squares, noises))
    own, pairs = (kappa.square() * square).sum(), 1 - kappa.square().sum()
    grad_sq = (total.square().sum() - own) / pairs
    tr_sigma = float((own - grad_sq * kappa.square().sum()) / (kappa.square() * noise).sum())
    for steps in layouts:
        for index in (1, 3) if world > 1 else (1,):
            assert steps[loss][index][2]["gns/tr_sigma"] == pytest.approx(tr_sigma, rel=1e-9)
