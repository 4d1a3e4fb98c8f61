"""The result of checking a model: one verdict per check."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

Status = Literal["held", "broken", "warning", "not testable here"]

CHECKS: Final = {
    "forward": "forward takes tokens and state, and returns logits and state of the right shape",
    "carry": "a row read in cells, each from the state that the last one returned, equals the row read whole",
    "gradient": "the gradient through a cut equals that of the uncut row",
    "causality": "logits depend on no later token",
    "isolation": "a row's logits and state depend on no other row",
    "resets": "nothing crosses a reset inside a row",
    "state_used": "the incoming state changes the logits",
    "purity": "the result depends on the arguments and the weights alone, in train() as in eval()",
    "checkpointing": "recomputation under activation checkpointing gives the same gradient",
    "autocast": "carry, causality and isolation under bf16 autocast",
}
"""Every check and what it asserts, in the order in which they are reported."""

FAILED_LATER: Final = ", after it ran"
"""In the text of `forward` where it kept its interface, and raised in one of the other checks."""
NO_STATE: Final = "the model has no state (state_width = 0)"
"""Why nothing about a state is tested."""


class ContractError(AssertionError):
    """A model breaks the contract; see `Report.raise_if_broken`."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check.

    Attributes:
        check: a key of `CHECKS`.
        status: `held`; `broken`; `warning`: not as it should be, but harmless in ordinary training; `not testable here`.
        text: what was found, or why nothing could be.
        size: largest deviation, as a fraction of the spread of the logits over positions; None where nothing was compared.
        position: first wrong position of the row, from 0; None if there is none.
    """

    check: str
    status: Status
    text: str
    size: float | None = None
    position: int | None = None


@dataclass(frozen=True)
class Report:
    """The verdicts of `check_model`, in the order of `CHECKS`.

    Attributes:
        how: precision, row length and other circumstances of the check.
        seconds: time that it took.
    """

    verdicts: tuple[Verdict, ...]
    how: str
    seconds: float

    @property
    def breaches(self) -> list[Verdict]:
        """The verdicts `broken`."""
        return [verdict for verdict in self.verdicts if verdict.status == "broken"]

    @property
    def warnings(self) -> list[Verdict]:
        """The verdicts `warning`."""
        return [verdict for verdict in self.verdicts if verdict.status == "warning"]

    @property
    def unchecked(self) -> list[Verdict]:
        """`causality` and `carry` where they could not be judged, though every model has the one, and this model the other."""
        main = (self["causality"], self["carry"])
        return [v for v in main if v.status == "not testable here" and v.text != NO_STATE]

    def __getitem__(self, check: str) -> Verdict:
        return next(verdict for verdict in self.verdicts if verdict.check == check)

    def raise_if_broken(self) -> None:
        """For a user's own tests.

        Raises:
            ContractError: a check is broken; the message lists all verdicts.
        """
        if self.breaches:
            raise ContractError(str(self))

    def summary(self) -> str:
        """The checks by status, on one line."""
        by_status: dict[str, list[str]] = {}
        for verdict in self.verdicts:
            by_status.setdefault(verdict.status, []).append(verdict.check)
        listed = "; ".join(f"{status}: {', '.join(checks)}" for status, checks in by_status.items())
        return f"{listed} ({self.how})"

    def to_json(self) -> dict[str, Any]:
        """The fields, as plain objects."""
        return {"verdicts": [asdict(verdict) for verdict in self.verdicts], "how": self.how, "seconds": self.seconds}

    def __str__(self) -> str:
        lines = [f"{verdict.check}: {verdict.status}: {verdict.text}" for verdict in self.verdicts]
        return "\n".join([*lines, f"({self.how}; {self.seconds:.1f} s)"])
