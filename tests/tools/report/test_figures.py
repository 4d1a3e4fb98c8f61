"""Charts as plotly figures: what the page is given to draw."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.records import record_of
from trainer.tools.diagnostics.diagnose import diagnose
from trainer.tools.report.charts import make_charts
from trainer.tools.report.figures import encode_charts
from trainer.tools.report.page import plotly_script, render_page


def decoded(text):
    """The page's data with its columns in place."""
    page = json.loads(text)
    columns = [np.frombuffer(base64.b64decode(c["bdata"]), c["dtype"]).tolist() for c in page["columns"]]
    text = json.dumps({**page, "columns": None})
    return json.loads(text, object_hook=lambda found: columns[found["column"]] if "column" in found else found)


def figures(*runs):
    charts = decoded(encode_charts(make_charts(runs), runs))["charts"]
    return {figure["name"]: figure for figure in charts if figure}


def test_charts_are_strict_json_that_cannot_end_its_script_element(make_run):
    run = make_run("a", {"loss": [1.0, math.nan, 1e300], "</script><b>": [1.0, 2.0]})
    text = encode_charts(make_charts([run]), [run])
    assert "<" not in text
    loss, other = decoded(text)["charts"]
    assert [(trace["x"], trace["y"]) for trace in loss["data"]] == [([1, 3], [1, 1e300])]
    assert [(mark["x"], mark["text"]) for mark in loss["layout"]["annotations"]] == [(2, "×")]
    assert other["name"] == "Not in the catalog: </script><b>"


@pytest.mark.parametrize(
    ("losses", "skipped"),
    [([9.0, *[3.0, 2.9] * 6], 1), ([6.0, *[3.0, 1.0] * 6], None), ([1.0, *[0.0] * 12], None), ([9.0, 3.0, 2.9], None)],
)
def test_a_first_value_that_would_flatten_the_others_is_shown_on_zooming_only(make_run, losses, skipped):
    (figure,) = figures(make_run("a", {"loss": losses})).values()
    assert figure["skipped"] == skipped


def test_the_first_step_of_times_does_not_set_their_range(make_run):
    found = figures(make_run("a", {"loss": [3.0, 2.0], "step_time_sec": [90.0, 1.0]}))
    assert {name: figure["skipped"] for name, figure in found.items()} == {
        "Training: Loss": None,
        next(name for name in found if "Loss" not in name): 1,
    }


def test_words_of_close_marks_do_not_overlap_even_in_a_chart_of_few_steps(make_run):
    run = make_run("a", {"loss": [1.0] * 49 + [2.0], "time/open/all": [1.0, 2.0]})
    restarts = [SimpleNamespace(global_step=step) for step in (20, 22, 49)]
    for figure in figures(replace(run, restarts=restarts)).values():
        shapes = [(shape["x0"], shape["label"]) for shape in figure["layout"]["shapes"]]
        words = [(step, label["text"], label.get("xanchor")) for step, label in shapes]
        assert words == [(49, "restart", "right"), (22, "restart", "left"), (20, "", None)]


def test_the_healthy_band_is_shaded(make_run):
    (figure,) = figures(make_run("a", {"ledger/fill_fraction": [0.1, 0.2]})).values()
    (band,) = figure["layout"]["shapes"]
    assert (band["type"], band["y0"], band["y1"], band["layer"]) == ("rect", None, 0.95, "below")


def test_buckets_have_a_shade_of_their_range(make_run):
    values = [1.0] * 4000
    values[1234], values[2345] = 900.0, -50.0
    shade, mean = figures(make_run("b", {"loss": values}))["Training: Loss"]["data"]
    assert (max(shade["y"]), min(shade["y"])) == (900.0, -50.0)
    assert max(mean["y"]) < 900.0
    assert len(shade["x"]) == 2 * len(mean["x"])


def test_cells_of_a_heat_map_are_logarithms_by_layer(make_run):
    rows = {"layer/blocks.10/grad_norm": [1.0, 10.0], "layer/blocks.9/grad_norm": [None, 0.0]}
    (figure,) = figures(make_run("a", rows)).values()
    (heat,) = figure["data"]
    assert (heat["y"], heat["x"]) == (["blocks.9", "blocks.10"], [1, 2])
    assert heat["z"][1] == [0.0, 1.0]
    assert math.isnan(heat["z"][0][0])
    assert heat["z"][0][1] == heat["zmin"] == 0.0  # 0 has the color of the lowest


def test_a_page_of_many_logged_steps_of_sixty_keys_stays_below_15_mb():
    rows = np.random.Generator(np.random.Philox(1)).normal(size=(20_000, 60))
    keys = [f"objective/part{n}" for n in range(60)]
    run = record_of({step: dict(zip(keys, row, strict=True)) for step, row in enumerate(rows.tolist(), start=1)})
    page = render_page([diagnose(run)], plotly=plotly_script())
    assert len(page.encode()) < 15e6
    assert "points are buckets" in page
