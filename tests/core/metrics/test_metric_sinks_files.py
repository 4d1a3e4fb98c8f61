"""Sinks that write lines, with the faults that they must survive; a sink in the background, for which nobody waits."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from trainer.metrics.best_effort import BestEffort
from trainer.metrics.payload_contract import build_payload, validate_stream
from trainer.metrics.sinks import BackgroundSink, EventWriter, JsonlSink, StdoutSink


def payload(step: int, **metrics: float) -> dict[str, Any]:
    return build_payload("train", step, metrics or {"loss": 1.0})


def test_each_payload_is_on_disk_at_once_and_reopening_appends(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.log(payload(1))
    assert path.read_text().count("\n") == 1, "a line must not wait in a buffer"
    sink.close()
    sink.close()
    again = JsonlSink(path)
    again.event({"event": "restart", "global_step": 0})
    again.log(payload(1, loss=float("nan")))
    again.close()
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 2
    assert list(validate_stream(lines)) == []


def test_a_file_that_was_taken_away_is_begun_anew_with_a_warning(tmp_path, capsys, monkeypatch) -> None:
    path = tmp_path / "metrics.jsonl"
    monkeypatch.chdir(tmp_path)
    sink = JsonlSink(Path("metrics.jsonl"))
    changes = (lambda: None, lambda: monkeypatch.chdir("/"), path.unlink, lambda: path.rename("x"))
    for step, change in enumerate(changes):
        sink.log(payload(step))
        change()
        sink.log(payload(100 + step))
        monkeypatch.chdir(tmp_path)
    sink.close()
    assert capsys.readouterr().err.count("was removed or replaced; what it held is lost") == 2
    assert [json.loads(line)["global_step"] for line in path.read_text().splitlines()] == [103]


@pytest.mark.parametrize("cut", [1, 20, 70_000])
def test_a_cut_last_line_is_mended_on_reopening(tmp_path: Path, cut: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.log(payload(1))
    long = {**payload(2), "context": {"text": "x" * 100_000}}
    sink.log(long)
    sink.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    again = JsonlSink(path)
    again.log(payload(2))
    again.close()
    lines = path.read_bytes().splitlines(keepends=True)
    assert list(validate_stream(lines)) == []
    # Only the line end was missing (cut = 1): the row is whole and stays.
    assert len(lines) == (3 if cut == 1 else 2)
    assert ("removed" in capsys.readouterr().err) == (cut != 1)


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large.*/metrics.jsonl"):
            sink.log(payload(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    sink.log(payload(2))
    sink.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["global_step"] == 2


def test_events_are_strict_json_with_their_time(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path)
    writer.write({"event": "spike", "loss": float("inf"), "batches": [{"x": float("nan")}], "path": tmp_path})
    with pytest.raises(ValueError, match="needs its name under 'event'"):
        writer.write({"kind": "x"})
    writer.close()
    found = json.loads(path.read_text())
    assert time.time() - found.pop("time") < 60
    assert found == {"event": "spike", "loss": "inf", "batches": [{"x": "nan"}], "path": str(tmp_path)}


def written(stream: Mock) -> list[str]:
    """Each write."""
    return [call.args[0] for call in stream.write.call_args_list]


def test_a_payload_is_one_write_and_one_flush() -> None:
    stream = Mock(**{"isatty.return_value": False})
    sink = StdoutSink("json", stream=stream)
    sink.log(payload(1))
    sink.event({"event": "restart", "global_step": 1})
    [text] = written(stream)
    assert stream.flush.call_count == 1
    assert list(validate_stream([text])) == []
    assert text.endswith("}\n")


def test_people_get_a_line_and_nothing_when_off() -> None:
    stream = Mock(**{"isatty.return_value": False})
    sink = StdoutSink("line", stream=stream)
    sink.log(payload(10, loss=float("nan"), lr=3e-4))
    sink.log(build_payload("eval", 10, {"eval_loss": 1.5, "eval_token_type/digit/loss": 4.0, "eval/books/loss": 2.0}))
    sink.log(build_payload("eval", 10, {"moe/aux_loss": 0.5, "eval/depth/8/loss": 1.0}))
    sink.log(build_payload("eval", 10, {"eval/depth/8/loss": 1.0}))
    sink.event({"event": "restart", "global_step": 1})
    StdoutSink("off", stream=stream).log(payload(1))
    assert written(stream) == [
        "[step 10] loss=nan | lr=3.00e-04\n",
        "[step 10] eval_loss=1.5000 | eval/books/loss=2.0000\n",
        "[step 10] moe/aux_loss=0.5000\n",
        "[step 10] eval/depth/8/loss=1.0000\n",
    ]


PROGRAM = """
import sys
from trainer.metrics.payload_contract import build_payload
from trainer.metrics.sinks import StdoutSink
sink = StdoutSink("json")
for step in range(1, 20000):
    sink.log(build_payload("train", step, {"loss": 1.0}))
if not sys.stdout.closed:
    print("what other code prints later must not fail at exit either")
print("done", file=sys.stderr)
"""


def test_a_reader_that_goes_away_costs_one_warning_and_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert json.loads(process.stdout.readline())["global_step"] == 1
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 0, errors
    warning = "[rank 0] WARNING stdout failed and is off: BrokenPipeError: [Errno 32] Broken pipe"
    assert errors == f"{warning}\ndone\n"


class Recorder:
    """Takes rows as long as it may."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.may_take = threading.Event()
        self.may_take.set()
        self.num_closed = 0

    def log(self, payload: Mapping[str, Any]) -> None:
        assert self.may_take.wait(30)
        self.rows.append(payload)

    event = log

    def close(self) -> None:
        self.num_closed += 1


def in_background(sink: Any, **options: Any) -> BackgroundSink:
    return BackgroundSink(sink, name="it", guard=BestEffort("it"), **options)


def test_everything_arrives_in_order_before_it_is_closed() -> None:
    recorder = Recorder()
    sink = in_background(recorder)
    rows = [{"row": number} for number in range(300)]
    for row in rows:
        sink.log(row) if row["row"] % 2 else sink.event(row)
    sink.close()
    sink.close()
    assert recorder.rows == rows
    assert (recorder.num_closed, sink.num_dropped) == (1, 0)


def test_what_a_full_queue_has_no_room_for_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    recorder.may_take.clear()
    sink = in_background(recorder, capacity=10)
    for number in range(100):  # a call that waited would wait for ever
        sink.log({"row": number})
    recorder.may_take.set()
    sink.close()
    assert len(recorder.rows) + sink.num_dropped == 100
    assert 10 <= len(recorder.rows) <= 12
    assert f"it: {sink.num_dropped} rows were dropped" in capsys.readouterr().err


def test_closing_waits_for_a_slow_sink_and_not_for_one_that_hangs() -> None:
    class Slow(Recorder):
        def log(self, payload: Mapping[str, Any]) -> None:
            time.sleep(0.05)
            super().log(payload)

    slow = in_background(Slow(), close_sec=60.0)
    for number in range(30):
        slow.log({"row": number})
    slow.close()
    assert slow.num_dropped == 0
    hanging = Recorder()
    hanging.may_take.clear()
    sink = in_background(hanging, close_sec=0.2)
    for number in range(5):
        sink.log({"row": number})
    sink.close()
    hanging.may_take.set()
    assert sink.num_dropped == 5
    failed = Recorder()
    failed.log = lambda payload: 1 / 0  # type: ignore[method-assign, assignment]
    sink = in_background(failed)
    sink.log({})
    sink.close()
    assert failed.num_closed == 1, "it may hold something"
