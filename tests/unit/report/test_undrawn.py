"""Charts that the page says in words instead of drawing them."""

from __future__ import annotations

import html
import math
import re

import pytest

from trainer.tools.report.charts import Columns, catalog_charts
from trainer.tools.report.page import make_charts
from trainer.tools.report.sections import chart_groups
from trainer.tools.report.undrawn import is_undrawn

EVICTIONS = "ledger/evictions/lru"


def text_of(charts, *, is_single=True):
    shown = chart_groups(charts, is_single=is_single)
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", shown)).split())


def test_zeros_are_one_line_and_a_combined_view_of_zeros_is_not_drawn(make_run):
    zeros = {key: [0.0, 0.0, 0.0] for key in (EVICTIONS, "ledger/evictions/stale", "ledger/refused_rows")}
    charts = make_charts([make_run("a", {**zeros, "ledger/fill_fraction": [0.1, 0.2, 0.3]})])
    assert [chart.title for chart in charts if not is_undrawn(chart)] == ["Fill of the ledger"]
    assert (
        "Zero throughout (3 values, steps 1 to 3): "
        "Ledger: evictions, running total ( ledger/evictions/lru, ledger/evictions/stale ) · "
        "Refused rows ( ledger/refused_rows )"
    ) in text_of(charts)
    assert "The same throughout" not in text_of(charts)


@pytest.mark.parametrize("key", [EVICTIONS, "ledger/refused_rows", "ledger/evictions/lru_max"])
@pytest.mark.parametrize("odd", [1.0, math.nan, math.inf, 1e-300])
def test_one_value_that_is_not_zero_is_drawn(make_run, key, odd):
    zeros, other = [0.0] * 5, make_run("b", {key: [0.0]})
    for runs in ([make_run("a", {key: [*zeros, odd, *zeros]})], [make_run("c", {key: [*zeros, odd, *zeros]}), other]):
        assert [is_undrawn(chart) for chart in make_charts(runs)] == [False]


def test_a_view_is_drawn_where_one_of_its_keys_is_not_zero(make_run):
    run = make_run("a", {EVICTIONS: [0.0, 0.0], "ledger/evictions/stale": [0.0, 2.0]})
    (view,) = make_charts([run])
    assert not is_undrawn(view)


def test_zeros_with_an_error_bar_are_drawn(make_run):
    run = make_run("a", {"ledger/carry_gain": [0.0, 0.0], "ledger/carry_gain_se": [0.1, 0.2]})
    (chart,) = make_charts([run])
    assert chart.lines[0].spread is not None
    assert not is_undrawn(chart)


def test_runs_of_other_lengths_say_how_many_values_each_has(make_run):
    runs = [make_run(name, {"ledger/refused_rows": [0.0] * steps}) for name, steps in (("a", 9), ("b", 21))]
    assert "Zero throughout (9 to 21 values, steps 1 to 21):" in text_of(make_charts(runs), is_single=False)


def test_a_single_zero_is_measured_once(make_run):
    assert "Zero throughout" not in text_of(make_charts([make_run("a", {"ledger/refused_rows": [0.0]})]))


def test_each_value_that_is_listed_names_its_validation_set(make_run):
    sets = {f"eval/{name}/loss": loss for name, loss in {"books": 3.5, "code": 2.5, "news": 3.5}.items()}
    run = make_run("a", {"loss": [3.0, 2.0]}, {2: sets})
    (chart,) = catalog_charts(Columns([run], 10), sets)
    assert "Measured once Loss, by validation set : books, news 3.5 · code 2.5 nats/token (step 2)" in text_of([chart])
    assert "eval/books/loss, eval/code/loss, eval/news/loss" in text_of([chart])


def test_each_value_that_is_listed_names_its_run_where_runs_differ(make_run):
    runs = [make_run(name, {"lr": [rate, rate]}) for name, rate in (("a", 0.1), ("b", 0.2))]
    assert "Learning rate : a 0.1 · b 0.2 (2 values, steps 1 to 2) lr" in text_of(make_charts(runs), is_single=False)
    same = [make_run(name, {"lr": [0.1, 0.1]}) for name in ("c", "d")]
    assert "Learning rate : 0.1 (2 values, steps 1 to 2) lr" in text_of(make_charts(same), is_single=False)
