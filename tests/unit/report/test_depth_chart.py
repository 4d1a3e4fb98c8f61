"""The drawing of the loss against depth, and the sentence beside it."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from trainer.tools.diagnostics.diagnose import diagnose
from trainer.tools.report.charts import make_charts
from trainer.tools.report.depth_chart import HEIGHT, WIDTH, depth_figures, drawing
from trainer.tools.report.page import DEPTH, render_parts
from trainer.tools.runs.depth_curve import curves_of, in_words

LOSSES = [(1, 3.5), (2, 3.1), (4, 2.9), (8, 2.6), (16, 2.5), (32, 2.4), (64, 2.3)]
DRAWN = LOSSES[2:]


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


def test_each_set_is_drawn_within_its_picture_and_where_its_numbers_are(make_run):
    rows = {key: [9.0, value] for key, value in {**numbers(), **numbers(name="books/")}.items()}
    run = make_run("a", rows)
    (held_out, words, drawn), (books, _, other) = depth_figures(run)
    assert (held_out, books) == ("held out", "books")
    assert words.startswith("over documents, carrying lowers the loss by 0.2000")
    root = ElementTree.fromstring(drawn)
    places = [pair for each in root for pair in re.findall(r"([-\d.]+),([-\d.]+)", each.get("points", ""))]
    assert len(places) == len(DRAWN) + 3 + 3 * 3
    assert all(0 <= float(x) <= WIDTH and 0 <= float(y) <= HEIGHT for x, y in places)
    titles = ["".join(each.itertext()) for each in root if each.tag.endswith("circle")]
    assert titles[0] == "carried, 4 tokens on: 2.9000 +- 0.0400 (95 %)"
    assert titles[len(DRAWN) + 2] == "from zero at each cell, 64 tokens on: 2.5000 +- 0.0400 (95 %)"
    assert titles[-1] == "gain of carrying, 64 tokens on: 0.2000 +- 0.0400 (95 %)"
    (zero,) = [float(each.get("y1")) for each in root if "muted" in each.get("style", "") and each.get("y1")]
    upper, lower = float(places[-9][1]), float(places[-4][1])  # of the band at 16 tokens, where the gain is 0
    assert lower - zero == pytest.approx(zero - upper, abs=0.11)
    ends = [float(each.get("x")) + 4 * len(each.text) for each in root if each.get("text-anchor") == "middle"]
    assert max(ends) <= WIDTH
    carried = [(float(each.get("cx")), float(each.get("cy"))) for each in root if each.tag.endswith("circle")][
        : len(DRAWN)
    ]
    steps = {round(b[0] - a[0], 0) for a, b in pairwise(carried)}
    assert len(steps) <= 2, "equal steps of the logarithm"
    rates = [
        (b[1] - a[1]) / (y - x) for a, b, (_, x), (_, y) in zip(carried, carried[1:], DRAWN, DRAWN[1:], strict=False)
    ]
    assert max(rates) - min(rates) < 0.02 * abs(rates[0]), "linear in the loss"
    assert "of books" in other
    page = render_parts([diagnose(run)])
    assert page["overview"].count("<svg") == 2
    assert DEPTH in page["contents"]
    assert not [chart for chart in make_charts([run]) if any("depth/64" in key for key in chart.keys)]
    assert DEPTH not in render_parts([diagnose(make_run("b", {"loss": [1.0, 2.0]}))])["overview"]


@pytest.mark.parametrize(("unknown", "bands"), [((), 1), (("32",), 2), (("16", "32", "64"), 0)])
def test_without_an_error_there_is_no_band(unknown, bands):
    values = {key: each for key, each in numbers().items() if key[-3:] != "_se" or key.split("/")[2] not in unknown}
    drawn = drawing(*curves_of(values).values())
    assert (drawn.count("<polygon"), "band" in drawn) == (bands, bands > 0)
