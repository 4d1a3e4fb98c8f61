"""What a diagnosis found, as plain data: the report draws it and does not judge."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Remark:
    """One thing that was found.

    Attributes:
        title: what it is, in a few words.
        text: what was seen, with numbers.
        advice: what to do about it; may be empty.
        setting: the knob with a suggested value (`ledger.capacity = 512`); may be empty.
        steps: the steps that are the evidence.
    """

    title: str
    text: str
    advice: str = ""
    setting: str = ""
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Check:
    """One rule that was looked at: its name, whether it held, and what it said (or why it could not be asked)."""

    name: str
    state: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """What was found in one run, and all that was checked."""

    remarks: tuple[Remark, ...]
    checks: tuple[Check, ...] = ()
