"""Mutates one module with cosmic-ray and prints the mutants that its tests do not notice.

    make mutants MODULE=trainer/lab/extensions.py TESTS=tests/lab/training/test_spikes.py

A mutant that survives is a hole in the tests, or changes nothing that matters. Works on a copy.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = """\
[cosmic-ray]
module-path = "{module}"
timeout = {timeout}
excluded-modules = []
test-command = "{python} -m pytest -x -q -p no:cacheprovider {tests}"

[cosmic-ray.distributor]
name = "local"
"""
ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SEC = 120.0  # of the tests against one mutant


def mirror(folder: Path) -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)


def main() -> int:
    """Returns 0 if every mutant was noticed."""
    module, *tests = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        mirror(copy)
        text = CONFIG.format(module=module, timeout=TIMEOUT_SEC, python=sys.executable, tests=" ".join(tests))
        (copy / "mutate.toml").write_text(text, encoding="utf-8")
        programs = Path(sys.executable).parent
        # `baseline` fails where the tests do not pass without a mutant.
        for verb in ("baseline", "init", "exec"):
            session = () if verb == "baseline" else ("mutate.sqlite",)
            subprocess.run([str(programs / "cosmic-ray"), verb, "mutate.toml", *session], cwd=copy, check=True)
        report = [str(programs / "cr-report"), "--surviving-only", "--show-diff", "mutate.sqlite"]
        found = subprocess.run(report, cwd=copy, capture_output=True, text=True, check=True).stdout
    print(found)
    return 0 if "surviving mutants: 0" in found else 1


if __name__ == "__main__":
    sys.exit(main())
