"""Runs the programs under examples/."""

from __future__ import annotations

import subprocess
from typing import Any

from tests.support.runs import ROOT, run

EXAMPLES = ROOT / "examples"


def run_example(name: str, *arguments: object, prelude: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """Run an example to its end. `prelude` is Python that runs before it in its process; `options` are those of `run`."""
    script = EXAMPLES / name
    code = f"import runpy, sys\nsys.path.insert(0, {str(script.parent)!r})\n{prelude}\n"
    return run(*arguments, code=f"{code}runpy.run_path({str(script)!r}, run_name='__main__')", **options)
