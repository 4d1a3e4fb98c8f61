"""What is to be measured from one checkpoint: the branches, and what they have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from trainer.config.schema import OptimizerTable
from trainer.errors import UserError
from trainer.tools.branching.batches import (
    BranchBatch,
    base_steps_for,
    base_steps_unit,
    fit_batch,
    row_sizes,
    why_impossible,
)
from trainer.tools.branching.origin import Origin

LrRule = Literal["none", "sqrt", "linear"]
LR_EXPONENTS: dict[LrRule, float] = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
DEFAULT_SHARE = 0.2  # of the tokens so far
LEAST_STEPS = 16  # of the largest batch, by default


@dataclass(frozen=True)
class Branch:
    """One short run.

    Args:
        lr_scale: of the grid, on top of the rule.
        lr: its constant learning rate.
        seed: 0 reads on where the checkpoint stopped; any other number is an order of the data of its own.
    """

    batch: BranchBatch
    lr_scale: float
    lr: float
    seed: int
    steps: int

    @property
    def name(self) -> str:
        """Its directory's name."""
        factor = str(self.batch.factor).replace("/", "_of_")
        return f"batch_{factor}-lr_{self.lr:.6g}-seed_{self.seed}"

    def to_json(self) -> dict[str, Any]:
        """All that its result depends on, beside what the branches have in common."""
        return {
            "factor": str(self.batch.factor),
            "micro_batches": self.batch.micro_batches,
            "row_share": str(self.batch.row_share),
            "lr": self.lr,
            "seed": self.seed,
            "steps": self.steps,
        }


@dataclass(frozen=True)
class Study:
    """Branches from one checkpoint.

    Args:
        directory: `RUN_DIR/cbs/STEP`.
        base_steps: steps of today's batch whose tokens every branch trains on.
        impossible: one line on each factor that no branch can have.
        tokens_note: why this many tokens.
    """

    directory: Path
    origin: Origin
    base_steps: int
    is_held_out: bool
    lr_rule: LrRule
    branches: Sequence[Branch]
    impossible: Sequence[str]
    tokens_note: str

    @property
    def tokens(self) -> float:
        """Expected target tokens of each branch."""
        return self.base_steps * self.origin.tokens_per_step

    @property
    def common(self) -> dict[str, Any]:
        """What all results of the directory must share."""
        return common_of(self.origin, self.base_steps, is_held_out=self.is_held_out)


def common_of(origin: Origin, base_steps: int, *, is_held_out: bool) -> dict[str, Any]:
    """See `Study.common`."""
    return {
        "checkpoint": origin.marker,
        "num_ranks": origin.num_ranks,
        "tokens": round(base_steps * origin.tokens_per_step),
        "base_steps": base_steps,
        "loss": "held-out" if is_held_out else "training",
    }


def make_study(
    origin: Origin,
    directory: Path,
    *,
    factors: Sequence[Fraction],
    lr_rule: LrRule | None,
    lr_grid: Sequence[float],
    num_seeds: int,
    tokens: int | None,
    base_steps: int | None,
) -> Study:
    """The branches of all factors that are possible.

    Args:
        lr_rule: None: by the optimizer.
        tokens: of each branch at least; None: a share of those so far.
        base_steps: of the results that the directory has already; they count where `tokens` is None.

    Raises:
        UserError: fewer than two factors are possible; orders of the data are asked for that cannot be made.
    """
    sizes = row_sizes(origin.config)
    fitted = {factor: fit_batch(factor, origin.today, sizes) for factor in sorted(set(factors))}
    batches = [batch for batch in fitted.values() if batch is not None]
    impossible = [why_impossible(factor, origin.today, sizes) for factor, batch in fitted.items() if batch is None]
    if len(batches) < 2:
        problem = "leaves fewer than two batches to compare" + "".join(f"; {line}" for line in impossible)
        raise UserError("--factors", problem, "name others, such as 1,2,4")
    own = [source.name for source in origin.config.data.source if source.target is not None]
    if own and num_seeds > 1:
        problem = f"source {own[0]} is a target of your own, whose order only it knows"
        raise UserError("--seeds", problem, "use --seeds 1, without error bars")
    possible = [batch.factor for batch in batches]
    note = ""
    if tokens is None and base_steps is not None and base_steps % base_steps_unit(possible) == 0:
        note = "as many as the branches that are done"
    else:
        base_steps, note = _base_steps(origin, possible, tokens)
    rule = lr_rule or default_rule(origin.config.optimizer)
    branches = [
        Branch(
            batch, scale, origin.lr * float(batch.factor) ** LR_EXPONENTS[rule] * scale, seed, batch.steps(base_steps)
        )
        for batch in batches
        for seed in range(num_seeds)
        for scale in sorted(set(lr_grid))
    ]
    return Study(
        directory=directory,
        origin=origin,
        base_steps=base_steps,
        is_held_out=origin.config.eval.holdout_fraction > 0,
        lr_rule=rule,
        branches=branches,
        impossible=impossible,
        tokens_note=note,
    )


def _base_steps(origin: Origin, factors: Sequence[Fraction], tokens: int | None) -> tuple[int, str]:
    """(today's steps, why so many)."""
    per_step = origin.tokens_per_step
    if tokens is not None:
        return base_steps_for(
            tokens, per_step, factors
        ), f"--tokens {tokens:,}, rounded up to whole steps of every batch"
    share, least = DEFAULT_SHARE * origin.tokens_seen, float(LEAST_STEPS * max(factors) * per_step)
    if least > share:
        return base_steps_for(least, per_step, factors), f"{LEAST_STEPS} steps of the largest batch"
    return base_steps_for(share, per_step, factors), f"{DEFAULT_SHARE:.0%} of the {origin.tokens_seen:,} so far"


def default_rule(table: OptimizerTable) -> LrRule:
    """How the learning rate follows the batch: sqrt for optimizers that normalize their updates, linear for SGD.

    Malladi et al. 2022 (arXiv 2205.10287) for Adam; Goyal et al. 2017 (arXiv 1706.02677) for SGD.

    Raises:
        UserError: the optimizer is the user's own.
    """
    if table.target is not None:
        problem = f"is needed: {table.target} is an optimizer of your own, of which no rule is known"
        raise UserError("--lr-rule", problem, "name none, sqrt or linear")
    return "linear" if table.name == "sgd" else "sqrt"


def parse_factors(text: str) -> list[Fraction]:
    """`1/4,0.5,2` as numbers.

    Raises:
        UserError: one is no positive number.
    """
    return [_positive("--factors", Fraction, word) for word in text.split(",")]


def parse_grid(text: str) -> list[float]:
    """`0.5,1,2` as numbers.

    Raises:
        UserError: one is no positive number.
    """
    return [float(_positive("--lr-grid", Fraction, word)) for word in text.split(",")]


def _positive(option: str, parse: type[Fraction], word: str) -> Fraction:
    try:
        number = parse(word.strip())
    except (ValueError, ZeroDivisionError):
        number = Fraction(0)
    if number <= 0 or not math.isfinite(number):
        raise UserError(option, f"{word!r} is no positive number", "separate numbers by commas: 1/2,1,2")
    return number
