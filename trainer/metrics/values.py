"""The check of names and values where they come in: what a row cannot hold is left out with one warning that names it.

Only the standard library is used, so that data sets can be looked at without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trainer.wording import message_of, short_repr

T = TypeVar("T")
LeaveOut = Callable[[str, str], object]
"""Takes a metric's name and what is wrong with it; see `BestEffort.leave_out`."""


def as_number(value: Any) -> float:
    """A float of a number, also of numpy's, or of a tensor with one element, for which it waits.

    Raises:
        TypeError: it is none, or beyond the range of a float.
    """
    if type(value) is float:
        return value
    try:
        if isinstance(value, str | bytes | bytearray):
            raise TypeError
        return float(value)
    except Exception:  # noqa: BLE001 - an object of the user's own may do anything
        raise TypeError(f"must be a number, got {short_repr(value)}") from None


def checked(values: Any, leave_out: LeaveOut, take: Callable[[Any], T]) -> dict[str, T | None]:
    """The values by name; None for a value that is no number: a total without it would look right and be wrong.

    Args:
        take: `as_number`, or what else makes a value of what was given and raises `TypeError`.

    Raises:
        TypeError: they are not a mapping.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"must be a mapping of names to numbers, got {short_repr(values)}")
    found: dict[str, T | None] = {}
    for name, value in values.items():
        if (isinstance(name, str) and name) or is_name(name, leave_out):
            try:
                found[name] = value if type(value) is float else take(value)  # type: ignore[assignment]
            except TypeError as error:
                leave_out(name, message_of(error))
                found[name] = None
    return found


def is_name(name: Any, leave_out: LeaveOut) -> bool:
    """Whether it can be a metric's name; if not, it is left out."""
    if isinstance(name, str) and name:
        return True
    leave_out(short_repr(name), "the name of a metric must be a text that is not empty")
    return False
