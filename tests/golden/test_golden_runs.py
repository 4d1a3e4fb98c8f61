"""Small runs over the trainer's paths leave the numbers of golden_runs.json, whichever processor rounds them.

Exit codes, events, the metrics of a row, counts and choices are equal; what a processor rounds is within a tolerance, by
`KINDS`. Recorded are all rows of counts and of `EVERY_ROW`, and the first and the last row of other metrics. A change of
numbers on purpose is said in CHANGELOG.md and recorded again:

    python -m tests.golden.test_golden_runs [CASE ...]
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.golden.cases import CASES, Left, Place, make_runs, read_case

GOLDEN = Path(__file__).with_name("golden_runs.json")


class Kind(NamedTuple):
    """Relative tolerances of a run's first row and of later ones, and an absolute one that is added."""

    pattern: str
    first: float
    later: float
    absolute: float = 0.0


# Integers are equal; what Python computes from them and from settings may differ by its mathematical library.
EXACT = Kind(r"loss_spike|lr$|gns/(b_big|b_small|b_now_steps|skipped)$", 1e-6, 1e-6)
KINDS = (  # the first that fits counts
    EXACT,
    Kind(r"eval/.*carry_gain", 1e-4, 1e-4, 1e-5),  # differences of losses
    Kind(r"gns/(b_now|consistency|b_simple_high|b_simple_se)", 1e-3, 1e-3),  # differences of sums that are nearly equal
    Kind(r".*accuracy", 0.0, 0.0, 0.02),  # which of two nearly equal logits is larger
    Kind(r".*loss(_from_zero)?_se", 1e-4, 1e-4),
    Kind(r"loss$|smoothed/loss|objective/|eval_|.*/loss(_from_zero)?$", 1e-5, 1e-5),
    Kind(r"grad_norm|.*/(grad_norm|update_ratio|b_simple)$|gns/", 1e-5, 1e-4),
    EXACT._replace(pattern=""),
)
# Times these, for the loss of the first row, the rest of it, and later rows; not for counts. In bfloat16, and after Muon's
# steps in it, rounding is as much coarser; the gradient of `gated_delta` is a difference of larger numbers.
COARSE = {"device_per_stream": (20.0, 400.0, 400.0), "growing_batch": (1.0, 1.0, 50.0), "gated_delta": (1.0, 4.0, 1.0)}
EVERY_ROW = re.compile(r"lr$|(eval_)?loss$|grad_norm$|gns/(tr_sigma|grad_sq)$")


def kind_of(metric: str) -> Kind:
    """How a metric is compared."""
    return next(kind for kind in KINDS if re.match(kind.pattern, metric))


def is_exact(metric: str) -> bool:
    """Whether a metric is a count, or computed from counts."""
    return kind_of(metric)[1:] == EXACT[1:]


def is_same(case: str, place: Place, found: float | None, recorded: float | None, *, is_first: bool) -> bool:
    """Whether a number is the recorded one, within its tolerance; if it is not recorded, it is."""
    if found is None or recorded is None:
        return True
    kind, is_count = kind_of(place.metric), is_exact(place.metric)
    if not math.isfinite(recorded) or (is_count and recorded.is_integer()):
        return found == recorded or (math.isnan(found) and math.isnan(recorded))
    which = int(place.metric != "loss") if is_first else 2
    factor = 1.0 if is_count else COARSE.get(case, (1.0, 1.0, 1.0))[which]
    return abs(found - recorded) <= factor * ((kind.first if is_first else kind.later) * abs(recorded) + kind.absolute)


def differences(case: str, found: Left, recorded: Left) -> list[str]:
    """What a case's runs did otherwise."""
    told = [f"{a}, recorded {b}" for a, b in zip(found[:2], recorded[:2], strict=True) if a != b]
    first = first_step(recorded)
    for place in sorted(found.numbers.keys() | recorded.numbers.keys()):
        if place not in found.numbers or place not in recorded.numbers:
            told.append(f"{place}: {'gone' if place in recorded.numbers else 'new'}")
            continue
        here, there = found.numbers[place], recorded.numbers[place]
        if not is_same(case, place, here, there, is_first=place.step == first):
            told.append(f"{place}: {here}, recorded {there}")
    return told


def first_step(left: Left) -> int:
    """Of training."""
    return min(place.step for place in left.numbers if place.mode == "train")


def encode(left: Left) -> dict[str, Any]:
    """What a case left, as the file has it: of each mode the steps, and of each metric the values at these steps. `.`: none;
    `-`: one that is not recorded; `*n`: n of them."""
    found: dict[str, Any] = {"exit_codes": left.exit_codes, "events": left.events}
    for mode in sorted({place.mode for place in left.numbers}):
        steps = sorted({place.step for place in left.numbers if place.mode == mode})
        found[mode] = {"steps": " ".join(map(str, steps))}
        for metric in sorted({place.metric for place in left.numbers if place.mode == mode}):
            at = [step for step in steps if Place(mode, metric, step) in left.numbers]
            kept = at if is_exact(metric) or EVERY_ROW.match(metric) else (at[0], at[-1])
            words = []
            for step in steps:
                value = left.numbers.get(Place(mode, metric, step), "")
                words.append("." if value == "" else "-" if value is None or step not in kept else f"{value:.7g}")
            runs = [(word, len(list(run))) for word, run in groupby(words)]
            found[mode][metric] = " ".join(word + (f"*{number}" if number > 1 else "") for word, number in runs)
    return found


def decode(recorded: Mapping[str, Any]) -> Left:
    """What `encode` has encoded."""
    numbers: dict[Place, float | None] = {}
    for mode in ("eval", "train"):
        metrics = recorded.get(mode, {"steps": ""})
        for metric in metrics.keys() - {"steps"}:
            runs = [word.partition("*") for word in metrics[metric].split()]
            words = [word for word, _, number in runs for _ in range(int(number or 1))]
            for step, word in zip(map(int, metrics["steps"].split()), words, strict=True):
                if word != ".":
                    numbers[Place(mode, metric, step)] = None if word == "-" else float(word)
    return Left(recorded["exit_codes"], recorded["events"], numbers)


RECORD = json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    asked = [each for each in request.session.items if each.name.startswith("test_run_is_the_golden_one[")]
    make_runs(folder, [each.callspec.params["name"] for each in asked])
    return folder


@pytest.mark.distributed
@pytest.mark.xdist_group("golden")
@pytest.mark.parametrize("name", CASES)
def test_run_is_the_golden_one(folder, name):
    assert differences(name, read_case(folder, name), decode(RECORD["cases"][name])) == []


@pytest.mark.parametrize("name", CASES)
def test_small_faults_are_found(name):
    """Of one in a count, of 1e-4 in the first sums, and what is missing, new or no number."""
    recorded = decode(RECORD["cases"][name])
    first = first_step(recorded)
    faulty: dict[Place, float] = {Place("train", "new", first): 1.0}
    for place, value in recorded.numbers.items():
        if value is not None and is_exact(place.metric):
            faulty[place] = value + 1.0 if value.is_integer() else value * (1.0 + 1e-5)
        elif value is not None and place.step == first and EVERY_ROW.match(place.metric):
            faulty[place] = value * (1.0 - (1e-2 if name == "device_per_stream" else 1e-4))
    faulty[max(place for place in faulty if place.metric == "loss")] = math.nan
    gone = next(place for place in recorded.numbers if place not in faulty)
    numbers = {place: value for place, value in {**recorded.numbers, **faulty}.items() if place != gone}
    told = differences(name, Left([7], ["other"], numbers), recorded)
    assert {Place("train", metric, first) for metric in ("loss", "grad_norm")} <= faulty.keys()
    assert len(told) == len(faulty) + 3


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        again = sys.argv[1:] or list(CASES)
        make_runs(Path(name), again)
        made = {case: encode(read_case(Path(name), case)) for case in again}
    cases = {case: made.get(case) or RECORD["cases"][case] for case in CASES}
    GOLDEN.write_text(json.dumps({"tried": RECORD["tried"], "cases": cases}, indent=0) + "\n", encoding="utf-8")
