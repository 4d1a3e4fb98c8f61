"""Checks that the project stays small enough to fit in one head: ceilings on lines, files, words, and on what one step enters.

    python scripts/check_budgets.py [--no-steps]

The ceilings hold for every change: what enters takes as much out (CONTRIBUTING.md, Budgets). One that must rise is
raised here, in a change of its own that says why.

A step is counted on one rank of a small run, between the ends of the second and the third optimizer step: modules, classes and
functions of ours that it enters, and the switches, calls from one of our modules into another and the returns from it.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import sys
import tempfile
import tokenize
from contextlib import redirect_stderr
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
AROUND = ("lab", "tools")
MOST_PARAMETERS = 10
# Each with its goal, where the project is above it. Given up: a core of 16,500 lines in 75 files, a step of 15 modules, 15
# classes and 50 functions. 800 lines of the core are the reference model, without which a run would need the lab; a step enters
# the parts that others take alone: data 28 functions, ledger 12, noise scale 9, model 11. Either would cost what users have.
CEILINGS = {
    "core: lines": (17_350, 17_350),
    "core: files": (78, 78),
    "trainer: lines": (29_500, 29_500),
    "trainer: files": (142, 142),
    "tests: lines": (28_500, 28_500),
    "launches in make test": (90, 90),  # counted and checked in tests/conftest.py
    "scripts: lines": (3_900, 3_900),
    "words of documentation, with the CHANGELOG": (22_000, 22_000),  # without bars of tables and other marks
    "functions with more than 10 parameters": (3, 3),
    "places that make a UserError": (172, 172),
    "config keys": (133, 133),
    "conditional expressions in 1,000 lines of code": (13, 13),
    "lines above 100 characters in 1,000": (33, 29),
    "lines of code for each comment line": (13, 13),
    "steady step: modules": (22, 22),
    "steady step: classes": (25, 25),
    "steady step: functions": (82, 82),
    "steady step: switches": (470, 470),
    "logged step: modules": (28, 28),
    "logged step: classes": (36, 36),
    "logged step: functions": (159, 159),
    "logged step: switches": (592, 592),
}
SETTINGS = """
    train.device=cpu train.compile=false checkpoint.every=0 eval.every=0 scheduler.warmup_steps=1 data.seq_len=64
    data.prefetch=0 metrics.wandb.mode="disabled"
""".split()  # noqa: SIM905 - as on a command line


def sizes() -> dict[str, int]:
    """The counts of `CEILINGS` that files alone give."""
    files = {top: sorted((ROOT / top).rglob("*.py")) for top in ("trainer", "tests", "scripts")}
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for each in files.values() for path in each}
    core = [path for path in files["trainer"] if path.relative_to(ROOT / "trainer").parts[0] not in AROUND]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files["trainer"]]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    errors = [each for each in nodes if isinstance(each, ast.Call) and getattr(each.func, "id", "") == "UserError"]
    code, comments = map(sum, zip(*map(_code_lines, files["trainer"]), strict=True))
    long = sum(len(line) > 100 for path in files["trainer"] for line in path.read_text(encoding="utf-8").splitlines())
    prose = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
    return {
        "core: lines": sum(lines[path] for path in core),
        "core: files": len(core),
        "trainer: lines": sum(lines[path] for path in files["trainer"]),
        "trainer: files": len(files["trainer"]),
        "tests: lines": sum(lines[path] for path in files["tests"]),
        "scripts: lines": sum(lines[path] for path in files["scripts"]),
        "words of documentation, with the CHANGELOG": sum(
            len(re.findall(r"[^\s|]*\w[^\s|]*", path.read_text(encoding="utf-8"))) for path in prose
        ),
        "functions with more than 10 parameters": sum(_parameters(node) > MOST_PARAMETERS for node in nodes),
        "places that make a UserError": len(errors),
        "config keys": (ROOT / "docs" / "config.md").read_text(encoding="utf-8").count("\n- `"),
        "conditional expressions in 1,000 lines of code": 1000 * sum(isinstance(n, ast.IfExp) for n in nodes) // code,
        "lines above 100 characters in 1,000": 1000 * long // sum(lines[path] for path in files["trainer"]),
        "lines of code for each comment line": code // comments,
    }


def _code_lines(path: Path) -> tuple[int, int]:
    """Lines of code, without docstrings, and lines with a comment for people."""
    text = path.read_text(encoding="utf-8")
    code, comments = set[int](), 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments += not token.string.startswith(("# type:", "# noqa", "# fmt"))
        elif token.string.strip() and not token.string.startswith('"""'):
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code), comments


def _parameters(node: ast.AST) -> int:
    """Parameters of a function, without self; 0 of anything else."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return 0
    first = node.args.args[0].arg if node.args.args else ""
    return len(node.args.args) + len(node.args.kwonlyargs) - (first in ("self", "cls"))


class Counter:
    """What the interpreter enters while it counts; see the module."""

    def __init__(self) -> None:
        self.found: dict[str, set[Any]] = {"modules": set(), "classes": set(), "functions": set()}
        self.switches = self._ends = 0
        self._stack: list[str] = []
        self._top = str(ROOT / "trainer") + os.sep

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """For `sys.setprofile`."""
        code = frame.f_code
        if event == "return" and code.co_qualname in ("AdamW.step", "Adam.step"):
            self._ends += 1
        if event not in ("call", "return") or not code.co_filename.startswith(self._top):
            return
        name, counts = code.co_filename.removeprefix(self._top), self._ends == 2
        if event == "return":
            if self._stack[-1:] != [name]:
                return
            self._stack.pop()
        self.switches += counts and bool(self._stack) and self._stack[-1] != name
        if event == "call":
            self._stack.append(name)
        if event == "call" and counts:
            self.found["modules"].add(name)
            self.found["functions"].add((name, code.co_qualname))
            if "." in code.co_qualname and "<locals>" not in code.co_qualname and "self" in frame.f_locals:
                self.found["classes"].add(type(frame.f_locals["self"]).__name__)


def count_step(kind: str) -> dict[str, int]:
    """What one step enters."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(ROOT))
    from trainer.cli.main import main

    with tempfile.TemporaryDirectory() as name:
        for modality in ("prose", "python", "cpp"):
            folder = Path(name) / "corpus" / modality
            folder.mkdir(parents=True)
            for number in range(8):
                line = json.dumps({"text": f"{number} " + "some words of a document that is long enough " * 200})
                (folder / f"{number}.jsonl").write_text(f"{line}\n" * 3, encoding="utf-8")
        source = f'data.source=[{{name="text", root="{name}/corpus"}}]'
        interval = f"metrics.log_interval={1 if kind == 'logged' else 10}"
        words = [word for each in (*SETTINGS, source, interval) for word in ("--set", each)]
        config = ROOT / "train_configs" / "smoke.toml"
        sys.argv = f"train --config {config} --steps 5 --run-dir {name}/run --stdout off".split() + words
        counter, said = Counter(), io.StringIO()
        sys.setprofile(counter)
        try:
            with redirect_stderr(said):
                main()
        except SystemExit as end:
            if end.code:
                raise SystemExit(said.getvalue()) from None
        finally:
            sys.setprofile(None)
    return {**{name: len(entered) for name, entered in counter.found.items()}, "switches": counter.switches}


def main(arguments: list[str]) -> int:
    """Print what is above its ceiling, otherwise all; returns whether something is."""
    found = sizes()
    for kind in () if arguments == ["--no-steps"] else ("steady", "logged"):
        found |= {f"{kind} step: {what}": number for what, number in count_step(kind).items()}
    above = [name for name, (ceiling, _) in CEILINGS.items() if found.get(name, 0) > ceiling]
    for name in above or CEILINGS:
        ceiling, goal = CEILINGS[name]
        if name in found:
            print(f"{name}: {found[name]:,} of {ceiling:,}" + (f" (goal: {goal:,})" if goal < ceiling else ""))
    if above:
        print("above the ceilings: take as much out as comes in (CONTRIBUTING.md, Budgets)")
    return bool(above)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
