"""The chart of the loss against depth, and the sentence beside it."""

from __future__ import annotations

import json
import math

import pytest

from trainer.tools.diagnostics.depth import last_curves
from trainer.tools.diagnostics.diagnose import diagnose
from trainer.tools.report.charts import make_charts
from trainer.tools.report.figures import depth_figure, depth_figures
from trainer.tools.report.page import DEPTH, render_parts
from trainer.tools.runs.depth_curve import curves_of, in_words

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


def test_each_set_is_drawn_with_its_numbers_from_two_buckets_before_the_first_carried_one(make_run):
    rows = {key: [9.0, value] for key, value in {**numbers(), **numbers(name="books/")}.items()}
    run = make_run("a", rows)
    (held_out, words, figure), (books, *_) = depth_figures(run)
    assert (held_out, books) == ("held out", "books")
    assert words.startswith("over documents, carrying lowers the loss by 0.2000")
    carried, from_zero, gain = figure["data"]
    assert carried["y"] == [loss for _, loss in LOSSES[2:]]
    assert carried["x"] == pytest.approx([start * math.sqrt(2) for start, _ in LOSSES[2:]])
    assert (from_zero["y"], gain["y"]) == ([2.5, 2.5, 2.5], [0.0, 0.1, 0.2])
    assert from_zero["x"] == gain["x"] == carried["x"][2:]
    assert gain["error_y"]["array"] == [0.04] * 3
    assert carried["text"][0] == "carried, 4 tokens on: 2.9000 +- 0.0400 (95 %)"
    assert gain["text"][-1] == "gain of carrying, 64 tokens on: 0.2000 +- 0.0400 (95 %)"
    parts, charts = render_parts([diagnose(run)]), make_charts([run])
    assert json.loads(parts["data"])["charts"][len(charts)] == figure
    assert all(f'data-chart="{len(charts) + at}"' in parts["overview"] for at in (0, 1))
    assert DEPTH in parts["contents"]
    assert not [chart for chart in charts if any("depth/64" in key for key in chart.keys)]
    assert DEPTH not in render_parts([diagnose(make_run("b", {"loss": [1.0, 2.0]}))])["overview"]


def test_few_documents_whose_error_is_not_known_are_drawn(make_run):
    run = make_run("a", {key: [value] for key, value in numbers().items() if not key.endswith("_se")})
    ((_, words, figure),) = depth_figures(run)
    assert words == "carrying lowers the loss by 0.2000 beyond a cell (too few documents for its error)"
    assert (figure["data"][-1]["y"], figure["data"][-1]["error_y"]["array"]) == ([0.0, 0.1, 0.2], [None] * 3)
    assert last_curves(run)[1] == {}


def test_without_an_error_there_is_no_bar():
    values = {key: each for key, each in numbers().items() if key[-3:] != "_se" or key.split("/")[2] != "32"}
    (curve,) = curves_of(values).values()
    assert depth_figure(curve)["data"][-1]["error_y"]["array"] == [0.04, None, 0.04]
