"""Reading a run record, intact or damaged, and its rows as CSV and Parquet."""

from __future__ import annotations

import json
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import UserError
from trainer.metrics.payload_contract import PayloadError, build_payload, encode_payload, parse_payload
from trainer.tools.runs.load import RowTable, load_run


def train(step: int, mode: str = "train", **metrics: float) -> str:
    return encode_payload(build_payload(mode, step, metrics))


evaluation = partial(train, mode="eval")


def restart(step: int) -> str:
    return f'{{"schema_version":1,"event":"restart","global_step":{step}}}'


def write(path: Path, *lines: str, end: str = "\n") -> Path:
    path.write_text("\n".join(lines) + end, encoding="utf-8")
    return path


def column(run: Any, key: str) -> dict[int, float]:
    return dict(zip(*run.column(key), strict=True))


def test_columns_of_an_intact_file(tmp_path: Path) -> None:
    lines = [train(1, loss=3.0, lr=0.1), evaluation(1, eval_loss=4.0), train(10, loss=2.0, lr=0.2), train(20, loss=1.0)]
    run = load_run(write(tmp_path / "metrics.jsonl", *lines))
    assert list(run.steps) == [1, 10, 20]
    assert column(run, "loss") == {1: 3.0, 10: 2.0, 20: 1.0}
    assert column(run, "lr") == {1: 0.1, 10: 0.2}
    assert column(run, "eval_loss") == {1: 4.0}
    assert column(run, "absent") == {}
    assert run.keys == ["loss", "lr", "eval_loss"]
    assert run.notes == []


@pytest.mark.parametrize("is_old", [False, True])
def test_after_a_restart_the_later_row_of_a_step_replaces_the_earlier_one(tmp_path: Path, is_old: bool) -> None:
    first = [train(5, loss=5.0, grad_norm=1.0), train(10, loss=4.0, grad_norm=1.0), train(15, loss=3.0)]
    second = [encode_payload(build_payload("train", 10, {"loss": 40.0}, restart={"from_step": 5}))]
    if is_old:
        second = [restart(5), train(10, loss=40.0)]
    run = load_run(write(tmp_path / "metrics.jsonl", *first, *second))
    assert column(run, "loss") == {5: 5.0, 10: 40.0, 15: 3.0}
    assert column(run, "grad_norm") == {5: 1.0}, "keys of the replaced row must be gone"
    assert [event.global_step for event in run.restarts] == [5]
    assert run.steps_redone == 10
    assert len(run.notes) == 1
    assert "1 row replaced" in run.notes[0]


def test_events_have_the_restarts_after_which_no_row_came(tmp_path: Path) -> None:
    rows = [train(10, loss=1.0), encode_payload(build_payload("eval", 6, {"eval_loss": 1.0}, restart={"from_step": 5}))]
    events = [{"event": "restart", "global_step": step, "changed": {"lr": step}} for step in (5, 4, 5, "x", 3)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    run = load_run(write(tmp_path / "metrics.jsonl", *rows))
    assert [(each.global_step, each.details["changed"]["lr"]) for each in run.restarts] == [
        (5, 5),
        (4, 4),
        (5, 5),
        (3, 3),
    ]
    assert run.steps_redone == 5


def test_evaluations_of_one_step_are_merged_but_not_across_a_restart(tmp_path: Path) -> None:
    rows = [evaluation(5, eval_loss=1.0), evaluation(5, eval_accuracy=0.5)]
    assert load_run(write(tmp_path / "a.jsonl", *rows)).keys == ["eval_loss", "eval_accuracy"]
    run = load_run(write(tmp_path / "b.jsonl", *rows, restart(0), evaluation(5, eval_loss=2.0)))
    assert column(run, "eval_loss") == {5: 2.0}
    assert column(run, "eval_accuracy") == {}


def test_a_damaged_line_is_skipped_and_noted(tmp_path: Path) -> None:
    other = json.dumps({"schema_version": 2, "mode": "train", "global_step": 1, "metrics": {"loss": 1.0}})
    for lines, end, words in (
        ([train(2, loss=1.0), train(3, loss=2.0)[:30]], "", "cut off"),
        ([other, train(2, loss=2.0), other], "\n", "2 damaged lines, the first at line 1: schema_version: version 2"),
    ):
        run = load_run(write(tmp_path / "metrics.jsonl", *lines, end=end))
        assert list(run.steps) == [2]
        (note,) = run.notes
        assert words in note


@pytest.mark.parametrize("content", ["", "\n\n", "step,loss\n1,2\n", '{"loss": 1}\n', "\x00\x01\n"])
def test_a_file_without_rows_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl: has no row"):
        load_run(write(tmp_path / "metrics.jsonl", content, end=""))


def test_a_directory_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no metrics\.jsonl"):
        load_run(tmp_path)


def test_decreasing_steps_without_a_restart_are_noted(tmp_path: Path) -> None:
    run = load_run(write(tmp_path / "metrics.jsonl", train(1, loss=1.0), train(9, loss=2.0), train(1, loss=3.0)))
    assert column(run, "loss") == {1: 3.0, 9: 2.0}
    assert any("without a restart 1 time" in note for note in run.notes)


def test_the_files_beside_metrics_are_read_and_damage_there_is_noted(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", train(1, loss=1.0))
    (tmp_path / "config.resolved.toml").write_text("[data.mixing]\nnum_streams_mixed = 3\n", encoding="utf-8")
    (tmp_path / "env.json").write_text('{"world_size": 2}', encoding="utf-8")
    (tmp_path / "status.json").write_text('{"state": "do', encoding="utf-8")
    (tmp_path / "events.jsonl").write_text('{"event": "restart"}\n{"ev', encoding="utf-8")
    for path in (tmp_path, tmp_path / "metrics.jsonl"):
        run = load_run(path)
        assert run.setting("data.mixing.num_streams_mixed") == 3
        assert run.setting("data.mixing.absent.key", 7) == 7
        assert run.world_size == 2
        assert run.status == {}
        assert [event["event"] for event in run.events] == ["restart"]
        assert len(run.notes) == 2


def test_lines_with_a_launcher_prefix_or_unknown_sections_count(tmp_path: Path) -> None:
    section = json.dumps({**json.loads(train(2, loss=2.0)), "context": {"note": "unknown to us"}})
    run = load_run(write(tmp_path / "out.txt", "[default0]:" + train(1, loss=1.0), section))
    assert list(run.steps) == [1, 2]
    assert run.notes == []


Json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(
    row=st.fixed_dictionaries(
        {
            "schema_version": st.sampled_from([1, 1, 1, 2, True, 1.0, "1"]),
            "mode": st.sampled_from(["train", "eval", "test", 1]),
            "global_step": st.integers(-1, 3) | st.booleans() | st.floats(),
            "metrics": Json | st.dictionaries(st.text(max_size=3), st.floats() | st.integers() | st.booleans()),
        },
        optional={"non_finite": Json, "extra": Json},
    )
)
def test_a_line_is_read_exactly_when_the_payload_contract_accepts_it(
    row: dict[str, Any], tmp_path_factory: Any
) -> None:
    line = json.dumps(row)
    try:
        expected = parse_payload(line)
    except PayloadError:
        expected = None
    path = tmp_path_factory.mktemp("run") / "rows.jsonl"
    run = load_run(write(path, line, train(10**6, anchor=1.0)))
    taken = len(run.train) + len(run.evals) - 1
    assert taken == (expected is not None)
    if expected is not None:
        table = run.train if expected.mode == "train" else run.evals
        for key, value in expected.values().items():
            steps, values = table.column(key)
            at = list(steps).index(expected.global_step)
            assert values[at] == value or math.isnan(value)


@given(seed=st.integers(0, 10**6))
def test_columns_match_a_dict_of_rows(seed: int) -> None:
    rng = random.Random(seed)
    table = RowTable(merge_same_step=False)
    rows: dict[int, dict[str, float]] = {}
    step = attempt = 0
    for _ in range(rng.randrange(1, 30)):
        if rng.random() < 0.2:
            step, attempt = rng.randrange(step + 1), attempt + 1
        step += rng.choice((1, 1, 5))
        row = {key: rng.random() for key in rng.sample("abcd", rng.randrange(1, 5))}
        table.add(step, attempt, tuple(row), row.values())
        rows[step] = row
        if rng.random() < 0.1:
            table.column("a")  # a cached column must not go stale
    assert list(table.steps) == sorted(rows)
    for key in "abcd":
        assert list(zip(*table.column(key), strict=True)) == [(s, rows[s][key]) for s in sorted(rows) if key in rows[s]]
