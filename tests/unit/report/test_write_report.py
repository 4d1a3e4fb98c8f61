"""Writing the page of `train report`."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from trainer.errors import UserError
from trainer.tools.diagnostics.diagnose import diagnose
from trainer.tools.report.names import with_distinct_names
from trainer.tools.report.page import render_page
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
    """The start tags of a page, the text of its headings, and its embedded data."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.headings, self.data, self._inside = [], [], "", ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self._inside = "data" if ("id", "data") in attributes else tag

    def handle_data(self, data):
        if self._inside == "data":
            self.data += data
        elif self._inside in ("h1", "h2", "h4"):
            self.headings.append(data.strip())

    def handle_endtag(self, tag):
        self._inside = ""


@pytest.mark.parametrize("num_runs", [1, 2])
def test_a_page_has_every_section_and_no_element_from_the_files_of_a_run(make_run, num_runs):
    hostile = "<img src=x onerror=alert(1)>"
    evictions = {"ledger/false_evictions/lru": [0.0, 2.0], "</script><img>": [1.0, 2.0]}
    runs = [make_run(f"{n}{hostile}", evictions, config={"run": {"name": hostile}}) for n in range(num_runs)]
    runs[0].notes.append(hostile)
    runs[0].events.append({"event": hostile})
    page = Elements(render_page([diagnose(run) for run in with_distinct_names(runs)], plotly="$plotly"))
    assert "img" not in page.tags
    assert page.tags.count("h1") == 1
    for section in ("About the record", "Outcome", "Ledger", "Not in the catalog", "Events", "Config", "Environment"):
        assert section in page.headings
    assert page.headings.count("False evictions lru") == num_runs
    assert [run["name"] for run in json.loads(page.data)["runs"]] == [run.name for run in runs]


@pytest.mark.parametrize(
    ("loss", "words", "class_"),
    [
        ([3.0, 2.0], "Nothing wrong in what was measured; 2 of ", "verdict"),
        ([3.0, float("nan")], "1 finding; 2 of ", "verdict bad"),
    ],
)
def test_the_verdict_says_how_many_rules_judged_the_run(make_run, loss, words, class_):
    page = render_page([diagnose(make_run("a", {"loss": loss}))], plotly="")
    assert words in page
    assert f'class="{class_}"' in page
    assert "Healthy: no findings" not in page
    assert 'class="verdict good"' not in page


def test_a_run_without_training_rows_is_not_called_healthy(make_run):
    run = make_run("a", {"loss": [None]}, {1: {"eval_loss": 2.0}})
    diagnosis = diagnose(run)
    assert diagnosis.verdict is None
    page = render_page([diagnosis], plotly="")
    assert diagnosis.summary in page
    assert "Healthy" not in Elements(page).headings
    assert 'class="verdict good"' not in page


def test_a_value_is_called_the_same_throughout_only_if_it_was_measured_more_than_once(make_run):
    run = make_run("a", {"loss": [3.0, 2.0], "lr": [0.1, 0.1], "grad_norm": [None, 5.0]})
    page = render_page([diagnose(run)], plotly="")
    same, _, once = page.partition("Measured once")
    assert "The same throughout" in same
    assert "<b>0.1</b>  (2 values, steps 1 to 2)" in same
    assert "<b>5</b>  (step 2) <code>grad_norm</code>" in once
    assert "grad_norm" not in same.partition("The same throughout")[2]


def test_a_readout_says_at_which_step_each_value_was(make_run):
    run = make_run("a", {"loss": [3.0, 1.0, 2.0, None], "lr": [0.1, 0.2, 0.3, 0.4]}, {3: {"eval_loss": 2.5}})
    page = render_page([diagnose(run)], plotly="")
    assert "last at step 3: train 2 · held out 2.5" in page
    assert "last 0.4 at step 4 · min 0.1 at step 1 · max 0.4 at step 4" in page
