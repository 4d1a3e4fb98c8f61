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
from trainer.tools.report.page import plotly_script, render_page, render_parts


def decoded(text):
    """The page's data with its columns in place."""
    page = json.loads(text)
    columns = [np.frombuffer(base64.b64decode(c["bdata"]), c["dtype"]).tolist() for c in page["columns"]]
    text = json.dumps({**page, "columns": None})
    return json.loads(text, object_hook=lambda found: columns[found["column"]] if "column" in found else found)


def figures(*runs):
    return {
        figure["name"]: figure
        for figure in decoded(encode_charts(make_charts(runs), runs))["charts"]
        if figure is not None
    }


def test_charts_are_strict_json_that_cannot_end_its_script_element(make_run):
    run = make_run("a", {"loss": [1.0, math.nan, 1e300], "</script><b>": [1.0, 2.0]})
    text = encode_charts(make_charts([run]), [run])
    assert "<" not in text
    loss, other = decoded(text)["charts"]
    assert [(trace["x"], trace["y"]) for trace in loss["data"]] == [([1, 3], [1, 1e300])]
    assert [(mark["x"], mark["text"]) for mark in loss["layout"]["annotations"]] == [(2, "×")]
    assert other["name"] == "Not in the catalog: </script><b>"


def test_a_line_is_broken_where_its_key_was_absent_for_long(make_run):
    (figure,) = figures(make_run("a", {"loss": [float(n) if n < 12 or n > 40 else None for n in range(50)]})).values()
    (trace,) = figure["data"]
    (gap,) = [place for place, y in enumerate(trace["y"]) if math.isnan(y)]
    assert (trace["x"][gap - 1], trace["x"][gap + 1]) == (12, 42)


@pytest.mark.parametrize(
    ("losses", "skipped"),
    [
        ([90.0, *[3.0, 2.9] * 6], 1),
        ([6.0, *[3.0, 1.0] * 6], None),
        ([1.0, *[0.0] * 12], None),
        ([90.0, 3.0, 2.9], None),
    ],
)
def test_a_first_value_that_would_flatten_the_others_is_shown_on_zooming_only(make_run, losses, skipped):
    (figure,) = figures(make_run("a", {"loss": losses})).values()
    assert figure["skipped"] == skipped


def test_words_of_close_marks_do_not_overlap_even_in_a_chart_of_few_steps(make_run):
    run = make_run("a", {"loss": [1.0] * 49 + [2.0], "time/open/all": [1.0, 2.0]})
    restarts = [SimpleNamespace(global_step=step) for step in (22, 49)]
    mix = {"event": "mix", "global_step": 20, "changed": {"data.source.a.weight": {"before": 1, "after": 2}}}
    events = [mix, {"event": "mix", "global_step": 9, "problem": "refused"}]
    for figure in figures(replace(run, restarts=restarts, events=events)).values():
        shapes = [(shape["x0"], shape["label"]) for shape in figure["layout"]["shapes"]]
        words = [(step, label["text"], label.get("xanchor")) for step, label in shapes]
        assert words == [(49, "restart", "right"), (22, "restart", "left"), (20, "", None)]


def test_a_far_level_is_not_drawn_and_the_band_and_a_near_level_are(make_run):
    rows = {"ledger/live_groups": [5.0, 6.0], "ledger/fill_fraction": [0.1, 0.2]}
    for capacity, levels in ((8, [8.0]), (800, [])):
        run = make_run(f"r{capacity}", rows, config={"ledger": {"capacity": capacity}}, environment={"world_size": 1})
        found = figures(run)
        view = found["Ledger: Ledger: live groups"]
        assert view["levels"] == [shape["y0"] for shape in view["layout"]["shapes"]] == levels
        (band,) = found["Ledger: Fill of the ledger"]["layout"]["shapes"]
        assert (band["type"], band["y0"], band["y1"], band["layer"]) == ("rect", None, 0.95, "below")


def test_errors_are_bars_of_two_and_buckets_have_a_shade_of_their_range(make_run):
    gain = {"ledger/carry_gain": [0.1, 0.3], "ledger/carry_gain_se": [0.01, 0.02]}
    (trace,) = figures(make_run("a", gain))["Ledger: Ledger: what carrying is worth"]["data"]
    assert trace["error_y"]["array"] == pytest.approx([0.02, 0.04])
    values = [1.0] * 4000
    values[1234] = 900.0
    shade, mean = figures(make_run("b", {"loss": values}))["Training: Loss"]["data"]
    assert (max(shade["y"]), min(shade["y"])) == (900.0, 1.0)
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
    page = render_page(["long"], render_parts([diagnose(run)]), plotly=plotly_script())
    assert len(page.encode()) < 15e6
    assert "points are buckets" in page
