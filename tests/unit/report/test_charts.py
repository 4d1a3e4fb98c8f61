"""Which keys share a chart, and that no key is missing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from trainer.metrics.catalog.lookup import CATALOG
from trainer.tools.diagnostics.diagnose import diagnose
from trainer.tools.report.charts import Columns, chart_id, group_order, variant_of
from trainer.tools.report.encode import encode_charts
from trainer.tools.report.names import with_distinct_names
from trainer.tools.report.page import make_charts, plotly_script, points_per_curve, render_page
from trainer.tools.report.run_summary import summarize
from trainer.tools.runs.load import RunRecord
from trainer.tools.runs.table import RowTable
from trainer.tools.verbs.compare import _fact_cell

KEYS = [spec.name.replace("<", "").replace(">", "") for spec in CATALOG]
WITH_WORST = [f"{spec.name}_max" for spec in CATALOG if spec.ranks == "sum_and_worst"]


def shown_keys(charts):
    return {key for chart in charts for key in chart.keys}


@pytest.mark.parametrize("num_runs", [1, 2, 3])
def test_every_key_of_the_catalog_and_every_unknown_key_is_in_a_chart(make_run, num_runs):
    train = {key: [1.0, 2.0, 3.0] for key in [*KEYS, *WITH_WORST, "my_own/key"]}
    runs = [make_run(f"r{n}", train, {2: {f"eval_{key}": 1.0 for key in KEYS}}) for n in range(num_runs)]
    charts = make_charts(runs)
    # The upper bound is drawn as the edge of a band around the noise scale.
    expected = {*train, *(f"eval_{key}" for key in KEYS)} - {"gns/b_drawn_high"}
    assert expected <= shown_keys(charts)
    assert {chart.group for chart in charts} <= set(group_order())
    assert next(chart for chart in charts if "my_own/key" in chart.keys).group == "Not in the catalog"


def test_a_first_step_that_took_long_does_not_flatten_a_chart_of_times(make_run):
    def chart(values):
        run = make_run(f"r{values[0]}", {"time/data_sec": values, "loss": values})
        charts = make_charts([run])
        encoded = json.loads(encode_charts(charts, [run]))["charts"]
        return {key: (each, code) for each, code in zip(charts, encoded, strict=True) for key in each.keys}

    slow = chart([43.9, *[0.1] * 20, 0.4])
    found, encoded = slow["time/data_sec"]
    assert (found.top, encoded["top"]) == (0.4, 0.4)
    assert dict(found.facts)["Beyond the axis"] == "43.9 s at step 1; zoom in to see it"
    assert slow["loss"][1]["top"] is None
    assert chart([0.9, *[0.1] * 20, 0.4])["time/data_sec"][0].top is None


def test_colors_stand_for_lines_of_one_run_or_for_several_runs(make_run):
    train = {"token_type/digit/loss": [1.0, 2.0], "token_type/space/loss": [2.0, 1.0]}
    first, second = make_run("a", train), make_run("b", train)
    (both,) = make_charts([first])
    assert [(line.label, line.color) for line in both.lines] == [("digit", 0), ("space", 1)]
    digit, space = make_charts([first, second])
    for chart in (digit, space):
        assert [(line.run, line.color) for line in chart.lines] == [(0, 0), (1, 1)]
    assert digit.title.endswith("digit")


def test_evaluation_is_drawn_with_training_in_another_dash(make_run):
    (chart,) = make_charts([make_run("a", {"loss": [3.0, 2.0]}, {2: {"eval_loss": 2.5}})])
    assert [(line.label, line.dash) for line in chart.lines] == [("train", 0), ("held out", 1)]


def test_variants_follow_the_catalog_and_not_the_spelling():
    assert variant_of("eval_loss") == ("loss", "eval")
    assert variant_of("ledger/cold_starts_max") == ("ledger/cold_starts", "worst")
    assert variant_of("stream_mixing/active/remaining_max") == ("stream_mixing/active/remaining_max", "train")
    assert chart_id("stream_mixing/active/remaining_max", is_single=True) == "stream_mixing/active/remaining_max"


def test_references_come_from_the_config(make_run):
    train = {"ledger/live_groups": [5.0, 6.0], "stream_mixing/active/pick_surprise_max": [1.0, 2.0]}
    run = make_run(
        "a", train, config={"ledger": {"capacity": 64}, "train": {"micro_batches": 3}}, environment={"world_size": 2}
    )
    levels = {chart.title: chart.references for chart in make_charts([run])}
    assert [ref.value for ref in levels["Ledger: live groups"]] == [128.0]
    (bound,) = levels["Pool: surprise of the longest wait"]
    assert bound.value == pytest.approx(math.log(2 * 3 / 1e-3))
    assert make_charts([make_run("b", train)])[1].references == ()


def test_tile_diagnosis_and_chart_read_the_noise_scale_of_the_same_key_and_row(make_run):
    ends = {"": 22.0, "_low": 16.1, "_high": 27.9}
    rows = {f"gns/b_now{end}": [value, value, value + 5] for end, value in ends.items()}
    rows |= {f"gns/b_simple{end}": [27.9] * 3 for end in ends} | {"gns/b_big": [16.0] * 3}
    now = make_run("now", rows)
    drawn = make_run("drawn", rows | {f"gns/b_drawn{end}": [None, 40.0, value] for end, value in ends.items()})
    for run, key, last in ((now, "gns/b_now", 27.0), (drawn, "gns/b_drawn", 22.0)):
        tile = next(row for row in summarize(run) if row.label == "Noise scale")
        chart = next(chart for chart in make_charts([run]) if chart.title == "Noise scale and batch size")
        ruling = next(ruling for ruling in diagnose(run).rulings if ruling.rule.name == "batch_size")
        assert (tile.value, chart.keys, chart.lines[0].curve.mean[-1]) == (last, (key, f"{key}_low", "gns/b_big"), last)
        assert tile.note.startswith(f"{key} at step 3")
        assert f"noise scale {tile.text} (" in ruling.outcome.sentence
        assert f"({key} at step 3" in ruling.outcome.sentence
    titles = [chart.title for chart in make_charts([now, drawn]) if chart.title.startswith("Noise scale and batch")]
    assert titles == ["Noise scale and batch size (gns/b_drawn)", "Noise scale and batch size (gns/b_now)"]


def test_tile_comparison_and_diagnosis_say_alike_why_a_noise_scale_is_not_known(make_run):
    run = make_run("a", {"gns/b_now_low": [0.0] * 3, "gns/b_now_steps": [40.0] * 3, "gns/b_big": [16.0] * 3})
    why = "not known yet: neither a lower nor an upper bound (gns/b_now at step 3, from the last 40 steps)"
    row = next(row for row in summarize(run) if row.label == "Noise scale")
    assert (row.text, row.note) == ("–", why)
    tile = render_page([diagnose(run)], plotly="").partition("<dt>Noise scale</dt>")[2].partition("</div>")[0]
    assert tile == f'<dd class="value">– </dd><dd class="note">{why}</dd>'
    ruling = next(ruling for ruling in diagnose(run).rulings if ruling.rule.name == "batch_size")
    assert ruling.outcome.verdict == "not_measured"
    assert ruling.outcome.sentence == f"the noise scale is {why}"
    cell = _fact_cell(row)
    assert cell.plain == f"–\n({why})"


def test_the_noise_scale_has_a_band_where_both_bounds_are_known_and_else_a_lower_bound(make_run):
    low = [8.0, 9.0, 10.0]
    rows = {"gns/b_now": [10.0, None, 14.0], "gns/b_now_low": low, "gns/b_now_high": [12.0, None, 18.0]}
    (chart,) = make_charts([make_run("a", {**rows, "gns/b_big": [8.0] * 3})])
    spread = chart.lines[0].spread
    assert spread is not None
    assert spread.first.tolist() == [1, 3]
    assert spread.low.tolist() == [8.0, 10.0]
    assert spread.high.tolist() == [12.0, 18.0]
    assert chart.lines[1].curve.mean.tolist() == low
    assert chart.lines[1].spread is None


def test_layers_of_one_run_are_heat_maps_in_the_order_of_their_numbers(make_run):
    names = ["blocks.10", "blocks.2", "blocks.9", "embedding"]
    run = make_run("a", {f"layer/{name}/grad_norm": [1.0, 2.0] for name in names})
    (heat,) = make_charts([run])
    assert (heat.style, heat.title) == ("heat", "Gradient norm by layer")
    assert [line.label for line in heat.lines] == ["blocks.2", "blocks.9", "blocks.10", "embedding"]
    lines = make_charts([run, make_run("b", {"layer/embedding/grad_norm": [1.0]})])
    assert {chart.style for chart in lines} == {"line"}
    assert len(lines) == len(names)


def test_lost_state_is_a_running_total(make_run):
    run = make_run("a", {"ledger/cold_starts": [0.0, 2.0, 3.0], "ledger/cold_starts_max": [0.0, 1.0, 3.0]})
    total, worst = make_charts([run])
    assert total.lines[0].curve.mean.tolist() == [0.0, 2.0, 5.0]
    assert worst.title == "Cold starts, worst rank"
    assert worst.lines[0].curve.mean.tolist() == [0.0, 1.0, 3.0]


def test_the_points_stay_within_the_budget_for_any_number_of_runs(make_run):
    run = make_run("a", {f"objective/part{n}": [1.0, 2.0] for n in range(60)})
    assert points_per_curve([run]) == 1500
    assert points_per_curve([run] * 10) * 600 <= 150_000


def test_charts_are_strict_json_that_cannot_end_its_script_element(make_run):
    run = make_run("a", {"loss": [1.0, math.nan, 2.0], "</script><b>": [1.0]})
    text = encode_charts(make_charts([run]), [run])
    assert "<" not in text
    page = json.loads(text)
    (line,) = page["charts"][0]["lines"]
    assert line["bad"] == [2]
    assert page["steps"][line["steps"]]["x"] == [1, 3]
    assert line["y"] == [1, 2]
    assert page["charts"][1]["title"] == "</script><b>"


def test_runs_of_the_same_name_get_distinct_names(make_run):
    train = {"loss": [1.0]}
    runs = [make_run("a/x", train), make_run("b/x", train)]
    assert [run.name for run in with_distinct_names(runs)] == ["a/x", "b/x"]
    assert [run.name for run in with_distinct_names([runs[0], runs[0]])] == ["x", "x (2)"]
    assert Columns(with_distinct_names(runs), 10).runs[0].name == "a/x"


def test_a_page_of_a_hundred_thousand_logged_steps_of_sixty_keys_stays_below_15_mb():
    generator = np.random.Generator(np.random.Philox(1))
    rows = generator.normal(size=(100_000, 60))
    table, keys = RowTable(merge_same_step=False), tuple(f"objective/part{n}" for n in range(60))
    for step, row in enumerate(rows.tolist(), start=1):
        table.add(step, 0, keys, row)
    run = RunRecord(Path("long"), table, RowTable(merge_same_step=True))
    page = render_page([diagnose(run)], plotly=plotly_script())
    assert len(page.encode()) < 15e6
    assert "100,000 values in 1,500 buckets" in page


def test_what_carrying_is_worth_has_a_chart_with_bands_of_its_errors(make_run):
    gain, gap = [0.1, None, 0.3, 0.4], [-0.02, None, 0.0, math.nan]
    rows = {
        "ledger/carry_gain": gain,
        "ledger/carry_gain_se": [0.01, None, None, 0.02],
        "ledger/stale_gap": gap,
        "ledger/stale_gap_se": [0.005, None, 0.001, math.nan],
        "ledger/state_age": [4.0, None, 5.0, 6.0],
        "ledger/state_age_se": [1.0, None, 0.0, 0.0],
    }
    charts = {chart.title: chart for chart in make_charts([make_run("a", rows)])}
    assert charts.keys() == {"Ledger: what carrying is worth", "Age of the states"}
    first, second = charts["Ledger: what carrying is worth"].lines
    assert first.curve.mean.tolist() == [0.1, 0.3, 0.4]
    assert first.spread is not None
    # A probe of one row has no error, and what is not finite no band.
    assert first.spread.first.tolist() == [1, 4]
    assert first.spread.low == pytest.approx([0.08, 0.36])
    assert first.spread.high == pytest.approx([0.12, 0.44])
    assert second.spread is not None
    assert second.spread.low == pytest.approx([-0.03, -0.002])
    (age,) = charts["Age of the states"].lines
    assert age.spread is not None
    assert age.spread.high.tolist() == [6.0, 5.0, 6.0]


def test_one_probe_of_one_row_is_drawn_without_a_band(make_run):
    charts = make_charts(
        [make_run("a", {"ledger/carry_gain": [0.1]}), make_run("b", {"ledger/carry_gain": [0.1, 0.2]})]
    )
    assert [line.spread for chart in charts for line in chart.lines] == [None, None]
