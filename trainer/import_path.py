"""Resolves import paths: of a config's custom parts, and of what a run is given by name."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.errors import UserError, relative_paths
from trainer.wording import message_of

# Run by another Python, this is `train` of this installation, wherever it is started.
PROGRAM = Path(__file__).resolve().with_name("__main__.py")
_NOT_USER_CODE = (Path(__file__).parent, Path(sysconfig.get_path("stdlib")))
# Directories of packages, of this environment or of one below it that it sees.
_INSTALLED = {"site-packages", "dist-packages"}


def resolve_target(target: str, key: str) -> Any:
    """The function that an import path `package.module:function` names, or a UserError of `key`.

    Modules in the working directory are importable too.
    """
    module_name, _, name = target.partition(":")
    # Behind what is installed: no file here is taken for a package of that name.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
        found = getattr(module, name, None)  # which a lazy module may fail to import
    except UserError:  # which names its own key
        raise
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        problem, fix = f"cannot import {module_name}: {format_error(error)}", "fix it there"
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            fix = f"install {error.name}, or add it to PYTHONPATH"
        raise UserError(key, problem, fix) from error
    if not callable(found):
        file = getattr(module, "__file__", None) or "no file: built in, or a directory"
        problem = f"{module_name} ({file}) has no function {name}"
        raise UserError(key, problem, "name a function of the module")
    return found


def place_of(error: BaseException) -> str:
    """` (FILE:LINE)` of the innermost frame in the user's own code; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename and os.path.isabs(error.filename):
        return relative_paths(f" ({error.filename}:{error.lineno})")
    # Frames of packages and of Python itself do not help to locate the mistake.
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        is_installed = _INSTALLED & {*file.parts} or any(map(file.is_relative_to, _NOT_USER_CODE))
        if file.is_absolute() and not is_installed:
            return relative_paths(f" ({frame.filename}:{frame.lineno})")
    return ""


def format_error(error: BaseException, *, otherwise: str = "") -> str:
    """`NameError: name 'x' is not defined (mine.py:3)`; `otherwise`: outside user code."""
    text = str(error.msg or "") if isinstance(error, SyntaxError) else message_of(error)
    told = f": {' '.join(text.split())}" * bool(text)
    return f"{type(error).__name__}{told}{place_of(error) or otherwise}"


@contextmanager
def users_code(key: str, problem: str = "fails", fix: str = "fix it there") -> Iterator[None]:
    """Around a call of the user's code, or a use of their file: any `Exception` is a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(key, f"{problem}: {format_error(error)}", fix) from error


def with_own(given: Mapping[str, Any], args: Mapping[str, Any], key: str, fix: str = "leave it out") -> dict[str, Any]:
    """What the run gives to a user's function, with their `args`, which must not replace it."""
    if twice := ", ".join(sorted(given.keys() & args.keys())):
        raise UserError(key, f"names {twice}, which the run gives itself", fix)
    return {**given, **args}


def refuse_arguments(
    function: Any, name: str, given: Mapping[str, Any], *, key: str, fix: str = "see its signature"
) -> None:
    """Refuse keyword arguments that a function does not take, if it shows its signature."""
    try:
        inspect.signature(function).bind(**given)
    except (TypeError, ValueError) as error:
        cause = error.__cause__ or error  # why a `partial` has no signature
        if isinstance(cause, TypeError):  # else it is hidden by one written in C
            problem = f"cannot call {name} with {', '.join(map(str, given)) or 'no arguments'}: {cause}"
            raise UserError(key, problem, fix) from error
