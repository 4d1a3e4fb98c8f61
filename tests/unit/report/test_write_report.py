"""Writing the page of `train report`."""

from __future__ import annotations

import pytest

from trainer.cli.report import write_report
from trainer.errors import UserError


def test_an_existing_page_is_replaced_only_with_force(make_run, tmp_path):
    run, page = str(make_run("a", {"loss": [3.0, 2.0]}).path), tmp_path / "x.html"
    page.write_text("mine")
    with pytest.raises(UserError, match="--force"):
        write_report([run], str(page), force=False)
    assert page.read_text() == "mine"
    write_report([run], str(page), force=True)
    assert "plotly" in page.read_text(encoding="utf-8")
