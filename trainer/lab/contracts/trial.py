"""Verdicts and their report; tokens, row lengths, the scale of the logits, and rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainer.lab.contracts.subject import CallFailed, NotTestable, Subject

Status = Literal["held", "broken", "warning", "not testable here"]

CHECKS: Final = {
    "forward": "forward takes tokens and state, and returns logits and state of the right shape",
    "purity": "the result depends on the arguments and the weights alone, in train() as in eval()",
    "soak": "a batch in mixed phases, read as training reads it, equals each of its documents run alone",
    "carry": "a row read in cells, each from the state that the last one returned, equals the row read whole",
    "causality": "logits depend on no later token",
    "isolation": "a row's logits and state depend on no other row",
    "resets": "nothing crosses a reset inside a row",
    "gradient": "the gradient through a cut equals that of the uncut row",
    "autocast": "the soak under bf16 autocast",
}
"""Every check and what it asserts, in the order in which they are reported."""

NO_STATE: Final = "the model has no state (state_width = 0)"  # so nothing about one is tested
ROWS, CELLS = 2, 3
CELL_LENGTHS = (6, 4, 16, 32, 64, 128, 256)


class ContractError(AssertionError):
    """A model breaks the contract; see `Report.raise_if_broken`."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check; a `warning` does no harm in ordinary training."""

    check: str  # a key of `CHECKS`
    status: Status
    text: str  # what was found, or why nothing could be
    size: float | None = None  # largest deviation, over the spread of the logits; None: none known
    position: int | None = None  # the first wrong one of the row, from 0
    scope: str = ""  # how far the check looked, where that depends on the time


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
        return next(verdict for verdict in self.verdicts if verdict.check == check)

    def raise_if_broken(self) -> None:
        """For a user's own tests. Raises ContractError, with all verdicts: a check is broken."""
        if self.breaches:
            raise ContractError(str(self))

    def summary(self) -> str:
        """The checks by status, on one line."""
        by_status: dict[str, list[str]] = {}
        for verdict in self.verdicts:
            name = " of ".join(filter(None, (verdict.check, verdict.scope)))
            by_status.setdefault(verdict.status, []).append(name)
        listed = "; ".join(f"{status}: {', '.join(checks)}" for status, checks in by_status.items())
        return f"{listed} ({self.how})"

    def to_json(self) -> dict[str, Any]:
        verdicts = [asdict(verdict) for verdict in self.verdicts]
        return {"verdicts": verdicts, "how": self.how, "seconds": self.seconds}

    def __str__(self) -> str:
        lines = [f"{verdict.check}: {verdict.status}: {verdict.text}" for verdict in self.verdicts]
        return "\n".join([*lines, f"({self.how}; {self.seconds:.1f} s)"])


@dataclass(frozen=True)
class Trial:
    """A model at the precision in which it is judged, and rows for it."""

    subject: Subject  # in float64 where the model runs in it
    vocab_size: int
    width: int  # `state_width`
    cell: int  # tokens; a whole row has `CELLS` of them
    takes_resets: bool
    takes_cells: bool = True  # rows may be longer than a cell: not of a model of a fixed length
    noise: float = 0.0  # relative error of logits that rounding explains
    unit: float = 1.0  # the spread of the logits over positions, which errors are relative to
    varies: Tensor | None = None  # bool [V]: the others are constant, as of a padded vocabulary
    trains: bool = True  # judge training mode too: not of a model that draws random numbers in it

    @property
    def length(self) -> int:
        """Tokens of a whole row."""
        return CELLS * self.cell if self.takes_cells else self.cell

    def tokens(self, rows: int = ROWS, length: int | None = None, *, sample: int = 0) -> Tensor:
        """Random token ids, [rows, length]."""
        generator = torch.Generator().manual_seed(1000 + sample)
        return torch.randint(self.vocab_size, (rows, length or self.length), generator=generator)

    def others(self, tokens: Tensor) -> Tensor:
        """Token ids that differ from `tokens` everywhere."""
        generator = torch.Generator().manual_seed(2000)
        moved = torch.randint(1, self.vocab_size, tokens.shape, generator=generator)
        return (tokens + moved) % self.vocab_size

    def start_state(self) -> Tensor | None:
        """A state [ROWS, width] as the ledger may hold it: after a cell of other tokens."""
        if not self.width:
            return None
        tokens = self.tokens(ROWS, self.cell, sample=500)
        return self.subject.carried(self.subject(tokens, self.subject.zeros(ROWS)).state)

    def errors(self, found: Tensor, wanted: Tensor) -> Tensor:
        """Relative error of logits at each position, [B, T]."""
        if self.varies is not None:
            found, wanted = found[..., self.varies], wanted[..., self.varies]
        return relative(found, wanted, self.unit)

    @contextmanager
    def in_mode(self, training: bool) -> Iterator[None]:
        before, self.subject.training = self.subject.training, training
        try:
            yield
        finally:
            self.subject.training = before


def relative(found: Tensor, wanted: Tensor, unit: float) -> Tensor:
    """Root mean square difference over the vocabulary, over `unit`: [B, T]; infinite for NaN."""
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    difference = torch.where(same, torch.zeros_like(found), found - wanted)
    return (difference.square().mean(-1).sqrt() / unit).nan_to_num(nan=math.inf)


def make_trial(subject: Subject, *, vocab_size: int, seq_len: int, takes_resets: bool) -> Trial:
    """Find a row length that the model takes, and measure scale and rounding. Raises CallFailed: it
    takes none (as of the training length); NotTestable: its logits are constant or not finite."""
    width: int = subject.model.state_width  # type: ignore[assignment]
    trial = _with_cell_length(Trial(subject, vocab_size, width, seq_len, takes_resets), seq_len)
    tokens = trial.tokens()
    whole = subject(tokens, subject.zeros(ROWS)).logits
    if not whole.isfinite().any() or whole.isnan().any():
        raise NotTestable("the logits are not finite")
    flat = whole.flatten(0, 1)  # [B T, V]
    # Columns of a padded vocabulary are constant, and may hold -inf or -1e9.
    varies = flat.isfinite().all(0) & (flat != flat[:1]).any(0)
    if not varies.any():
        raise NotTestable("the logits are the same at every position, whatever the tokens are")
    unit = float(flat[:, varies].std(0).square().mean().sqrt())
    trial = replace(trial, unit=unit, varies=varies)
    return replace(trial, noise=_noise(trial, tokens, whole))


def _with_cell_length(trial: Trial, seq_len: int) -> Trial:
    """The first length of which the model takes a cell and a whole row; it may need a multiple."""
    lengths = [(each, True) for each in CELL_LENGTHS if each < max(seq_len, 7)]
    for length, takes_cells in [*lengths, (seq_len, True), (seq_len, False)]:
        tried = replace(trial, cell=length, takes_cells=takes_cells)
        try:
            for size in dict.fromkeys((length, tried.length)):
                trial.subject(trial.tokens(1, size), trial.subject.zeros(1))
            return tried
        except CallFailed as error:
            failure = error
    raise failure


def _noise(trial: Trial, tokens: Tensor, whole: Tensor) -> float:
    """Relative error that rounding makes: the response to parameters that change by one rounding.

    Any order of summation gives the exact result of slightly different parameters, so this scale
    holds for all of them. It is measured with a larger change, at which the response is linear and
    well above rounding itself.
    """
    eps = torch.finfo(effective_dtype(trial, tokens)).eps
    step = math.sqrt(eps)  # between rounding and curvature
    with trial.subject.perturbed(step):
        moved = trial.subject(tokens, trial.subject.zeros(ROWS)).logits
    response = float(trial.errors(moved, whole).max()) * eps / step
    largest = float(whole[..., trial.varies].abs().max())
    floor = 2 * eps * max(min(largest / trial.unit, 1e3), 1.0)
    return max(response, floor) if math.isfinite(response) else floor


def effective_dtype(trial: Trial, tokens: Tensor) -> torch.dtype:
    """The least precise dtype of an intermediate result that depends on the tokens.

    Casts are lifted to float64 (`Plain`); what escapes that, such as an operator of the model's
    own, rounds like float32. Constants such as rotary angles are the same in every order of
    computing, and do not count.
    """
    own = trial.subject.dtype
    rounded = [_Rounded(own), _Rounded(own)]
    for found, row in zip(rounded, (tokens[:1], trial.others(tokens)[:1]), strict=True):
        with found:
            trial.subject(row, trial.subject.zeros(1))
    first, second = (found.seen for found in rounded)
    seen = [one[0] for one, other in zip(first, second, strict=False) if one != other]
    if len(first) != len(second):
        seen += [dtype for dtype, _ in first + second]
    return max((own, *seen), key=lambda dtype: torch.finfo(dtype).eps)


class _Rounded(TorchFunctionMode):
    """Notes every result that is less precise than `dtype`, with its sum."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._eps = torch.finfo(dtype).eps
        self.seen: list[tuple[torch.dtype, float]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else (found,):
            is_real = isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex())
            if is_real and torch.finfo(each.dtype).eps > self._eps:
                total = float(each.abs().double().nan_to_num(0, 0, 0).sum())
                self.seen.append((each.dtype, total))
        return found
