"""Runs the programs under examples/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.runs import ROOT, TIMEOUT_SEC, environment

EXAMPLES = ROOT / "examples"


def run_example(
    name: str,
    *arguments: object,
    nproc: int | None = None,
    prelude: str = "",
    stdin: str | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run an example to its end; `prelude` is Python that runs before it in the same process."""
    script = EXAMPLES / name
    line = [sys.executable, str(script), *map(str, arguments)]
    if prelude:
        code = f"import runpy, sys\n{prelude}\nsys.argv = sys.argv[1:]\nsys.path.insert(0, {str(script.parent)!r})\n"
        line[1:1] = ["-c", f"{code}runpy.run_path(sys.argv[0], run_name='__main__')"]
    if nproc is not None:
        line[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    env = environment({"PYTHONPATH": str(ROOT)})
    return subprocess.run(
        line, env=env, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_SEC, check=False, cwd=cwd
    )
