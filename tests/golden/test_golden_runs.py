"""Small runs over the trainer's paths leave the numbers of golden_runs.json, whichever processor rounds them.

Exit codes, events, the metrics of a row, counts and choices are equal; what a processor rounds is within a tolerance, by
`KINDS`. Recorded are all rows of counts and of `EVERY_ROW`, and the first and the last row of other metrics. A change that
moves code leaves every bit as it is, which `make golden BASE=<commit>` checks. One that changes numbers on purpose says so in
CHANGELOG.md and records the file again:

    python -m tests.golden.test_golden_runs [CASE ...]
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
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


def encode(cases: Mapping[str, Left]) -> dict[str, Any]:
    """What cases left, as the file has it.

    Of a number: mode, metric, cases, the steps, where not all of the mode have it, and values: of all steps, of the first and
    the last one, or of the last one alone. One value of a count is that of all steps.
    """
    steps: dict[str, dict[str, str]] = defaultdict(dict)
    cells: Any = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for case, left in cases.items():
        columns: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        for place, value in sorted(left.numbers.items()):
            columns[place.mode, place.metric][place.step] = math.nan if value is None else value
        for mode in sorted({mode for mode, _ in columns}):
            steps[case][mode] = _ranges({place.step for place in left.numbers if place.mode == mode})
        for (mode, metric), column in columns.items():
            values, where = [f"{value:.7g}" for value in column.values()], _ranges(column)
            if is_exact(metric) and len(set(values)) == 1:
                del values[:-1]
            elif not (EVERY_ROW.match(metric) or (is_exact(metric) and all(map(float.is_integer, column.values())))):
                del values[mode == "train" : -1]
            cells[mode][metric][" ".join([f"{where}:"] * (where != steps[case][mode]) + values)].append(case)
    everywhere = {mode: [case for case in cases if mode in steps[case]] for mode in cells}
    return {
        "cases": {
            case: {"exit_codes": left.exit_codes, "events": left.events, **steps[case]} for case, left in cases.items()
        },
        "numbers": {
            mode: {
                metric: {"all" if own == everywhere[mode] else " ".join(own): text for text, own in texts.items()}
                for metric, texts in sorted(metrics.items())
            }
            for mode, metrics in cells.items()
        },
    }


def decode(recorded: Mapping[str, Any], case: str) -> Left:
    """What `encode` has encoded of a case."""
    own, numbers = recorded["cases"][case], {}
    for mode, metrics in recorded["numbers"].items():
        for metric, texts in metrics.items():
            mine = [text for names, text in texts.items() if case in names.split() or (names == "all" and mode in own)]
            for where, _, values in (text.rpartition(":") for text in mine):
                places = [Place(mode, metric, step) for step in _steps(where or own[mode])]
                given = [float(value) for value in values.split()]
                numbers |= dict.fromkeys(places, given[0] if is_exact(metric) and len(given) == 1 else None)
                at = places if len(given) == len(places) else [places[0], places[-1]][-len(given) :]
                numbers |= dict(zip(at, given, strict=True))
    return Left(own["exit_codes"], own["events"], numbers)


def _ranges(steps: Iterable[int]) -> str:
    """`1-3,5` of 1, 2, 3, 5."""
    runs = [[step for _, step in run] for _, run in groupby(enumerate(sorted(steps)), lambda each: each[1] - each[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _steps(ranges: str) -> list[int]:
    ends = [list(map(int, each.split("-"))) for each in ranges.split(",")]
    return [step for each in ends for step in range(each[0], each[-1] + 1)]


RECORD = json.loads(GOLDEN.read_text())


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
    assert differences(name, read_case(folder, name), decode(RECORD, name)) == []


@pytest.mark.parametrize("name", CASES)
def test_a_fault_of_one_in_a_count_and_of_1e_4_in_the_first_sums_is_found(name):
    recorded = decode(RECORD, name)
    first = first_step(recorded)
    faulty = {}
    for place, value in recorded.numbers.items():
        if value is not None and is_exact(place.metric):
            faulty[place] = value + 1.0 if value.is_integer() else value * (1.0 + 1e-5)
        elif value is not None and place.step == first and EVERY_ROW.match(place.metric):
            faulty[place] = value * (1.0 - (1e-2 if name == "device_per_stream" else 1e-4))
    told = differences(name, recorded._replace(numbers={**recorded.numbers, **faulty}), recorded)
    assert {Place("train", metric, first) for metric in ("loss", "grad_norm")} <= faulty.keys()
    assert len(told) == len(faulty)


def test_what_is_missing_or_of_another_kind_is_found():
    recorded = decode(RECORD, "skipped_steps")
    place = Place("train", "grad_norm", 3)
    others = {**recorded.numbers}
    del others[place]
    for faulty in (
        recorded._replace(exit_codes=[1]),
        recorded._replace(events=recorded.events[:-1]),
        recorded._replace(numbers=others),
        recorded._replace(numbers={**recorded.numbers, place: math.nan}),
        recorded._replace(numbers={**recorded.numbers, Place("train", "grad_norm", 5): 1.0}),
    ):
        assert len(differences("skipped_steps", faulty, recorded)) == 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        again = sys.argv[1:] or list(CASES)
        make_runs(Path(name), again)
        cases = {case: read_case(Path(name), case) if case in again else decode(RECORD, case) for case in CASES}
    GOLDEN.write_text(json.dumps({"tried": RECORD["tried"], **encode(cases)}, indent=0) + "\n", encoding="utf-8")
