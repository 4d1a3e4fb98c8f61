"""Parts of one's own, named in a config by import path."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from trainer.errors import UserError


def resolve_target(target: str, key: str) -> Any:
    """The function that an import path `package.module:function` names.

    Args:
        target: the import path; modules of the working directory are found too.
        key: what messages call it.

    Raises:
        UserError: the module cannot be imported or has no such function.
    """
    module_name, _, name = target.partition(":")
    if os.getcwd() not in sys.path:  # as `python -m` has it, however the program was started
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(key, f"cannot import {module_name}: {error}", "install it, or put it on PYTHONPATH") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise UserError(key, f"{module_name} has no function {name}", "name a function of the module")
    return found
