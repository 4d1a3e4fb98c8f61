"""Ways of training that the noise scale's hooks must see exactly, the loop that does so, and the truth from backwards apart."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from trainer.metrics import gradient_noise, noise_scale
from trainer.metrics.gradient_noise import GradientNoiseScale
from trainer.metrics.noise_scale import Absent, Window

VOCAB = 40
TOKENS = 3  # a row
KAPPA0 = 2.0**-7  # what a sum of weighted losses is multiplied by; a power of two, which bf16 does not round


class Net(nn.Module):
    """Embedding, one wide hidden layer, output; what is tied, frozen, unused or checkpointed is an argument."""

    def __init__(
        self, *, tied: bool = False, frozen: bool = False, unused: bool = False, reentrant: bool | None = None
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 24)
        self.body = nn.Sequential(nn.Linear(24, 90), nn.Tanh(), nn.Linear(90, 24))
        self.head = nn.Linear(24, VOCAB, bias=False)
        self.reentrant = reentrant
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            self.body[0].weight.requires_grad_(False)
        if unused:
            self.unused = nn.Linear(24, 500)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + (self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant))
        return self.head(x)


@dataclass(frozen=True)
class Case:
    """One way of training."""

    make: Callable[[], nn.Module] = Net
    ddp: dict[str, bool] = field(default_factory=dict)
    is_weighted: bool = True
    """Rows weigh differently and one micro-batch is empty; false: four equal rows and a mean loss over m."""
    has_scaler: bool = False
    autocast: bool = False
    backend: str | None = None
    """Of torch.compile."""


CASES = {
    "equal rows": Case(is_weighted=False),
    "weighted rows, unequal micro-batches, one empty": Case(),
    "a GradScaler at 65536": Case(has_scaler=True),
    "bf16 autocast": Case(autocast=True),
    "bf16 autocast and a GradScaler": Case(autocast=True, has_scaler=True),
    "tied": Case(lambda: Net(tied=True)),
    "frozen": Case(lambda: Net(frozen=True)),
    "unused": Case(lambda: Net(unused=True), {"find_unused_parameters": True}),
    "reentrant checkpointing": Case(lambda: Net(reentrant=True)),
    "checkpointing": Case(lambda: Net(reentrant=False)),
    "checkpointing under autocast": Case(lambda: Net(reentrant=False), autocast=True),
    "gradient_as_bucket_view": Case(ddp={"gradient_as_bucket_view": True}),
    "static_graph": Case(ddp={"static_graph": True}),
    "static_graph, views and checkpointing": Case(
        lambda: Net(reentrant=True), {"static_graph": True, "gradient_as_bucket_view": True}
    ),
    "torch.compile, tied, under autocast": Case(lambda: Net(tied=True), backend="aot_eager", autocast=True),
}


def make_net(case: Case) -> nn.Module:
    """The same weights on every rank and every time."""
    torch.manual_seed(3)
    return case.make()


def micro_batch(case: Case, world_size: int, m: int, rank: int, k: int) -> tuple[Tensor, Tensor]:
    """[B, TOKENS + 1] token ids and [B] float64 weights of a rank's micro-batch k."""
    rng = torch.Generator().manual_seed(1000 * rank + k)
    rows = 1 + (rank + 2 * k) % 4 if case.is_weighted else 4
    tokens = torch.randint(VOCAB, (rows + 1, TOKENS + 1), generator=rng)
    weights = torch.randint(1, 30, (rows + 1,), generator=rng).double()
    if not case.is_weighted:
        return tokens[:rows], torch.ones(rows, dtype=torch.float64)
    weights[0] = 0.0
    if (rank, k) == (world_size - 1, m - 1) and world_size * m > 2:
        weights.zero_()
    return tokens, weights


def case_loss(case: Case, model: nn.Module, tokens: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over rows of the row's mean loss."""
    with torch.autocast("cpu", torch.bfloat16) if case.autocast else contextlib.nullcontext():
        logits = model(tokens[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    return (weights.float() * losses.view(-1, TOKENS).mean(1)).sum()


@dataclass(frozen=True)
class Norms:
    """The sums of a window over the square of its sum of kappa, with that of the big gradient."""

    values: tuple[float, ...]
    tr_sigma: float = math.nan
    grad_sq: float = math.nan


Windows = dict[int, list[tuple[Norms, Window | Absent]]]
"""By the number of their micro-batches."""


def separate_backwards(case: Case, world_size: int, m: int) -> Norms:
    """From the gradient of every micro-batch's mean loss, each from a fresh model of its own."""
    gradients, kappas, noises = [], [], []
    for rank in range(world_size):
        for k in range(m):
            tokens, weights = micro_batch(case, world_size, m, rank, k)
            model = make_net(case)
            case_loss(case, model, tokens, weights).backward()
            total = float(weights.sum())
            flat = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
            gradients.append(torch.cat(flat) / max(total, 1.0))
            kappas.append(total if case.is_weighted else 1.0)
            noises.append(float(weights.square().sum()) / max(total, 1.0) ** 2)
    return norms_by_definition(torch.stack(gradients), kappas, noises, world_size)


def norms_by_definition(g: Tensor, kappas: Sequence[float], noises: Sequence[float], world_size: int) -> Norms:
    """By their definitions from the mean gradients g [W * m, P], rank after rank."""
    kappa, v = torch.tensor(kappas, dtype=torch.float64), torch.tensor(noises, dtype=torch.float64)
    h = kappa[:, None] * g / kappa.sum()  # [W * m, P]
    share = kappa / kappa.sum()
    m = len(kappas) // world_size
    # The middle groups: each rank's window; on one rank the first half of the window.
    groups = [slice(r * m, r * m + m) for r in range(world_size)] if world_size > 1 else [slice(0, (m + 1) // 2)]
    values = [share.square().sum(), h.square().sum(), (share * v).sum(), (share.square() * v).sum()]
    values += [sum(of[group].square().sum() for group in groups) for of in (share, h)]
    values += [sum(of[group].sum(0).square().sum() for group in groups) for of in (share, h)]
    values.append(h.sum(0).square().sum())
    pairs = ~torch.eye(len(kappas), dtype=torch.bool)
    grad_sq = (h @ h.T)[pairs].sum() / torch.outer(share, share)[pairs].sum()
    tr_sigma = (h.square().sum() - grad_sq * share.square().sum()) / values[3]
    return Norms(tuple(map(float, values)), float(tr_sigma), float(grad_sq))


def differences(norms: Norms, window: Window | Absent, expected: Norms, num_micros: int) -> list[str]:
    """What is not as expected to 1e-5. S and G2 are differences, so their error is relative to what is subtracted."""
    wrong = []
    if norms.values != pytest.approx(expected.values, rel=1e-5):
        wrong.append(f"{norms.values} is not {expected.values}")
    if num_micros == 1:
        return wrong if isinstance(window, Absent) else [*wrong, f"an estimate from one batch size: {window}"]
    own, small, _, noise, *_, big = expected.values
    is_close = (
        isinstance(window, Window)
        and window.tr_sigma == pytest.approx(expected.tr_sigma, abs=2e-5 * (small + own * big) / noise / (1.0 - own))
        and window.grad_sq == pytest.approx(expected.grad_sq, abs=2e-5 * (big + small) / (1.0 - own))
    )
    return wrong if is_close else [*wrong, f"{window} does not follow from {expected}"]


def wrong_windows(
    cases: Mapping[str, Case], measure: Callable[[Case], Windows], rank: int, world_size: int
) -> list[str]:
    """What differs from the separate backwards, by either kind of norms, from rank 0."""
    wrong = []
    for kind, norms_are_taken in (("many at once", norms_of_cuda), ("one by one", contextlib.nullcontext)):
        with norms_are_taken():
            found = {(name, m): windows for name, case in cases.items() for m, windows in measure(case).items()}
        if rank > 0:
            continue
        for (name, m), windows in found.items():
            expected = separate_backwards(cases[name], world_size, m)
            for number, (norms, window) in enumerate(windows):
                where = f"{kind}, {name}, m={m}, window {number}: "
                wrong += [where + text for text in differences(norms, window, expected, world_size * m)]
    return wrong


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate without a reduction, under DDP or FSDP2."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
        return
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def run_window(
    case: Case, model: nn.Module, gns: GradientNoiseScale | None, scaler: torch.amp.GradScaler, rank: int, m: int
) -> None:
    """One window as a user writes it: no_sync for all but the last micro-batch."""
    world_size = dist.get_world_size()
    if gns is not None:
        gns.begin_window(m)
    for k in range(m):
        tokens, weights = micro_batch(case, world_size, m, rank, k)
        kappa = KAPPA0 * weights.sum() if case.is_weighted else 1.0 / m
        last = k == m - 1
        with contextlib.nullcontext() if last else no_sync(model):
            loss = case_loss(case, model, tokens, weights) * (KAPPA0 if case.is_weighted else 1.0 / m / len(weights))
            if gns is not None:
                gns.begin_micro(last)
            scaler.scale(loss).backward()
            if gns is not None:
                gns.end_micro(kappa * scaler.get_scale(), weights if case.is_weighted else len(weights))


def measured(gns: GradientNoiseScale, factor_left: float, *, is_sharded: bool = False) -> tuple[Norms, Window | Absent]:
    """What the window's sums say, reduced over ranks; the gradient was divided by `factor_left` since the backward."""
    sums, square = gns.local_sums(), gns.grad_sq()
    dist.all_reduce(sums)
    if is_sharded:
        dist.all_reduce(square)
    grad_sq = float(square)
    kappa = float(sums[noise_scale.KAPPA])
    factor = kappa / dist.get_world_size() / factor_left
    own, small, small_noise, *others = sums[noise_scale.KAPPA_SQUARE : noise_scale.TOKENS].tolist()
    if others[1] == 0.0:
        others[1:] = [math.nan] * 4
    values = (own / kappa**2, small / kappa**2, small_noise / kappa, *(each / kappa**2 for each in others))
    assert float(sums[noise_scale.FAULTS]) == 0.0
    return Norms((*values, grad_sq / factor**2)), gns.finish(sums.tolist(), grad_sq, grad_factor=factor)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 900), nn.Tanh(), nn.Linear(900, 3))


def rows(seed: int, count: int = 4) -> Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))


def loss_sum(model: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
    return (weights * model(x).square().sum(1)).sum()


def micro(gns: GradientNoiseScale, model: nn.Module, x: Tensor, weights: Tensor, *, last: bool = False) -> None:
    gns.begin_micro(last)
    (0.1 * loss_sum(model, x, weights)).backward()
    gns.end_micro(0.1 * float(weights.sum()), weights)


def window(gns: GradientNoiseScale, model: nn.Module, num_micros: int, first_seed: int = 0) -> None:
    model.zero_grad()
    gns.begin_window(num_micros)
    for k in range(num_micros):
        x = rows(first_seed + k)
        micro(gns, model, x, torch.tensor([1.0, 2.0, 0.0, 5.0 + k]), last=k == num_micros - 1)


@contextlib.contextmanager
def norms_of_cuda() -> Iterator[None]:
    """The CPU takes norms as CUDA does: of many gradients at once."""
    gradient_noise.MULTI_TENSOR.add("cpu")
    try:
        yield
    finally:
        gradient_noise.MULTI_TENSOR.remove("cpu")
