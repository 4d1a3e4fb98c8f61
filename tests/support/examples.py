"""Runs the programs under examples/."""

from __future__ import annotations

import io
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from typing import Any
from unittest.mock import patch

from tests.support.runs import ROOT, run

EXAMPLES = ROOT / "examples"


def run_example(name: str, *arguments: object, prelude: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """Run an example to its end. `prelude` is Python that runs before it in its process; `options` are those of `run`."""
    script = EXAMPLES / name
    code = f"import runpy, sys\nsys.path.insert(0, {str(script.parent)!r})\n{prelude}\n"
    return run(*arguments, code=f"{code}runpy.run_path({str(script)!r}, run_name='__main__')", **options)


def printed_by(name: str, *arguments: object) -> str:
    """What an example prints, run to its end in this process."""
    with redirect_stdout(io.StringIO()) as out, patch.object(sys, "argv", [name, *map(str, arguments)]):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return out.getvalue()
