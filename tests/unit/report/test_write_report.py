"""The page as `train report` writes it."""

from __future__ import annotations

import pytest

from trainer.cli.verbs.report import report
from trainer.errors import UserError


def test_a_page_that_is_there_is_replaced_only_with_force(make_run, tmp_path):
    run, page = str(make_run("a", {"loss": [3.0, 2.0]}).path), tmp_path / "x.html"
    page.write_text("mine")
    with pytest.raises(UserError, match="exists already; name another file, or add --force"):
        report([run], str(page), force=False)
    assert page.read_text() == "mine"
    report([run], str(page), force=True)
    assert "plotly" in page.read_text(encoding="utf-8")
