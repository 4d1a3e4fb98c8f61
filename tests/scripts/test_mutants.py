"""The table of mutants fits the code, and the tests catch every mutant."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts.mutants import MUTANTS, ROOT, problem_of

MUTANT_LIST = [(area, mutant) for area, mutants in MUTANTS.items() for mutant in mutants]


def test_each_mutant_changes_one_place_of_a_file_and_names_a_test_file() -> None:
    problems = [
        f"{area}: {problem} ({mutant.old!r})" for area, mutant in MUTANT_LIST if (problem := problem_of(mutant))
    ]
    assert problems == []


def test_each_mutant_names_a_test_that_its_file_defines() -> None:
    for _, mutant in MUTANT_LIST:
        file, _, name = mutant.test.partition("::")
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), mutant.test


def test_no_mutant_is_listed_twice() -> None:
    changes = [(mutant.file, mutant.old, mutant.new) for _, mutant in MUTANT_LIST]
    assert len(set(changes)) == len(changes)


def test_each_area_has_enough_mutants() -> None:
    assert len(MUTANT_LIST) >= 60
    for area in ("ledger", "data", "gns", "reductions", "step", "checkpoint"):
        assert len(MUTANTS[area]) >= 8, area


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_mutant_is_caught() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "mutants.py"), "--workers", "2"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
