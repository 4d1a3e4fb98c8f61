"""The table of thresholds: each with a unit and a reason, in one place, and read by the rules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs import ROOT
from trainer.tools import limits

TOOLS = ROOT / "trainer" / "tools"
TABLE = TOOLS / "limits.py"
JUDGING = (  # files that compare what was measured or forecast with a threshold
    "diagnostics/*.py",
    "content.py",
    "report/run_summary.py",
    "runs/noise_scale.py",
    "verbs/before_run.py",
    "verbs/compare.py",
)
NOT_A_JUDGEMENT = {
    "MAX_EVIDENCE", "_MOST_ROWS", "_MOST_TEXT",  # shown
    "DIAGNOSIS_VERSION", "EXIT_BREACH",  # of an output
    "OPENED_BYTES",  # how much is read before a run
}  # fmt: skip


def numbers(path: Path) -> Iterator[tuple[str, int]]:
    """(name, line) of each constant of a module whose value is a number, or some numbers."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            values = [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
            is_plain = not any(isinstance(part, ast.Call | ast.Dict | ast.JoinedStr) for part in ast.walk(node.value))
            if values and is_plain and all(isinstance(value, int | float) for value in values):
                targets = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
                yield from ((each.id, node.lineno) for each in targets if each.id.isupper())


DEFINED = dict(numbers(TABLE))


def test_every_threshold_has_a_unit_and_a_reason() -> None:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    assert len(DEFINED) > 40
    for name, line in DEFINED.items():
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


def test_every_threshold_is_read() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in TOOLS.rglob("*.py"))
    own = TABLE.read_text(encoding="utf-8")
    assert [name for name in DEFINED if f"limits.{name}" not in text and own.count(name) < 2] == []


@pytest.mark.parametrize(("picks", "nats"), [(200, 12.2), (1_000_000, 20.7), (0, 7.6)])
def test_the_bound_on_a_surprise_grows_with_the_logarithm_of_the_picks(picks: int, nats: float) -> None:
    assert limits.surprise_bound(picks) == pytest.approx(nats, abs=0.1)
