"""Reading a run record, intact or damaged."""

from __future__ import annotations

import contextlib
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import UserError
from trainer.metrics.payload_contract import PayloadError, build_payload, encode_payload, parse_payload
from trainer.tools.runs.load import load_run


def train(step: int, mode: str = "train", **metrics: float) -> str:
    return encode_payload(build_payload(mode, step, metrics))


evaluation = partial(train, mode="eval")


def write(path: Path, *lines: str, end: str = "\n") -> Path:
    path.write_text("\n".join(lines) + end, encoding="utf-8")
    return path


def column(run: Any, key: str) -> dict[int, float]:
    return dict(zip(*run.column(key), strict=True))


def test_a_restart_drops_the_rows_behind_it(tmp_path: Path) -> None:
    first = [train(5, loss=5.0, grad_norm=1.0), train(10, loss=4.0, grad_norm=1.0, lr=1.0), train(15, loss=3.0)]
    second = [encode_payload(build_payload("train", 10, {"loss": 40.0}, restart={"from_step": 5}))]
    run = load_run(write(tmp_path / "metrics.jsonl", *first, *second))
    assert column(run, "loss") == {5: 5.0, 10: 40.0}
    assert column(run, "grad_norm") == {5: 1.0}, "keys of the dropped rows must be gone"
    assert "lr" not in run.train.keys
    assert [event.global_step for event in run.restarts] == [5]
    assert run.steps_redone == 10


def test_events_have_the_restarts_after_which_no_row_came(tmp_path: Path) -> None:
    rows = [train(10, loss=1.0), encode_payload(build_payload("eval", 6, {"eval_loss": 1.0}, restart={"from_step": 5}))]
    events = [{"event": "restart", "global_step": step, "changed": {"lr": step}} for step in (5, 4, "x", 3)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    run = load_run(write(tmp_path / "metrics.jsonl", *rows))
    assert [(each.global_step, each.details["changed"]["lr"]) for each in run.restarts] == [(5, 5), (4, 4), (3, 3)]
    assert run.steps_redone == 5


def test_evaluations_of_one_step_are_merged_but_not_across_a_restart(tmp_path: Path) -> None:
    rows = [evaluation(5, eval_loss=1.0), evaluation(5, eval_accuracy=0.5)]
    run = load_run(write(tmp_path / "a.jsonl", *rows))
    assert (column(run, "eval_loss"), column(run, "eval_accuracy")) == ({5: 1.0}, {5: 0.5})
    again = encode_payload(build_payload("eval", 5, {"eval_loss": 2.0}, restart={"from_step": 0}))
    run = load_run(write(tmp_path / "b.jsonl", *rows, again))
    assert (column(run, "eval_loss"), column(run, "eval_accuracy")) == ({5: 2.0}, {})


OTHER = json.dumps({"schema_version": 2, "mode": "train", "global_step": 1, "metrics": {"loss": 1.0}})


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([OTHER, train(2, loss=2.0), OTHER], "2 damaged lines, the first at line 1: schema_version: must be 1, got 2"),
        ([train(2, loss=2.0), train(2**63, loss=2.0)], "line 2: global_step: must be below 2^63"),
    ],
)
def test_what_is_odd_in_a_record_is_noted(tmp_path: Path, lines: list[str], words: str) -> None:
    run = load_run(write(tmp_path / "metrics.jsonl", *lines))
    assert run.steps[-1] == 2
    (note,) = run.notes
    assert words in note


@pytest.mark.parametrize("content", ["step,loss\n1,2\n", '{"loss": 1}\n', "\x00\x01\n"])
def test_a_file_of_which_no_line_is_a_row_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl: has no row that this reader can use; line 1: "):
        load_run(write(tmp_path / "metrics.jsonl", content, end=""))


def test_a_run_without_rows_has_a_record_and_what_is_no_run_has_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be read: No such file"):
        load_run(tmp_path)
    write(tmp_path / "status.json", '{"state": "failed", "reason": "KeyError"}')
    assert (len(load_run(tmp_path).steps), load_run(tmp_path).status["reason"]) == (0, "KeyError")
    with pytest.raises(UserError, match="x: cannot be read: No such file or directory; pass a run"):
        load_run(f"{tmp_path}x")


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
        assert (run.world_size, run.status, len(run.notes)) == (2, {}, 2)
        assert [event["event"] for event in run.events] == ["restart"]


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
ROW = st.fixed_dictionaries(
    {
        "schema_version": st.sampled_from([1, 1, 1, 2, True, 1.0, "1"]),
        "mode": st.sampled_from(["train", "eval", "test", 1]),
        "global_step": st.integers(-1, 3) | st.booleans() | st.floats(),
        "metrics": Json | st.dictionaries(st.text(max_size=3), st.floats() | st.integers() | st.booleans()),
    },
    optional={"non_finite": Json, "extra": Json},
)


@given(row=ROW)
def test_a_line_is_read_exactly_when_the_contract_accepts_it(row: dict[str, Any], tmp_path_factory: Any) -> None:
    line, expected = json.dumps(row), None
    with contextlib.suppress(PayloadError):
        expected = parse_payload(line)
    path = tmp_path_factory.mktemp("run") / "rows.jsonl"
    run = load_run(write(path, line, train(10**6, anchor=1.0)))
    assert len(run.train.steps) + len(run.evals.steps) - 1 == (expected is not None)
    if expected is not None:
        table = run.train if expected.mode == "train" else run.evals
        for key, value in expected.values().items():
            found = dict(zip(*table.column(key), strict=True))[expected.global_step]
            assert found == value or math.isnan(value)
