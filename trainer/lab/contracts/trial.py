"""Verdicts and their report; tokens, row lengths, the scale of the logits, and rounding."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from trainer.lab.contracts.subject import CallFailed, NotTestable, Subject

Status = Literal["held", "broken", "warning", "not testable here"]

# In the order in which they are reported; docs/contracts.md says what each asserts.
CHECKS: Final = ("forward", "purity", "soak", "carry", "causality", "isolation", "resets", "gradient", "autocast")

NO_STATE: Final = "the model has no state (state_width = 0)"  # so nothing about one is tested
ROWS, CELLS = 2, 3  # of a short row
CELL_LENGTHS = (6, 4, 16, 32, 64, 128, 256)
LARGEST_STEP = 0.01  # relative change of the parameters, of which the logits are a linear function
FINE_STEPS = 1e-6, 1e-10  # the same, of which float32 rounds away the second
CHAOS = 0.25  # of the logits' spread: a rounding that has grown to this hides everything


class ContractError(AssertionError):
    """A model breaks the contract; see `Report.raise_if_broken`."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check; a `warning` does no harm in ordinary training."""

    check: str  # of `CHECKS`
    status: Status
    text: str  # what was found, or why nothing could be
    size: float | None = None  # largest deviation, over the spread of the logits; None: none known
    position: int | None = None  # the first wrong one of the row, from 0


def untestable(check: str, why: object) -> Verdict:
    return Verdict(check, "not testable here", str(why))


@dataclass(frozen=True)
class Report:
    """The verdicts of `check_model`, in the order of `CHECKS`."""

    verdicts: tuple[Verdict, ...]
    how: str  # precision, row length and other circumstances of the check
    seconds: float  # that it took

    @property
    def breaches(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.status == "broken"]

    @property
    def warnings(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.status == "warning"]

    @property
    def unchecked(self) -> list[Verdict]:
        """`causality` and, of a model with a state, `carry`, where they could not be judged."""
        main = [v for v in (self["causality"], self["carry"]) if v.status == "not testable here"]
        return [v for v in main if not v.text.startswith(NO_STATE)]

    def __getitem__(self, check: str) -> Verdict:
        return {verdict.check: verdict for verdict in self.verdicts}[check]

    def raise_if_broken(self) -> None:
        """For a user's own tests. Raises ContractError: a check is broken, or could not run."""
        if self.breaches or self.unchecked:
            raise ContractError(str(self))

    def summary(self) -> str:
        """The checks by status, on one line."""
        by_status: dict[str, list[str]] = {}
        for verdict in self.verdicts:
            by_status.setdefault(verdict.status, []).append(verdict.check)
        listed = "; ".join(f"{status}: {', '.join(checks)}" for status, checks in by_status.items())
        return f"{listed} ({self.how})"

    def to_json(self) -> dict[str, Any]:
        verdicts = [asdict(verdict) for verdict in self.verdicts]
        return {"verdicts": verdicts, "how": self.how, "seconds": self.seconds}

    def __str__(self) -> str:
        lines = [f"{verdict.check}: {verdict.status}: {verdict.text}" for verdict in self.verdicts]
        return "\n".join([*lines, f"({self.how}; {self.seconds:.1f} s)"])


class Request(NamedTuple):
    """The arguments of `check_model`."""

    vocab_size: int
    seq_len: int
    autocast: torch.dtype | None
    rows: int
    build: Callable[[], nn.Module] | None
    resets: bool


@dataclass(frozen=True)
class Rounding:
    """The errors of logits that rounding explains, in units of their spread over positions."""

    unit: float  # that spread
    noise: float = math.inf  # the largest error
    horizon: int = sys.maxsize  # tokens of a row that can be compared
    chunk: int = 1  # tokens of a median

    @property
    def limit(self) -> float:
        """Errors above it are wrong: half way, in orders of magnitude, from rounding to 1."""
        return math.sqrt(self.noise)

    def errors(self, found: Tensor, wanted: Tensor) -> Tensor:
        """Errors up to the horizon, [..., T]; with a `chunk`, medians of a row's stretches."""
        errors = relative(found, wanted, self.unit)[..., : self.horizon]
        if self.chunk == 1:
            return errors
        parts = torch.split(errors, self.chunk, dim=-1)
        return torch.cat([part.median(-1, keepdim=True).values.expand_as(part) for part in parts], dim=-1)

    def slope(self, subject: Subject, read: Callable[[], Tensor], wanted: Tensor, step: float) -> float:
        """The largest error of logits, over `step`, if the parameters change by `step`."""
        with subject.perturbed(step):
            return float(self.errors(read(), wanted).max()) / step

    def measured(self, subject: Subject, read: Callable[[], Tensor], wanted: Tensor, eps: float) -> Rounding:
        """As the response of logits [..., T, V] to parameters that change by one rounding.

        Any order of summation gives the exact result of slightly different parameters, so this
        scale holds for all of them. It is measured with a larger change, at which the response is
        linear and well above rounding itself.
        """
        step = min(math.sqrt(eps), LARGEST_STEP)  # between rounding and curvature
        with subject.perturbed(step):
            moved = self.errors(read(), wanted)
        moved = moved.reshape(-1, moved.shape[-1]).amax(0).cummax(0).values  # [T]
        horizon, response = int((moved <= CHAOS).sum()), math.inf
        if horizon:
            response = float(moved[horizon - 1]) * eps / step
        largest = float(wanted.detach().abs().nan_to_num(0, 0, 0).max()) / self.unit
        floor = 2 * eps * min(max(largest, 1.0), 1e3)
        return replace(self, noise=max(response, floor), horizon=horizon)


@dataclass(frozen=True)
class Trial:
    """A model at the precision in which it is judged, and rows for it."""

    subject: Subject  # in float64 where the model runs in it; in eval() if it is random in train()
    request: Request
    cell: int  # tokens; a short row has `CELLS` of them
    takes_cells: bool  # rows may be longer than a cell: not of a model of a fixed length
    columns: Tensor  # of the logits that vary: those of a padded vocabulary are constant
    rounding: Rounding  # on short rows

    @property
    def length(self) -> int:
        """Tokens of a short row."""
        return CELLS * self.cell if self.takes_cells else self.cell

    def tokens(self, rows: int = ROWS, length: int | None = None, *, sample: int = 0) -> Tensor:
        """Random token ids, [rows, length]."""
        generator = torch.Generator().manual_seed(1000 + sample)
        return torch.randint(self.request.vocab_size, (rows, length or self.length), generator=generator)

    def others(self, tokens: Tensor) -> Tensor:
        """Token ids that differ from `tokens` everywhere."""
        generator = torch.Generator().manual_seed(2000)
        moved = torch.randint(1, self.request.vocab_size, tokens.shape, generator=generator)
        return (tokens + moved) % self.request.vocab_size

    def start_state(self) -> Tensor | None:
        """A state [ROWS, width] as the ledger may hold it: after a cell of other tokens."""
        return self.subject(self.tokens(ROWS, self.cell, sample=500), self.subject.zeros(ROWS)).state

    def errors(self, found: Tensor, wanted: Tensor) -> Tensor:
        """Relative error of logits at each position, [B, T]."""
        return relative(found[..., self.columns], wanted[..., self.columns], self.rounding.unit)

    def in_mode(self, training: bool) -> Trial:
        return replace(self, subject=replace(self.subject, training=training))


def relative(found: Tensor, wanted: Tensor, unit: float) -> Tensor:
    """Root mean square difference over the vocabulary, over `unit`: [B, T]; infinite if one is NaN."""
    found, wanted = found.detach().double(), wanted.detach().double()
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    difference = torch.where(same, torch.zeros_like(found), found - wanted)
    return (difference.square().mean(-1).sqrt() / unit).nan_to_num(nan=math.inf, posinf=math.inf)


def make_trial(subject: Subject, request: Request) -> Trial:
    """Find a row length that the model takes, and measure scale and rounding. Raises CallFailed: it
    takes none (as of the training length); NotTestable: there is one token id, or its logits are
    constant, not finite, or not in float64 where its parameters are."""
    if request.vocab_size < 2:
        raise NotTestable("there is only one token id, which nothing can replace")
    trial = _with_cell_length(subject, request)
    tokens, zeros = trial.tokens(), subject.zeros(ROWS)
    whole = subject(tokens, zeros).logits
    if not whole.isfinite().any() or whole.isnan().any():
        raise NotTestable("the logits are not finite")
    flat = whole.flatten(0, 1)  # [B T, V]
    # Columns of a padded vocabulary are constant, and may hold -inf or -1e9.
    varies = flat.isfinite().all(0) & (flat != flat[:1]).any(0)
    if not varies.any():
        raise NotTestable("the logits are the same at every position, whatever the tokens are")
    columns = varies.nonzero().flatten()
    wanted, eps = whole[..., columns], torch.finfo(subject.dtype).eps

    def read(length: int | None = None) -> Tensor:
        return subject(tokens, zeros).logits[:, :length, columns]

    rounding = Rounding(float(flat[:, columns].std(0).square().mean().sqrt()))
    if subject.dtype == torch.float64:  # of the parameters; a kernel may compute in float32
        own = subject, partial(read, trial.cell), wanted[:, : trial.cell]
        coarse, fine = (rounding.slope(*own, step) for step in FINE_STEPS)
        if not math.isclose(coarse, fine, rel_tol=0.1):
            raise NotTestable("the model computes in less than float64")
    return replace(trial, columns=columns, rounding=rounding.measured(subject, read, wanted, eps))


def _with_cell_length(subject: Subject, request: Request) -> Trial:
    """The first length of which the model takes a cell and a short row; it may need a multiple."""
    seq_len = request.seq_len
    lengths = [(each, True) for each in CELL_LENGTHS if each < max(seq_len, 7)]
    for length, takes_cells in [*lengths, (seq_len, True), (seq_len, False)]:
        columns = torch.arange(request.vocab_size)
        trial = Trial(subject, request, length, takes_cells, columns, Rounding(1.0))
        try:
            for size in dict.fromkeys((length, trial.length)):
                subject(trial.tokens(1, size), subject.zeros(1))
            return trial
        except CallFailed as error:
            failure = error
    raise failure
