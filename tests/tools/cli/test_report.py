"""`train report` and `train compare` as their users meet them: a real run, the real program, a real browser."""

from __future__ import annotations

import csv
import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.browser import opened
from tests.support.in_process import program
from tests.support.records import write_record
from tests.support.runs import read_rows, run, write_tiny_config
from trainer.errors import UserError
from trainer.tools.verbs.records import report

STEPS = 20
RESTARTED_AT = 12


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """A real run that was stopped and went on, a copy with another learning rate, and one that failed at once."""
    directory = tmp_path_factory.mktemp("report")
    config = write_tiny_config(directory, extra="\n[eval]\nevery = 10\nbatches = 1\nholdout_fraction = 0.2\n")
    first, second = directory / "runs" / "first", directory / "runs" / "second"
    for arguments in (
        ["--run-dir", first, "--steps", RESTARTED_AT],
        ["--run-dir", first, "--steps", STEPS, "--resume", "auto"],
    ):
        done = run("--config", config, "--stdout", "off", *arguments)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
    shutil.copytree(first, second, symlinks=True)
    settings = second / "config.resolved.toml"
    settings.write_text(re.sub(r"(?m)^lr = .*$", "lr = 0.01", settings.read_text()))
    failed = write_record(directory / "runs" / "third", {}, status={"state": "failed", "reason": "KeyError: 'x', y"})
    return [first, second, failed]


def make_report(out: Path, *runs: Path) -> Path:
    report(list(map(str, runs)), str(out), force=False)
    return out


def plot_of(page, title):
    return page.locator("article.card").filter(has=page.locator("h3", has_text=title)).first.locator(".plot")


def drawn_points(page, title):
    """What plotly was given to draw in a chart: y values of its lines that can be hovered."""
    return plot_of(page, title).evaluate("p => p.data.filter(trace => trace.hovertemplate).map(trace => [...trace.y])")


def check_hover_and_zoom(page, loss):
    """The mouse shows the value of step 10, and a drag zooms all charts."""
    plot = plot_of(page, "Loss")
    plot.scroll_into_view_if_needed()
    where = plot.evaluate("p => { const a = p._fullLayout; return [a._size.l + a.xaxis.d2p(10), a._size.t + 60]; }")
    box = plot.bounding_box()
    page.mouse.move(box["x"] + where[0], box["y"] + where[1])
    plot.locator(".hoverlayer text").first.wait_for()
    shown = re.search(r"loss\D*?([\d.]+)", plot.locator(".hoverlayer").text_content())
    assert float(shown.group(1)) == pytest.approx(loss, rel=1e-4)
    page.mouse.down()
    page.mouse.move(box["x"] + where[0] + 60, box["y"] + where[1], steps=5)
    page.mouse.up()
    page.wait_for_function("() => !document.getElementById('reset').disabled")
    page.locator("html[data-drawn=all]").wait_for()
    ranges = page.evaluate("[...document.querySelectorAll('.plot')].slice(0, 3).map(p => p.layout.xaxis.range)")
    assert ranges[0][0] == pytest.approx(10, abs=0.5)
    assert ranges[0] == ranges[1] == ranges[2]
    page.click("#reset")
    assert page.locator("#reset").is_disabled()


def check_smoothing(page):
    """It adds a calmer curve, and keeps the values."""
    before = drawn_points(page, "Gradient norm")
    page.click("#smooth")
    page.locator("html[data-drawn=all]").wait_for()
    raw, smoothed = plot_of(page, "Gradient norm").evaluate("p => p.data.map(t => [...t.y])")
    assert drawn_points(page, "Gradient norm") == before
    steps = [sum(abs(b - a) for a, b in pairwise(line)) for line in (raw, smoothed)]
    assert steps[1] < 0.8 * steps[0]


PLOTS = """[...document.querySelectorAll('.plot')].map(plot => ({
    paths: plot.querySelectorAll('.scatterlayer .trace path').length,
    titles: ['.xtitle', '.ytitle'].map(title => plot.querySelector(title).textContent),
}))"""


def test_the_charts_show_the_logged_values_with_verdict_and_restart_and_no_request_leaves_the_page(runs, tmp_path):
    logged = read_rows(runs[0] / "metrics.jsonl")
    with opened(make_report(tmp_path / "one.html", runs[0]), scheme="dark") as seen:
        page = seen.page
        shown = "State done .*Data read .*Parameters 14,032 "
        assert re.search(shown, " ".join(page.locator("#outcome").inner_text().split()))
        assert page.locator("#verdict").inner_text().strip()
        page.locator("html[data-drawn=all]").wait_for()
        train, held_out = drawn_points(page, "Loss")
        assert train == pytest.approx([logged["train", step]["loss"] for step in range(1, STEPS + 1)], rel=1e-5)
        evaluated = [row["eval_loss"] for (mode, _), row in sorted(logged.items()) if mode == "eval"]
        assert held_out == pytest.approx(evaluated, rel=1e-5)
        assert plot_of(page, "Loss").locator(".shapelayer path").count() >= 1
        plots = page.evaluate(PLOTS)
        assert len(plots) > 20
        assert {plot["titles"][0] for plot in plots} == {"optimizer step"}
        assert all(plot["titles"][1] and plot["paths"] for plot in plots)
        assert page.locator("nav a", has_text="Ledger").count() == 1
        check_hover_and_zoom(page, logged["train", 10]["loss"])
        check_smoothing(page)
        assert seen.complaints == []
        assert seen.requests == []


def test_several_runs_are_overlaid_and_what_differs_is_listed(tmp_path):
    norms = {"first": [1.0, 3.0], "second": [2.0, 4.0]}
    runs = []
    for name, values in norms.items():
        config = {"run": {"name": name}, "optimizer": {"lr": values[0] / 100}}
        runs.append(write_record(tmp_path / name, {"loss": [2.0, 1.0], "grad_norm": values}, config=config))
    with opened(make_report(tmp_path / "two.html", *runs)) as seen:
        page = seen.page
        page.locator("html[data-drawn=all]").wait_for()
        assert page.locator(".verdict").count() == 2
        differs = page.locator("#what-differs").inner_text()
        assert [word in differs for word in ("optimizer.lr", "0.02", "run.name")] == [True, True, False]
        assert drawn_points(page, "Gradient norm") == [*norms.values()]
        saved = {}
        for kind in ("svg", "csv"):
            with page.expect_download() as download:
                card = page.locator("article", has=page.locator("h3", has_text="Gradient"))
                card.locator(f"[data-save={kind}]").click()
            saved[kind] = Path(download.value.path()).read_text()
        assert all(f"{run}: grad_norm" in saved["svg"] for run in runs), saved["svg"][:100]
        head, *lines = csv.reader(saved["csv"].splitlines())
        assert head == ["run", "key", "step", "value", "two_standard_errors", "mean"]
        points = [(run, step) for run in runs for step in (1, 2)]
        assert lines == [[str(run), "grad_norm", f"{at}", f"{norms[run.name][at - 1]:g}", "", ""] for run, at in points]
        page.set_viewport_size({"width": 420, "height": 900})
        pieces = page.locator("th code").evaluate_all("all => all.map(each => each.getClientRects().length)")
        assert {*pieces} == {1}, "no key is broken"
        assert page.evaluate("document.documentElement.scrollWidth") == 420
        assert seen.complaints == []
        assert seen.requests == []


def test_an_existing_page_is_replaced_only_with_force(tmp_path):
    run, page = str(write_record(tmp_path / "a", {"loss": [3.0, 2.0]})), tmp_path / "x.html"
    page.write_text("mine")
    for given, problem in ((run, "exists already; name another file, or add --force"), (run + "s", "cannot be read")):
        with pytest.raises(UserError, match=problem):
            report([given], str(page), force=False)
    assert page.read_text() == "mine"
    report([run], str(page), force=True)
    assert "plotly" in page.read_text(encoding="utf-8")


def test_one_run_alone_is_not_compared(runs, capsys):
    for given in (runs[:1], [runs[0], runs[0] / "../first/metrics.jsonl"]):
        said = program(["compare", *given], capsys).mistake
        assert "train compare: needs at least two runs, got one; train compare RUN_DIR RUN_DIR" in said


def test_compare_as_json_agrees_with_the_records(runs, capsys):
    found = json.loads(program(["compare", *runs, "--json"], capsys).stdout)
    assert {len(row["values"]) for row in (*found["config"], *found["outcome"])} == {3}
    assert [row["values"][1] for row in found["config"] if row["key"] == "optimizer.lr"] == [0.01]
    record = read_rows(runs[0] / "metrics.jsonl")
    outcome = {row["label"]: row["values"] for row in found["outcome"]}
    assert outcome["Restarts"] == [1, 1, 0]
    assert outcome["Held-out loss"][:2] == pytest.approx([record["eval", STEPS]["eval_loss"]] * 2)


def test_any_number_of_runs_is_compared_side_by_side_one_without_rows_too(runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    (runs[0].parent / "killed").mkdir()
    three, two = (program(["compare", *runs[at:], runs[0].parent / "killed"], capsys).stdout for at in (0, 1))
    assert re.search("optimizer.lr .* 0.01", three)
    assert "optimizer.lr" not in two, "of the others no settings are known"
    for shown in (three, two):
        assert re.search(r"State .*\bfailed\b", shown)
        assert "failed at step 0: KeyError: 'x', y" in shown
        assert "killed: metrics.jsonl cannot be read: No such file" in shown
        assert "of other tokens" not in shown, "of the last one none are known"
