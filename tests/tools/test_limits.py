"""The table of thresholds: each with a unit and a reason, and read by a rule."""

from __future__ import annotations

import re

import pytest

from tests.support.runs import ROOT
from trainer.tools import limits

TOOLS = ROOT / "trainer" / "tools"
TEXT = (TOOLS / "limits.py").read_text(encoding="utf-8")
DEFINED = re.findall(r"(?m)^([A-Z_0-9]+): Final", TEXT)


def test_every_threshold_has_a_unit_and_a_reason_and_is_read() -> None:
    assert len(DEFINED) > 40
    read = "".join(path.read_text(encoding="utf-8") for path in TOOLS.rglob("*.py"))
    for name in DEFINED:
        assert re.search(rf"(?m)^# [^:]+: .*[\w)]\.\n{name}: ", TEXT), name
        assert f"limits.{name}" in read or TEXT.count(name) > 1, name


@pytest.mark.parametrize(("picks", "nats"), [(200, 12.2), (1_000_000, 20.7), (0, 7.6)])
def test_the_bound_on_a_surprise_grows_with_the_logarithm_of_the_picks(picks: int, nats: float) -> None:
    assert limits.surprise_bound(picks) == pytest.approx(nats, abs=0.1)
