"""Which keys share a chart, that no key is missing, and that reducing a curve hides no value."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.records import write_record
from trainer.metrics.catalog.lookup import CATALOG
from trainer.tools.diagnostics.diagnose import diagnose
from trainer.tools.report.charts import make_charts, make_curve
from trainer.tools.report.figures import depth_figure, depth_figures
from trainer.tools.report.page import DEPTH, render_page
from trainer.tools.report.run_summary import summarize, with_distinct_names
from trainer.tools.runs.depth_curve import curves_of, in_words
from trainer.tools.runs.load import load_run

KEYS = [spec.name.replace("<", "").replace(">", "") for spec in CATALOG]
WITH_WORST = [f"{spec.name}_max" for spec in CATALOG if spec.ranks == "sum_and_worst"]
values = st.floats(allow_nan=True, allow_infinity=True, width=64)


@st.composite
def columns(draw):
    steps = sorted(draw(st.sets(st.integers(1, 10_000), min_size=1, max_size=300)))
    return steps, [draw(values) for _ in steps]


@given(columns(), st.integers(1, 50))
def test_every_value_is_in_the_range_of_the_one_point_that_covers_its_step(column, limit):
    steps, numbers = column
    curve = make_curve(steps, numbers, limit=limit)
    finite = [(step, value) for step, value in zip(steps, numbers, strict=True) if math.isfinite(value)]
    assert {*curve.bad_steps.tolist()} == {*steps} - {step for step, _ in finite}
    assert curve.num_values == len(finite)
    assert len(curve.mean) <= limit
    for step, value in finite:
        (place,) = np.flatnonzero((curve.first <= step) & (step <= curve.last))
        assert curve.low[place] <= value <= curve.high[place]
    if finite:
        assert curve.low.min() == min(value for _, value in finite)
        assert curve.high.max() == max(value for _, value in finite)
        assert (curve.first[1:] > curve.last[:-1]).all()


@pytest.mark.parametrize("num_runs", [1, 2, 3])
def test_every_key_of_the_catalog_and_every_unknown_key_is_in_a_chart(make_run, num_runs):
    train = {key: [1.0, 2.0, 3.0] for key in [*KEYS, *WITH_WORST, "my_own/key"]}
    runs = [make_run(f"r{n}", train, {2: {f"eval_{key}": 1.0 for key in KEYS}}) for n in range(num_runs)]
    charts = make_charts(runs)
    assert {*train, *(f"eval_{key}" for key in KEYS)} <= {key for chart in charts for key in chart.keys}
    assert next(chart for chart in charts if "my_own/key" in chart.keys).group == "Not in the catalog"


def test_colors_stand_for_lines_of_one_run_or_for_several_runs(make_run):
    train = {"token_type/digit/loss": [1.0, 2.0], "token_type/space/loss": [2.0, 1.0]}
    first, second = make_run("a", train), make_run("b", train)
    (both,) = make_charts([first])
    assert [(line.label, line.color) for line in both.lines] == [("digit", 0), ("space", 1)]
    digit, space = make_charts([first, second])
    for chart in (digit, space):
        assert [(line.run, line.color) for line in chart.lines] == [(0, 0), (1, 1)]
    assert digit.title.endswith("digit")


def test_tile_diagnosis_and_chart_read_the_noise_scale_of_the_same_key_and_row(make_run):
    ends = {"": 22.0, "_low": 16.1, "_high": 27.9}
    rows = {f"gns/b_now{end}": [value, value, value + 5] for end, value in ends.items()} | {"gns/b_big": [16.0] * 3}
    now = make_run("now", rows)
    lagging = make_run("lagging", {key.replace("b_now", "b_simple"): values for key, values in rows.items()})
    for run, key in ((now, "gns/b_now"), (lagging, "gns/b_simple")):
        tile = next(row for row in summarize(run) if row.label == "Noise scale")
        (chart,) = (chart for chart in make_charts([run]) if chart.title == "Noise scale and batch size")
        ruling = next(ruling for ruling in diagnose(run).rulings if ruling.rule.name == "batch_size")
        assert chart.keys == (key, f"{key}_low", f"{key}_high", "gns/b_big")
        assert tile.value == chart.lines[0].curve.mean[-1] == 27.0
        assert f"noise scale {tile.text} (" in ruling.outcome.sentence
        assert all(f"{key} at step 3" in text for text in (tile.note, ruling.outcome.sentence))


def test_layers_of_one_run_are_heat_maps_in_the_order_of_their_numbers(make_run):
    names = ["blocks.10", "blocks.2", "blocks.9", "embedding"]
    run = make_run("a", {f"layer/{name}/grad_norm": [1.0, 2.0] for name in names})
    (heat,) = make_charts([run])
    assert (heat.is_heat, heat.title) == (True, "Gradient norm by layer")
    assert [line.label for line in heat.lines] == ["blocks.2", "blocks.9", "blocks.10", "embedding"]
    lines = make_charts([run, make_run("b", {"layer/embedding/grad_norm": [1.0]})])
    assert {chart.is_heat for chart in lines} == {False}
    assert len(lines) == len(names)


def test_runs_of_the_same_name_get_distinct_names(make_run):
    train = {"loss": [1.0]}
    runs = [make_run("a/x", train), make_run("b/x", train)]
    assert [run.name for run in with_distinct_names(runs)] == [str(run.path) for run in runs]
    assert [run.name for run in with_distinct_names(runs[:1])] == ["x"]
    path = str(runs[0].path)
    assert [run.name for run in with_distinct_names([runs[0]] * 2)] == [path, f"{path} (2)"]


def test_a_constant_is_not_drawn(make_run):
    rows = {"ledger/evictions/lru": [0.0, 0.0], "ledger/evictions/stale": [0.0, 2.0], "lr": [0.1, 0.1]}
    drawn = {chart.keys: chart.is_drawn for chart in make_charts([make_run("a", rows)])}
    assert drawn == {("lr",): False, ("ledger/evictions/lru",): False, ("ledger/evictions/stale",): True}


@pytest.mark.parametrize("odd", [math.nan, 1e-300])
def test_one_value_that_is_not_zero_is_drawn(make_run, odd):
    rows = {"ledger/refused_rows": [0.0, odd, 0.0]}
    assert [chart.is_drawn for chart in make_charts([make_run("a", rows)])] == [True]


def test_a_page_is_bounded_in_keys_and_marks(tmp_path):
    run_dir = write_record(tmp_path, {"loss": [2.0, 1.0], **{f"own/{number}": [1.0, 2.0] for number in range(20_000)}})
    pair = {"data.source.a.weight": {"before": 1, "after": 2}}
    event = {"event": "restart", "changed": pair, "note": "x" * 50_000}
    (run_dir / "events.jsonl").write_text("".join(json.dumps({**event, "global_step": n}) + "\n" for n in range(1000)))
    (run_dir / "env.json").write_text(json.dumps({f"key{n}": n for n in range(100_000)}))
    began = time.process_time()
    page = render_page([diagnose(load_run(run_dir))])
    assert len(page) < 10e6
    assert "keys too many for a page: metrics.jsonl has them" in page
    assert time.process_time() - began < 20, "2 s where it was written, and 15 s with a search in each row's keys"


LOSSES = [(1, 3.5), (2, 3.1), (4, 2.9), (8, 2.6), (16, 2.5), (32, 2.4), (64, 2.3)]


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
        ((-0.1, -0.1, -0.1), "raises the loss by 0.1000 +- 0.0040 (95 %) beyond 16 tokens"),
    ],
)
def test_the_sentence_says_what_carrying_is_worth(gains, words):
    (curve,) = curves_of(numbers(gains, error=0.002)).values()
    assert in_words(curve, 16) == f"over documents, carrying {words}"


def test_each_set_is_drawn_with_its_numbers(make_run):
    rows = {key: [9.0, value] for key, value in {**numbers(), **numbers(name="books/")}.items()}
    run = make_run("a", rows)
    (held_out, words, figure), (books, *_) = depth_figures(run)
    assert (held_out, books) == ("held out", "books")
    assert words.startswith("over documents, carrying lowers the loss by 0.2000")
    carried, from_zero, gain = figure["data"]
    assert carried["y"] == [loss for _, loss in LOSSES]
    assert carried["x"] == pytest.approx([start * math.sqrt(2) for start, _ in LOSSES])
    assert (from_zero["y"], gain["y"]) == ([2.5, 2.5, 2.5], [0.0, 0.1, 0.2])
    assert from_zero["x"] == gain["x"] == carried["x"][4:]
    assert gain["error_y"]["array"] == [0.04] * 3
    assert carried["text"][0] == "carried, 1 tokens on: 3.5000 +- 0.0400 (95 %)"
    assert gain["text"][-1] == "gain of carrying, 64 tokens on: 0.2000 +- 0.0400 (95 %)"
    page, charts = render_page([diagnose(run)], plotly=""), make_charts([run])
    assert all(f'data-chart="{len(charts) + at}"' in page for at in (0, 1))
    assert DEPTH in page
    assert not [chart for chart in charts if any("depth/64" in key for key in chart.keys)]
    assert DEPTH not in render_page([diagnose(make_run("b", {"loss": [1.0, 2.0]}))], plotly="")


def test_few_documents_whose_error_is_not_known_are_drawn(make_run):
    run = make_run("a", {key: [value] for key, value in numbers().items() if not key.endswith("_se")})
    ((_, words, figure),) = depth_figures(run)
    assert words == "carrying lowers the loss by 0.2000 beyond a cell (too few documents for its error)"
    assert (figure["data"][-1]["y"], figure["data"][-1]["error_y"]["array"]) == ([0.0, 0.1, 0.2], [None] * 3)


def test_without_an_error_there_is_no_bar():
    values = {key: each for key, each in numbers().items() if key[-3:] != "_se" or key.split("/")[2] != "32"}
    (curve,) = curves_of(values).values()
    assert depth_figure(curve)["data"][-1]["error_y"]["array"] == [0.04, None, 0.04]
