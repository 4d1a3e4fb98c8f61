"""The table of thresholds: each with a unit and a reason, in one place, and read by the rules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs import ROOT
from trainer.tools import limits
from trainer.training.setup import plausible

TOOLS = ROOT / "trainer" / "tools"
TABLE = TOOLS / "limits.py"
JUDGING = (
    "diagnostics/*.py",
    "preview/*.py",
    "report/run_summary.py",
    "report/charts.py",
    "runs/noise_scale.py",
    "verbs/before_run.py",
    "verbs/compare.py",
)
"""Files that compare what was measured or forecast with a threshold."""
NOT_A_JUDGEMENT = {
    "MAX_EVIDENCE", "POINT_BUDGET", "MOST_POINTS", "FEWEST_POINTS", "MOST_CURVES", "_MOST_ROWS", "_MOST_TEXT",  # shown
    "DIAGNOSIS_VERSION", "EXIT_BREACH",  # of an output
    "COUNTED", "MAX_COUNTED", "MOST_BYTES", "MOST_POSITIONS", "SAMPLED",  # how much is read before a run
}  # fmt: skip


def numbers(path: Path) -> Iterator[tuple[str, int]]:
    """(name, line) of each constant of a module whose value is made of numbers."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        target = (
            node.target
            if isinstance(node, ast.AnnAssign)
            else node.targets[0]
            if isinstance(node, ast.Assign)
            else None
        )
        if target is None or node.value is None:
            continue
        names = [each.id for each in ast.walk(target) if isinstance(each, ast.Name)]
        kinds = (ast.Constant, ast.Tuple, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Name, ast.expr_context)
        parts = list(ast.walk(node.value))
        found = [part.value for part in parts if isinstance(part, ast.Constant)]
        if (
            names
            and found
            and all(isinstance(p, kinds) for p in parts)
            and all(isinstance(v, int | float) for v in found)
        ):
            yield from ((name, node.lineno) for name in names if name.isupper())


def defined() -> dict[str, int]:
    return dict(numbers(TABLE))


def test_every_threshold_has_a_unit_and_a_reason() -> None:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    assert len(defined()) > 70
    for name, line in defined().items():
        assert re.fullmatch(r"# [^:]+: .*[\w)]\.", lines[line - 2]), f"{name}: {lines[line - 2]}"


def test_no_other_file_that_judges_defines_a_threshold() -> None:
    found = {
        f"{path.relative_to(TOOLS)}:{line}: {name}"
        for pattern in JUDGING
        for path in TOOLS.glob(pattern)
        for name, line in numbers(path)
        if name not in NOT_A_JUDGEMENT
    }
    assert found == set()


def test_no_file_of_the_tools_gives_the_name_of_a_threshold_to_another_value() -> None:
    others = [path for path in TOOLS.rglob("*.py") if path != TABLE]
    assert [(path.name, name) for path in others for name, _ in numbers(path) if name in defined()] == []


def test_every_threshold_is_read() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in TOOLS.rglob("*.py"))
    own = TABLE.read_text(encoding="utf-8")
    assert [name for name in defined() if f"limits.{name}" not in text and own.count(name) < 2] == []


def test_the_largest_learning_rate_is_the_one_that_check_warns_of() -> None:
    """The core may not import the tools."""
    assert limits.LARGEST_LR == plausible.LARGEST_LR


@pytest.mark.parametrize(("picks", "nats"), [(200, 12.2), (1_000_000, 20.7), (0, 7.6)])
def test_the_bound_on_a_surprise_grows_with_the_logarithm_of_the_picks(picks: int, nats: float) -> None:
    assert limits.surprise_bound(picks) == pytest.approx(nats, abs=0.1)
