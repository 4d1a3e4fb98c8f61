"""What `check_model` says of the models of docs/contract_models.csv: reported faults, more of their kinds, honest models."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.support.honest_models import HONEST
from tests.support.leaks import BROKEN, HONEST_MODELS, PUBLIC, judge
from tests.support.mutant_models import MUTANTS

PAGE = Path(__file__).parents[3] / "docs" / "contract_models.csv"
LINES = {line.split(",")[0]: line for line in PAGE.read_text(encoding="utf-8").splitlines(keepends=True)[1:]}
ROWS = {row["model"]: row for row in csv.DictReader(PAGE.read_text(encoding="utf-8").splitlines())}
NAMES = [*BROKEN, *HONEST_MODELS]
FIRST = {row["by"]: name for name, row in reversed(ROWS.items())}.values()  # that these checks together convict
# test_check_model.py judges the mutants in other ways.
QUICK = {*PUBLIC, *FIRST, *list(HONEST_MODELS)[::4]} - {*MUTANTS, *HONEST}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in NAMES])
def test_a_model_has_the_verdict_of_the_table(name):
    """`make docs` writes the table anew."""
    assert judge(name) == LINES[name]


def test_the_table_convicts_every_broken_model_and_no_honest_one():
    assert list(ROWS) == NAMES
    assert len(BROKEN) >= 60
    assert len(HONEST_MODELS) >= 45
    assert {ROWS[name]["verdict"] for name in BROKEN} == {"broken", "warning"}  # of a detached state
    assert {ROWS[name]["verdict"] for name in HONEST_MODELS} == {"held"}
    missed = {name for name, case in BROKEN.items() if case.check not in ["", *ROWS[name]["by"].split()]}
    assert not missed


def test_a_reported_fault_has_a_source_and_a_twin_that_is_judged():
    assert all("#" in case.source for case in PUBLIC.values())
    assert {case.twin for case in BROKEN.values()} <= set(HONEST_MODELS.values())
