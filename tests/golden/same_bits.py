"""`make golden BASE=<commit>`: whether the golden cases leave the same bits with that commit's `trainer` and with this tree's.

The cases, and what makes and reads their runs, are this tree's on both sides. The exit code is 1 if something differs: weights,
the optimizer's state, a metric, events, exit codes, or a metric that is gone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.golden.cases import CASES, read_case
from tests.support.checkpoints import model_content
from tests.support.ranks import differences
from tests.support.runs import ROOT


def start(tree: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Make the runs below `folder` with the `trainer` of a tree, and these tests."""
    program = folder / "program"
    program.mkdir(parents=True)
    for name, parent in (("trainer", tree), ("examples", tree), ("tests", ROOT)):
        (program / name).symlink_to(parent / name)
    environ = {**os.environ, "PYTHONPATH": str(program), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "tests.golden.cases", str(folder)], cwd=program, env=environ)


def compare(name: str, base: Path, here: Path) -> list[str]:
    """Where a case's runs differ, a line each; metrics that only one tree emits aside."""
    before, now = read_case(base, name), read_case(here, name)
    found = [f"{a}, was {b}" for a, b in zip(now[:2], before[:2], strict=True) if a != b]
    both = {place.metric for place in before.numbers} & {place.metric for place in now.numbers}
    told = set[str]()
    for place in sorted(before.numbers.keys() | now.numbers.keys(), key=lambda place: place.step):
        a, b = now.numbers.get(place), before.numbers.get(place)
        if place.metric in both - told and repr(a) != repr(b):
            told.add(place.metric)
            found.append(f"{place.mode} {place.metric}: first at step {place.step}: {a}, was {b}")
    latest = [folder / name / "checkpoints" / "latest" for folder in (base, here)]
    contents = [model_content(path) if path.exists() else {} for path in latest]
    return found + [f"checkpoint{place}" for place in differences(*contents)]


def main(commit: str) -> int:
    """Make both sides' runs, compare them, and print what differs."""
    with tempfile.TemporaryDirectory() as name:
        base, here = Path(name, "base"), Path(name, "here")
        tree = Path(name, "tree")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], cwd=ROOT, check=True)
        try:
            codes = [process.wait() for process in (start(tree, base), start(ROOT, here))]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
        if any(codes):
            return 1
        found = {case: compare(case, base, here) for case in CASES}
        before, now = (
            {place.metric for case in CASES for place in read_case(folder, case).numbers} for folder in (base, here)
        )
    for case, lines in found.items():
        for line in lines:
            print(f"{case}: {line}")
    for what, metrics in (("only before", before - now), ("only now", now - before)):
        if metrics:
            print(f"{what}: {', '.join(sorted(metrics))}")
    differing = sum(map(bool, found.values()))
    print(f"{differing} of {len(CASES)} cases differ from {commit}" if differing else f"every bit is as in {commit}")
    return int(bool(differing or before - now))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
