"""Parts of one's own, named in a config by import path."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

from trainer.errors import UserError

_PLACES = sysconfig.get_paths()
_NOT_THEIRS = (Path(__file__).parent, *(Path(_PLACES[name]) for name in ("stdlib", "purelib", "platlib")))


def resolve_target(target: str, key: str) -> Any:
    """The function that an import path `package.module:function` names.

    Args:
        target: the import path; modules of the working directory are found too.
        key: what messages call it.

    Raises:
        UserError: the module is not there, fails while it is imported, or has no such function.
    """
    module_name, _, name = target.partition(":")
    if os.getcwd() not in sys.path:  # as `python -m` has it, however the program was started
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except UserError:
        raise
    except Exception as error:  # what stands in somebody's module may raise anything
        raise _import_error(key, module_name, error) from error
    found = getattr(module, name, None)
    if not callable(found):
        raise UserError(key, f"{module_name} has no function {name}", "name a function of the module")
    return found


def place_of(error: BaseException) -> str:
    """` (FILE:LINE)` of the innermost code that is the user's own; empty if no frame is.

    Frames of this package, of installed packages and of Python itself say little to whoever wrote the rest.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({shown_path(error.filename)}:{error.lineno})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_absolute() and not any(file.is_relative_to(place) for place in _NOT_THEIRS):
            return f" ({shown_path(frame.filename)}:{frame.lineno})"
    return ""


def shown_path(path: str) -> str:
    """Relative to the working directory where the file is in it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def told(error: BaseException, *, otherwise: str = "") -> str:
    """`NameError: name 'x' is not defined (mine.py:3)`, on one line; `otherwise` is the place if no frame is the user's."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {' '.join(text.split())}{place_of(error) or otherwise}"


def _import_error(key: str, module_name: str, error: Exception) -> UserError:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and f"{module_name}.".startswith(f"{missing}."):
        return UserError(key, f"cannot import {module_name}: {error}", "install it, or put it on PYTHONPATH")
    if missing is not None:
        problem = f"{module_name} is found, but imports {missing}, which is not{place_of(error)}"
        return UserError(key, problem, f"install {missing}, or put it on PYTHONPATH")
    return UserError(key, f"{module_name} fails while it is imported: {told(error)}", "mend it there")
