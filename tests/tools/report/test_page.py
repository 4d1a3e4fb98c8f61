"""The page of `train report`: its sections, and what it says in words."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser

import pytest

from trainer.errors import UserError
from trainer.tools.diagnostics.diagnose import diagnose
from trainer.tools.report.charts import make_charts
from trainer.tools.report.page import chart_groups, render_page
from trainer.tools.report.run_summary import with_distinct_names
from trainer.tools.verbs.records import report


def test_an_existing_page_is_replaced_only_with_force(make_run, tmp_path):
    run, page = str(make_run("a", {"loss": [3.0, 2.0]}).path), tmp_path / "x.html"
    page.write_text("mine")
    with pytest.raises(UserError, match="exists already; name another file, or add --force"):
        report([run], str(page), force=False)
    assert page.read_text() == "mine"
    report([run], str(page), force=True)
    assert "plotly" in page.read_text(encoding="utf-8")


class Elements(HTMLParser):
    """The start tags of a page, and the text of its headings."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.headings = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)

    def handle_data(self, data):
        if self.tags and self.tags[-1] in ("h1", "h2", "h4"):
            self.headings.append(data.strip())


def rendered(*runs):
    runs = with_distinct_names(runs)
    return render_page([diagnose(run) for run in runs], plotly="$plotly")


@pytest.mark.parametrize("num_runs", [1, 2])
def test_a_page_has_every_section_and_no_element_from_the_files_of_a_run(make_run, num_runs):
    hostile = "<img src=x onerror=alert(1)>"
    evictions = {"ledger/false_evictions/lru": [0.0, 2.0], "</script><img>": [1.0, 2.0]}
    runs = [make_run(f"{n}{hostile}", evictions, config={"run": {"name": hostile}}) for n in range(num_runs)]
    runs[0].notes.append(hostile)
    page = Elements(rendered(*runs))
    assert "img" not in page.tags
    assert page.tags.count("h1") == 1
    for section in ("About the record", "Outcome", "Ledger", "Not in the catalog", "Config", "Environment"):
        assert section in page.headings
    assert page.headings.count("false_evictions_lru") == num_runs
    assert hostile in page.headings[0]


@pytest.mark.parametrize(("loss", "class_"), [([3.0, 2.0], "verdict"), ([3.0, float("nan")], "verdict bad")])
def test_few_rules_that_judged_the_run_are_no_good_verdict(make_run, loss, class_):
    page = rendered(make_run("a", {"loss": loss}))
    assert ": 2 of " in page.partition('id="findings"')[2]
    assert "rules" not in page.partition('id="verdict"')[2].partition('id="outcome"')[0]
    assert f'class="{class_}"' in page


def test_what_is_not_drawn_is_said_with_its_values_and_its_keys(make_run):
    zeros = {"ledger/refused_rows": [0.0, 0.0]}
    sets = {f"eval/{name}/loss": loss for name, loss in {"books": 3.5, "code": 2.5, "news": 3.5}.items()}
    run = make_run("a", {**zeros, "loss": [3.0, 2.0]}, {2: sets})
    text = "".join(chart_groups(make_charts([run])).values())
    shown = " ".join(html.unescape(re.sub("<[^>]*>", " ", text)).split())
    assert "The same throughout " in shown
    assert "Loss, by validation set: books 3.5 · code 2.5 · news 3.5 nats/token eval" in shown
