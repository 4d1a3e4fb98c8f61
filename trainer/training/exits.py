"""Exits that the user's code asks for in the middle of a run: exit code 0 means that the run is over, so they are errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainer.import_path import place_of


class UnexpectedExit(Exception):
    """The user's code ended the process; the message says how and where."""


class _Exit(BaseException):
    """`os._exit(0)` was called."""

    code = 0


@contextmanager
def exits_as_errors(when: Callable[[], str] = str) -> Iterator[None]:
    """Turn `sys.exit`, `os._exit(0)` and whatever else is no `Exception` into an `UnexpectedExit`.

    Nothing of Python's runs after `os._exit`, so it is replaced meanwhile; in a forked process it stays what it is, and C code
    that ends the process is not seen.

    Args:
        when: at what point of the run, as ` after step 7`.
    """
    real, process = os._exit, os.getpid()

    def guarded(status: int) -> None:
        if status or os.getpid() != process:
            real(status)
        raise _Exit

    setattr(os, "_exit", guarded)  # noqa: B010 - mypy knows that it does not return
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        what = f"{type(error).__name__} was raised"
        if isinstance(error, SystemExit | _Exit):
            what = f"{'os._exit' if isinstance(error, _Exit) else 'sys.exit'}({error.code!r}) was called"
        raise UnexpectedExit(f"{what}{when()}{place_of(error)}") from error
    finally:
        setattr(os, "_exit", real)  # noqa: B010
