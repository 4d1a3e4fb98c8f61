"""One run, all sinks: each holds the same numbers."""

from __future__ import annotations

import json

import pytest

from tests.support.runs import evaluating, read_rows, run, write_tiny_config
from tests.support.wandb_file import find_wandb_file, read_history, read_records, wait_for_end
from trainer.config.load import load_config
from trainer.metrics.best_effort import Diagnostics
from trainer.metrics.payload_contract import validate_stream
from trainer.metrics.sinks import display_key
from trainer.tools.services import to_services
from trainer.training.run_dir import RunDir

EXTRA = """
tensorboard = true
per_source = true
wandb = { mode = "offline", project = "trainer-test" }

[objective]
token_types = true
z_loss = 1e-4
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sinks")
    config = write_tiny_config(directory, EXTRA + evaluating(3, saves=4))
    result = run("--config", config, "--run-dir", directory / "run", "--steps", "8", nproc=2, is_alone=True)
    assert result.returncode == 0, result.stderr
    return directory / "run", result


def test_stdout_and_the_record_hold_the_same_valid_payloads(finished):
    run_dir, result = finished
    assert result.stdout == (run_dir / "metrics.jsonl").read_text()
    assert not list(validate_stream(result.stdout.splitlines()))
    assert "WARNING" not in result.stderr


def test_wandb_s_file_holds_the_same_numbers_and_the_resolved_config(finished):
    run_dir, _ = finished
    file = find_wandb_file(run_dir)
    wait_for_end(file)
    history = {int(row["global_step"]): row for row in read_history(file)}
    expected: dict[int, dict[str, float]] = {}
    for (_, step), row in read_rows(run_dir / "metrics.jsonl").items():
        expected.setdefault(step, {}).update({display_key(key): value for key, value in row.items()})
    assert history.keys() == expected.keys()
    for step, row in expected.items():
        assert {key: history[step][key] for key in history[step] if key[0] != "_" and key != "global_step"} == row
    configs = [record for record in read_records(file) if record.WhichOneof("record_type") == "run"]
    logged_config = {item.key: json.loads(item.value_json) for item in configs[0].run.config.update}
    assert logged_config["train"]["steps"] == 8


def test_tensorboard_holds_the_same_losses_and_the_settings(finished):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_dir, _ = finished
    events = accumulator.EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    rows = read_rows(run_dir / "metrics.jsonl")
    (config,) = events.Tensors("config/text_summary")[0].tensor_proto.string_val
    assert "    train.steps = 8\n" in config.decode()
    assert b"train.steps" in events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = {event.step: event.value for event in events.Scalars("train/loss")}
    assert found == {
        step: pytest.approx(row["loss"], rel=1e-6) for (mode, step), row in rows.items() if mode == "train"
    }


def test_a_run_resumed_from_an_earlier_step_goes_on_under_the_same_id_in_wandb_above_its_own_counter(finished):
    run_dir, _ = finished
    first = find_wandb_file(run_dir)
    line = ("--config", run_dir / "config.toml", "--run-dir", run_dir, "--steps", "10")
    again = run(*line, "--resume", run_dir / "checkpoints" / "step_00000004", nproc=2, is_alone=True)
    assert again.returncode == 0, again.stderr
    (second,) = set(run_dir.glob("wandb/*run-*/*.wandb")) - {first}
    ids = {record.run.run_id for file in (first, second) for record in read_records(file) if record.HasField("run")}
    assert ids == {json.loads((run_dir / "status.json").read_text())["wandb_run_id"]}
    rows = [(row["_step"], row["global_step"]) for file in (first, second) for row in read_history(file)]
    assert rows == [*zip(range(1, 9), range(1, 9), strict=True), *zip(range(9, 15), range(5, 11), strict=True)]
    found, config = run_dir / "checkpoints" / "step_00000004", load_config(run_dir / "config.toml")
    for place, is_own in ((run_dir, True), (run_dir.parent / "branch", False)):
        sinks, number = to_services(config, RunDir(place), (found, {"wandb_run_id": "one"}), Diagnostics())
        assert (number == "one") == is_own
        for each in sinks:
            each.close()
