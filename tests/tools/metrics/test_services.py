"""Real wandb (offline) and real TensorBoard, read back from the files that they write."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.wandb_file import find_wandb_file, read_history, read_records, wait_for_end
from trainer.config.schema import WandbTable
from trainer.lab.tensorboard import TensorboardSink
from trainer.metrics.best_effort import BestEffort
from trainer.metrics.payload_contract import build_payload
from trainer.metrics.sinks import SAMPLE, EventWriter, JsonlSink
from trainer.tools.services import WandbSink, messages, resolve_mode, unused_step


def train(step: int, loss: float = 1.0) -> dict[str, Any]:
    return build_payload("train", step, {"loss": loss, "gpu/peak_gb": 2.0})


def test_wandb_offline_gets_one_row_a_step_with_training_and_evaluation_together(tmp_path: Path) -> None:
    sink = WandbSink(mode="offline", project="p", run_dir=tmp_path, run_id="abc123", config={"a": {"b": 1}})
    assert sink.run_id == "abc123"
    sink.log(train(1))
    sink.log(train(10, math.nan))
    sink.log(build_payload("eval", 10, {"eval_objective/token_ce": 2.5}))
    sink.log(train(20))
    sink.close()
    sink.close()
    path = find_wandb_file(tmp_path)
    rows = read_history(path)
    assert [(row["_step"], row["global_step"]) for row in rows] == [(1, 1), (10, 10), (20, 20)]
    assert math.isnan(rows[1]["train/loss"])
    assert rows[1]["eval/objective/token_ce"] == 2.5
    metrics = [record.metric for record in read_records(path) if record.WhichOneof("record_type") == "metric"]
    (everything,) = [metric for metric in metrics if metric.glob_name == "*"]
    assert (everything.step_metric, everything.options.step_sync) == ("global_step", True)


def test_wandbs_own_variables_hold_where_the_config_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert WandbTable().project == "trainer"
    for name, value in (("PROJECT", "theirs"), ("NAME", "named"), ("DIR", str(tmp_path / "elsewhere"))):
        monkeypatch.setenv(f"WANDB_{name}", value)
    assert WandbTable(project="ours").project == "ours"
    monkeypatch.setattr(messages, "disabled", True)  # by an earlier run of the process, which was abandoned
    WandbSink(mode="offline", project=WandbTable().project, run_dir=tmp_path / "run").close()
    assert not messages.disabled
    (run,) = (each.run for each in read_records(find_wandb_file(tmp_path / "elsewhere")) if each.HasField("run"))
    assert (run.project, run.display_name) == ("theirs", "named")
    assert not (tmp_path / "run").exists()


def test_wandb_s_own_counter_grows_over_all_attempts_of_a_run(tmp_path: Path) -> None:
    record, events = JsonlSink(tmp_path / "metrics.jsonl"), EventWriter(tmp_path / "events.jsonl")
    own, expected = [], []
    for number, steps in enumerate([(1, 10, 20), (11, 20, 30), (11, 12, 25, 40), (11, 12)]):
        here, restart = tmp_path / str(number), None
        first = unused_step([record.path, events.path, tmp_path / "none"])
        sink = WandbSink(mode="offline", project="p", run_dir=here, run_id="one", first_step=first)
        if number:
            restart = {"from_step": steps[0] - 1}
            events.write({"event": "restart", "global_step": steps[0] - 1})
        for step in steps:
            payload = build_payload("train", step, {"loss": float(step)}, restart=restart)
            sample = {"event": SAMPLE, "global_step": step + 3, "prompt": "", "text": "x"}
            for to_file, to_wandb, what in ((record.log, sink.log, payload), (events.write, sink.event, sample)):
                to_file(what)
                to_wandb(what)
            restart = None
            expected += [step, step + 3]
        sink.close()
        own += [(row["_step"], row["global_step"]) for row in read_history(find_wandb_file(here))]
    assert [step for _, step in own] == expected
    numbers = [number for number, _ in own]
    assert numbers == sorted(set(numbers)), "wandb drops rows whose own step does not grow"
    assert numbers[:8] == [1, 4, 10, 13, 20, 23, 24, 25], "as long as it can, the counter is the step"


def test_wandb_that_cannot_begin_online_costs_one_warning_and_writes_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    events: list[dict[str, Any]] = []
    sink = WandbSink(mode="online", project="p", run_dir=tmp_path, guard=BestEffort("wandb", on_event=events.append))
    sink.log(train(1))
    sink.log(train(2))
    sink.close()
    said = capsys.readouterr().err
    assert said.count("wandb: cannot begin online, and goes on offline") == said.count("WARNING") == 1
    assert events == []
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    wait_for_end(path)
    assert [row["global_step"] for row in read_history(path)] == [1, 2]


NETRC = "machine api.wandb.ai login user password KEY\nmachine own.example:8080 login user password KEY\n"


@pytest.mark.parametrize(
    ("environ", "netrc", "mode", "why"),
    [
        ({"WANDB_MODE": "online"}, "", "online", "WANDB_MODE=online"),
        ({"WANDB_MODE": "on", "WANDB_API_KEY": "x"}, "", "disabled", "WANDB_MODE=on is none of online, offline"),
        ({}, NETRC, "online", "there is a login"),
        ({"WANDB_BASE_URL": "https://own.example:8080/x"}, NETRC, "online", "there is a login"),
        ({"WANDB_BASE_URL": "https://other.example"}, NETRC, "offline", "there is no login"),
        ({}, None, "offline", "there is no login"),
    ],
)
def test_auto_is_online_with_a_login_offline_without_and_heeds_the_environment(tmp_path, environ, netrc, mode, why):
    if netrc is not None:
        (tmp_path / "netrc").write_text(netrc)
    found, reason = resolve_mode({"NETRC": str(tmp_path / "netrc"), **environ})
    assert found == mode
    assert reason.startswith(why)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds the service through /proc")
def test_wandb_killed_in_the_run_costs_one_warning_and_no_traceback(tmp_path: Path) -> None:
    program = f"""
import os, signal, sys, time
from pathlib import Path
from trainer.config.schema import WandbTable
from trainer.metrics.payload_contract import build_payload
from trainer.tools.services import WandbSink
sink = WandbSink(mode="offline", project="p", run_dir=Path({str(tmp_path)!r}))
sink.log(build_payload("train", 1, {{"loss": 1.0}}))
parents = {{int(p.parent.name): p.read_text() for p in Path("/proc").glob("[0-9]*/stat")}}
ours = [pid for pid, stat in parents.items() if "(wandb-core)" in stat and f" {{os.getpid()}} " in stat]
os.kill(ours[0], signal.SIGKILL)
for step in range(2, 12):
    sink.log(build_payload("train", step, {{"loss": 1.0}}))
    time.sleep(0.02)
sink.close()
print("done")
"""
    # Without the variable by which a child would share this process's wandb service.
    env = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, env=env)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert done.stderr.count("wandb failed and is off from now on") == 1
    assert done.stderr.count("WARNING") == 1
    assert "Traceback" not in done.stderr


def scalars(log_dir: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(log_dir))
    accumulator.Reload()
    names = accumulator.Tags()["scalars"]
    return {name: [(event.step, event.value) for event in accumulator.Scalars(name)] for name in names}


def test_tensorboard_hides_what_a_restart_repeats(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    sink = TensorboardSink(tmp_path)
    for step in (1, 10, 20):
        sink.log(train(step, 1.0))
    sink.log(build_payload("eval", 20, {"eval_loss": math.inf}))
    for _ in range(2):
        sink.close()
    time.sleep(1.1)  # files are read in the order of the seconds in their names
    again = TensorboardSink(tmp_path)
    again.event({"event": "restart", "global_step": 10})
    again.log(train(11, 2.0))
    again.close()
    found = scalars(tmp_path)
    assert found.keys() == {"train/loss", "gpu/peak_gb", "eval/loss"}
    assert found["train/loss"] == [(1, 1.0), (10, 1.0), (11, 2.0)]
