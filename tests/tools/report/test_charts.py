"""The page of `train report`: no key is missing, no value hidden, and nothing of a run's files acts on the page."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html import escape

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.records import record_of
from trainer.metrics.catalog import CATALOG
from trainer.metrics.payload_contract import Restart
from trainer.tools.diagnostics.diagnose import diagnose
from trainer.tools.report.charts import make_charts, make_curve, restart_marks
from trainer.tools.report.page import render_page
from trainer.tools.report.run_summary import summarize
from trainer.tools.runs.readings import curves_of, in_words

KEYS = [spec.name.replace("<", "").replace(">", "") for spec in CATALOG]
WITH_WORST = [f"{spec.name}_max" for spec in CATALOG if spec.ranks == "sum_and_worst"]
LOSSES = [(1, 3.5), (2, 3.1), (4, 2.9), (8, 2.6), (16, 2.5), (32, 2.4), (64, 2.3)]


@given(st.dictionaries(st.integers(1, 10_000), st.floats(width=64), min_size=1), st.integers(1, 50))
def test_a_curve_of_few_points_keeps_every_extreme_and_every_value_that_is_not_finite(rows, limit):
    steps, values = zip(*sorted(rows.items()), strict=True)
    curve = make_curve(steps, values, limit=limit)
    finite = [value for value in values if math.isfinite(value)]
    assert curve.bad_steps == [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
    assert len(curve.mean) == min(limit, len(finite))
    assert (np.diff(curve.steps) > 0).all()
    if finite:
        assert (curve.low.min(), curve.high.max()) == (min(finite), max(finite))
    if len(finite) <= limit:
        assert curve.mean.tolist() == finite


@pytest.mark.parametrize("num_runs", [1, 2])
def test_every_key_of_the_catalog_and_every_unknown_key_is_in_one_chart(num_runs):
    train = {key: [1.0, 2.0, 3.0] for key in [*KEYS, *WITH_WORST, "my_own/key"]}
    evals = {2: {f"eval_{key}": 1.0 for key in KEYS} | {"my_own/key": math.nan}}
    charts = make_charts([record_of(train, evals, label=f"r{n}") for n in range(num_runs)])
    drawn = [key for chart in charts for key in chart.keys]
    assert len(drawn) == len({*drawn})
    assert {*train, *(f"eval_{key}" for key in KEYS)} <= {*drawn}
    assert [chart.keys for chart in charts[-2:]] == [["my_own/key"], ["eval_my_own/key"]]
    assert (charts[-1].group, charts[-1].notes) == ("Not in the catalog", ["not finite at step 2"])


def shown(chart):
    return [(line["name"], line["line"]["color"]) for line in chart.figure["data"]]


def test_colors_stand_for_lines_of_one_run_or_for_several_runs():
    names = ["blocks.2", "blocks.10", "embedding"]
    norms = {f"layer/{name}/grad_norm": [1.0, 2.0] for name in names}
    run = record_of(norms, {1: {"eval_loss": 2.0}, 2: {"eval_loss": 1.0}})
    loss, layers = make_charts([run])
    assert loss.title == "Loss (evaluation)"
    assert shown(layers) == [(f"{name}/grad_norm", f"c{place}") for place, name in enumerate(names)]
    loss, *_, layers = make_charts([record_of({"lr": [1.0]}), replace(run, label="a"), replace(run, label="b")])
    assert shown(loss) == [("eval_loss", "c1"), ("eval_loss", "c2")]
    assert [line["meta"] for line in loss.figure["data"]] == [["a", ""], ["b", ""]]
    assert [color for _, color in shown(layers)] == ["c1", "c2"] * 3
    assert [line["showlegend"] for line in layers.figure["data"]] == [True, False] * 3
    dashes = [line["line"]["dash"] for line in layers.figure["data"]]
    assert dashes == ["solid", "solid", "dot", "dot", "dash", "dash"]


def test_standard_errors_are_not_drawn_next_to_the_values():
    charts = make_charts([record_of({"loss": [2.0, 1.0]}, {2: {"eval_loss": 2.0, "eval_loss_se": 0.01}})])
    assert [chart.keys for chart in charts] == [["loss", "eval_loss"], ["eval_loss_se"]]
    assert charts[0].title == "Loss"


def test_tile_diagnosis_and_chart_read_the_noise_scale_of_the_same_key_and_row():
    ends = {"": 22.0, "_low": 16.1, "_high": 27.9, "_steps": 30.0}
    rows = {f"gns/b_now{end}": [value, value, value + 5] for end, value in ends.items()} | {"gns/b_big": [16.0] * 3}
    run = record_of(rows)
    tile = next(row for row in summarize(run) if row.label == "Noise scale")
    *_, batch, chart = sorted(make_charts([run]), key=lambda chart: (len(chart.keys), "gns/b_big" in chart.keys))
    ruling = next(ruling for ruling in diagnose(run).rulings if ruling.rule.name == "batch_size")
    assert (chart.keys, batch.keys) == (["gns/b_now", "gns/b_now_low", "gns/b_now_high"], ["gns/b_big"])
    assert chart.figure["data"][0]["y"][-1] == 27.0
    assert tile.text.startswith("27 (")
    assert f"noise scale {tile.text} (" in ruling.outcome.sentence
    assert all("gns/b_now at step 3" in text for text in (tile.note, ruling.outcome.sentence))


def test_band_restarts_bad_values_and_the_range_of_buckets_are_drawn():
    values = [0.5] * 4000
    values[1234], values[2345] = 0.9, math.nan
    run = record_of({"ledger/fill_fraction": values}, restarts=[Restart(20)])
    (chart,) = make_charts([run])
    shade, mean = chart.figure["data"]
    assert (max(shade["y"]), max(mean["y"]) < 0.9, len(shade["x"])) == (0.9, True, 2 * len(mean["x"]))
    (band,), (restart,) = chart.figure["layout"]["shapes"], restart_marks([run])
    assert (band["y0"], band["y1"], restart["x0"], restart["x1"]) == (None, 0.95, 20, 20)
    assert chart.notes == ["not finite at step 2,346", "points are buckets: the line is the mean, the shade the range"]


@pytest.mark.parametrize("num_runs", [1, 2])
def test_a_page_has_every_section_and_no_element_from_the_files_of_a_run(num_runs):
    hostile = "<img src=x onerror=alert(1)></script>"
    rows = {"ledger/false_evictions/lru": [0.0, 2.0], f"{hostile}": [1.0, 2.0]}
    config = {"run": {"name": hostile}}
    runs = [record_of(rows, label=f"{n}{hostile}", config=config, notes=[hostile]) for n in range(num_runs)]
    page = render_page([diagnose(run) for run in runs])
    assert "<img src=x" not in page
    for section in ("About the record", "Outcome", "Ledger", "Not in the catalog", "Config", "Environment"):
        assert f"<h2>{section}</h2>" in page
    assert page.count("<h4>false_evictions_lru ") == num_runs
    assert f"<h1>0{escape(hostile)}" in page
    (data,) = re.findall(r'id="data">(.*?)</script>', page)
    assert len(json.loads(data, parse_constant=pytest.fail)["figures"]) == 2


def test_a_run_without_rows_is_shown_with_the_reason():
    failed = record_of({}, label="b", status={"state": "failed", "reason": "KeyError: 'x'"})
    for runs in ([failed], [record_of({"loss": [2.0, 1.0]}, label="a"), failed]):
        page = render_page([diagnose(run) for run in runs])
        assert "the run failed: KeyError: &#39;x&#39;" in page
        assert "failed at step 0: KeyError: &#39;x&#39;" in page


def test_a_page_of_many_logged_steps_and_restarts_stays_below_15_mb():
    rows = np.random.Generator(np.random.Philox(1)).normal(size=(60, 20_000))
    columns = {f"objective/part{n}": row.tolist() for n, row in enumerate(rows)}
    run = record_of(columns, restarts=[Restart(step) for step in range(5_000)])
    assert len(render_page([diagnose(run)]).encode()) < 15e6


def numbers(gains=(0.0, 0.1, 0.2), error=0.02, name="") -> dict[str, float]:
    """An evaluation with cells of 16 tokens."""
    front = f"eval/{name}depth"
    found = {f"{front}/beyond_cell/carry_gain": max(gains), f"{front}/0/loss": 5.0}
    for start, loss in LOSSES:
        found[f"{front}/{start}/loss"] = loss
        if start >= 16:
            gain = gains[int(math.log2(start)) - 4]
            found |= {f"{front}/{start}/loss_from_zero": loss + gain, f"{front}/{start}/carry_gain": gain}
    return found | {f"{key}_se": error for key in found}


@pytest.mark.parametrize(
    ("gains", "words"),
    [
        ((0.12, 0.12, 0.12), "lowers the loss by 0.1200 +- 0.0040 (95 %) beyond 16 tokens"),
        ((0.12, 0.03, 0.02), "lowers the loss by 0.1200 +- 0.0040 (95 %) beyond 16 tokens; nothing beyond 64"),
        ((0.0, 0.0, 0.001), "changes the loss by -0.0010 +- 0.0040 (95 %) beyond 16 tokens: nothing to tell from 0"),
        ((math.nan,) * 3, "changes the loss by nan beyond 16 tokens"),
        ((-0.1, -0.1, -0.1), "raises the loss by 0.1000 +- 0.0040 (95 %) beyond 16 tokens"),
    ],
)
def test_the_sentence_says_what_carrying_is_worth(gains, words):
    (curve,) = curves_of(numbers(gains, error=0.002)).values()
    assert in_words(curve, 16) == f"over documents, carrying {words}"


def test_the_loss_against_depth_of_each_set_is_drawn_with_the_errors_that_are_known():
    values = {**numbers(), **numbers(name="books/")}
    run = record_of({key: [value] for key, value in values.items() if key != "eval/depth/32/carry_gain_se"})
    held_out, books = make_charts([run])
    assert [chart.title for chart in (held_out, books)] == ["held out", "books"]
    assert held_out.notes[0].startswith("over documents, carrying lowers the loss by 0.2000")
    carried, from_zero, gain = held_out.figure["data"]
    assert carried["y"] == [loss for _, loss in LOSSES]
    assert carried["x"] == pytest.approx([start * math.sqrt(2) for start, _ in LOSSES])
    assert (from_zero["y"], gain["y"]) == ([2.5, 2.5, 2.5], [0.0, 0.1, 0.2])
    assert gain["error_y"]["array"] == [0.04, None, 0.04]
    assert carried["error_y"]["array"] == [0.04] * len(LOSSES)
    assert gain["text"][-1] == "gain of carrying, 64 tokens on: 0.2000 +- 0.0400 (95 %)"
    both = make_charts([replace(run, label="a"), record_of({"loss": [1.0]}, label="b"), replace(run, label="c")])[0]
    expected = [(["a"], "c0")] * 3 + [(["c"], "c2")] * 3
    assert [(line["meta"], line["line"]["color"]) for line in both.figure["data"]] == expected
    assert [note[:3] for note in both.notes] == ["a: ", "c: "]
    title = "Is context worth its cost?"
    assert re.search(f"{re.escape(title)}.*over documents, carrying", render_page([diagnose(run)]), re.S)
    for other in ({"loss": [1.0, 2.0]}, {**{key: [1.0] for key in numbers()}, "eval/depth/1/loss": [math.inf]}):
        assert title not in render_page([diagnose(record_of(other))])
        assert {*other} == {key for chart in make_charts([record_of(other)]) for key in chart.keys}
