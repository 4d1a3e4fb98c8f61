"""Runs whose number of micro-batches changes: resumed bit for bit, whatever is read early."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.fault_runs import rows_of
from tests.support.gloo import run_on_ranks
from tests.support.grouped import train
from tests.support.late import events
from tests.support.ranks import checkpoint_differences
from tests.support.runs import write_tiny_config
from trainer.lab.batch_growth import BatchGrowth
from trainer.metrics.best_effort import BestEffort
from trainer.metrics.noise_scale.estimate import NoiseScaleAverage, Window
from trainer.options import AutoRule, MicroBatches

pytestmark = pytest.mark.distributed

STEPS = 17
KINDS = {
    "steps": '{ schedule = "step", points = { 0 = 1, 4 = 3, 8 = 2 }, lr = "linear" }',
    "tokens": '{ schedule = "step", points = { 0 = 1, 300 = 2, 700 = 4 }, unit = "tokens", lr = "sqrt" }',
    "auto": '{ schedule = "auto", start = 4, max = 16, multiple = 1e-6, every = 3, lr = "sqrt" }',
}
# Ranks agree on a plan by themselves.
RANKS = {"steps": None, "tokens": None, "auto": 2}
EXTRA = """
[checkpoint]
every = 1
keep_last = 100
"""
# Every third step probes, for which batches need the tokens before their cells: made ahead, of a step that is not known then.
SETS = ("data.source.first.weight=1", "ledger.probe_every=3", f"train.steps={STEPS}")


def start(directory: Path, name: str, kind: str, *sets: str, nproc: int | None, more: tuple[object, ...] = ()) -> Path:
    config = write_tiny_config(directory, EXTRA)
    train(config, directory / name, *SETS, f"train.micro_batches={KINDS[kind]}", *sets, nproc=nproc, more=more)
    return directory / name


def changes(run_dir: Path) -> list[dict[str, Any]]:
    return [event for event in events(run_dir) if event["event"] == "micro_batches"]


def last(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / f"step_{STEPS:08d}"


@pytest.fixture(scope="module", params=KINDS)
def whole(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("growth")
    return request.param, start(directory, "whole", request.param, nproc=RANKS[request.param])


def test_a_run_has_the_micro_batches_that_its_events_say(whole):
    kind, run_dir = whole
    rows, said = rows_of(run_dir), changes(run_dir)
    assert len(said) == 2, said
    m = {"steps": 1, "tokens": 1, "auto": 4}[kind]
    first, at = m, {event["global_step"]: event for event in said}
    for step in range(1, STEPS + 1):
        if step in at:
            assert at[step]["from"] == m
            m = at[step]["to"]
            assert at[step]["reason"]
        assert rows[step]["train/micro_batches"] == m
        # So many cells were read: 4 rows of modality a or 2 of b in each micro-batch and rank, some of them short.
        assert rows[step]["tokens_in_step"] <= m * 4 * 16 * (RANKS[kind] or 1)
        factor = {"steps": m / first, "tokens": math.sqrt(m / first), "auto": math.sqrt(m / first)}[kind]
        assert rows[step]["lr"] == pytest.approx(schedule(step) * factor, rel=1e-12)
        if step in at:
            assert at[step]["lr_factor"] == factor
        # Every probe had the tokens that it needs, also of batches that were made before the step's size was known.
        assert ("ledger/probe_share" in rows[step]) == (step % 3 == 0)


def schedule(step: int) -> float:
    """The learning rate of the tiny config: 2 steps of warm-up, then a cosine to a tenth."""
    if step <= 2:
        return 1e-3 * step / 2
    return 1e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - 2) / (STEPS - 2))) / 2)


def test_planned_changes_come_where_they_are_planned(whole):
    kind, run_dir = whole
    rows, said = rows_of(run_dir), [(event["global_step"], event["to"]) for event in changes(run_dir)]
    if kind == "steps":
        assert said == [(4, 3), (8, 2)]
    elif kind == "tokens":
        seen = {0: 0.0, **{step: row["tokens_seen"] for step, row in rows.items()}}
        expected, m = [], 1
        for step in range(1, STEPS + 1):
            # The step before counts as full: it may not be read yet.
            tokens = seen[step - 2] + m * 64 if step > 1 else 0
            now = 4 if tokens >= 700 else 2 if tokens >= 300 else 1
            expected += [(step, now)] if now != m else []
            m = now
        assert said == expected
    else:
        for event in changes(run_dir):
            step = event["global_step"] - 1
            row = rows[step]
            assert step % 3 == 0
            assert event["batch"] == row["gns/b_big"]
            assert 0 < event["b_low"] < math.inf
            assert event["b"] == row.get("gns/b_now")
            assert "the noise scale (gns/b_now) is at least" in event["reason"]
        assert changes(run_dir)[1]["global_step"] - changes(run_dir)[0]["global_step"] >= 3


def test_a_run_resumed_before_its_last_change_is_the_whole_run(whole):
    kind, whole_dir = whole
    after = changes(whole_dir)[-1]["global_step"] - 1
    checkpoint = whole_dir / "checkpoints" / f"step_{after:08d}"
    resumed = start(whole_dir.parent, "resumed", kind, nproc=RANKS[kind], more=("--resume", checkpoint))
    assert rows_of(resumed) == {step: row for step, row in rows_of(whole_dir).items() if step > after}
    assert changes(resumed) == [event for event in changes(whole_dir) if event["global_step"] > after]
    assert checkpoint_differences(last(whole_dir), last(resumed)) == []
    assert saved(resumed) == saved(whole_dir)


def saved(run_dir: Path) -> list[int]:
    found: list[int] = json.loads((last(run_dir) / "state.json").read_text())["micro_batches"]
    return found


def test_what_is_read_early_does_not_move_a_change(whole):
    kind, whole_dir = whole
    # Without checkpoints, and logged but at the ends: most steps are read once the next one is launched.
    sets = ("checkpoint.every=0", "metrics.log_interval=1000", "data.prefetch=0")
    late = start(whole_dir.parent, "late", kind, *sets, nproc=RANKS[kind])
    assert changes(late) == changes(whole_dir)
    assert checkpoint_differences(last(whole_dir), last(late)) == []
    assert saved(late) == saved(whole_dir)


def test_after_a_resume_with_another_interval_m_still_stays_as_long_as_that(tmp_path):
    whole_dir = start(tmp_path, "whole", "auto", nproc=None)
    assert [event["global_step"] for event in changes(whole_dir)] == [13, 16]
    checkpoint = whole_dir / "checkpoints" / "step_00000013"
    # Step 15 comes three steps after the change, step 16 is the first at which 4 steps have passed.
    for every, expected in ((4, [(17, 16)]), (5, [])):
        rule = "train.micro_batches=" + KINDS["auto"].replace("every = 3", f"every = {every}")
        resumed = start(tmp_path, f"every {every}", "auto", rule, nproc=None, more=("--resume", checkpoint))
        assert [(event["global_step"], event["to"]) for event in changes(resumed)] == expected


def test_auto_that_resumes_a_constant_batch_begins_at_its_start(tmp_path):
    whole_dir = start(tmp_path, "whole", "auto", "train.micro_batches=3", nproc=None)
    assert changes(whole_dir) == []
    assert all("train/micro_batches" not in row for row in rows_of(whole_dir).values())
    auto = 'train.micro_batches={ schedule = "auto", multiple = 1e-6, every = 6, start = 6 }'
    checkpoint = whole_dir / "checkpoints" / "step_00000005"
    resumed = start(tmp_path, "resumed", "auto", auto, nproc=None, more=("--resume", checkpoint))
    rows = rows_of(resumed)
    # Step 6 is the first with this batch, and had it alone: 12 is the first after which it may change.
    sizes = {**dict.fromkeys(range(6, 13), 6), **dict.fromkeys(range(13, STEPS + 1), 12)}
    assert {step: row["train/micro_batches"] for step, row in rows.items()} == sizes


def decide(rank: int, world_size: int, fault: str) -> tuple[list[int], list[dict[str, Any]], bool]:
    """Decisions of two ranks, of which the second does not take in what the first does."""
    rule = AutoRule(max=64, multiple=2.0, every=1)
    noise, guard = NoiseScaleAverage(0.9), BestEffort("gns")
    growth = BatchGrowth(
        MicroBatches(((0, 1),), auto=rule), micro_tokens=0, noise=noise, guard=guard, world_size=world_size
    )
    sizes, said = [1], []
    for step in range(1, 17):
        if fault == "guard" and rank == 1 and step == 14:
            guard.run(lambda: 1 / 0)
        if not (fault == "window" and rank == 1 and step >= 14):
            window = Window(100.0 + step, 1.0, None, None, 0.5, 0.25, 0.0, world_size)
            guard.run(noise.update, window)
        size, change = growth.of_step(step + 1, before=sizes[-1], changed_at=1, tokens_before=0)
        sizes.append(size)
        said += [] if change is None else [dict(change)]
    return sizes, said, guard.enabled


def decide_all(rank: int, world_size: int) -> dict[str, Any]:
    return {fault: decide(rank, world_size, fault) for fault in ("none", "guard", "window")}


def test_ranks_agree_on_the_batch_when_one_of_them_lost_the_noise_scale():
    results = run_on_ranks(decide_all, 2)
    for fault in results[0]:
        (one, said, _), (other, also_said, is_enabled) = (each[fault] for each in results)
        assert one == other
        # Eleven windows make two bounds. They are the same on both ranks, until the guard of one of them is off.
        assert one[:14] == [1] * 11 + [2, 4, 8]
        assert is_enabled == (fault != "guard")
        assert one[14:] == ([8, 8, 8] if fault == "guard" else [16, 32, 64])
        assert [(each["global_step"], each["to"], each["batch"]) for each in said[:2]] == [(12, 2, 4.0), (13, 4, 4.0)]
        assert len(also_said) == len(said)
