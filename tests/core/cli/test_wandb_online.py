"""wandb online, against a stand-in for its server: what arrives, and what a run does when the server does not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Forked
from tests.support.runs import ROOT, TIMEOUT_SEC, environment, evaluating, losses, write_tiny_config
from tests.support.wandb_file import read_history
from tests.support.wandb_stub import API_KEY, WandbStub
from trainer.metrics.payload_contract import parse_payload, validate_stream
from trainer.metrics.sinks import display_key

ONLINE = '\nwandb = { mode = "online", project = "trainer-test" }\n' + evaluating(3, saves=3, keep_last=9)


def train(directory: Path, url: str, *arguments: object, key: str | None = API_KEY) -> str:
    """A run in `directory`/run, with credentials of nobody but the test's, that ends well; returns what it said."""
    config = write_tiny_config(directory, ONLINE)
    env = environment({"HOME": str(directory), "NETRC": str(directory / "netrc"), "WANDB_CONFIG_DIR": str(directory)})
    env = {name: value for name, value in env.items() if name not in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_SERVICE")}
    env |= {"WANDB_BASE_URL": url} if key is None else {"WANDB_BASE_URL": url, "WANDB_API_KEY": key}
    out, err = directory / "out", directory / "err"
    out.unlink(missing_ok=True)
    line = ["--config", config, "--run-dir", directory / "run", *arguments]
    assert Forked(line, env, cwd=directory, out=out, err=err).wait(TIMEOUT_SEC) == 0, err.read_text()
    assert not list(validate_stream(out.read_text().splitlines()))
    assert "Traceback" not in err.read_text()
    return err.read_text()


def logged_rows(metrics: Path) -> list[dict[str, float]]:
    """The rows that a backend must have: one a step and attempt, training and evaluation together, by display key."""
    rows: list[dict[str, float]] = []
    for line in metrics.read_bytes().splitlines():
        parsed = parse_payload(line)
        if parsed.restart is not None or not rows or rows[-1].get("global_step") != parsed.global_step:
            rows.append({"global_step": parsed.global_step})
        rows[-1].update({display_key(key): value for key, value in parsed.values().items()})
    return rows


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith("_")}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """5 steps, then 3 more from the checkpoint of step 3, so that steps 4 and 5 come twice."""
    directory = tmp_path_factory.mktemp("online")
    with WandbStub() as stub:
        train(directory, stub.url, "--steps", 5)
        history = [dict(row) for run in stub.runs.values() for row in run.history]
        shutil.rmtree(directory / "run" / "checkpoints" / "step_00000005", ignore_errors=True)
        said = train(directory, stub.url, "--steps", 8, "--resume", "auto")
        yield directory / "run", stub, history, said


def test_what_arrives_is_the_record_one_row_a_logged_step(resumed):
    run_dir, _, first_history, said = resumed
    expected = logged_rows(run_dir / "metrics.jsonl")
    assert [plain(row) for row in first_history] == expected[:5]
    assert [row["_step"] for row in first_history] == [1, 2, 3, 4, 5]
    assert "eval/loss" in first_history[2]
    assert "WARNING wandb" not in said


def test_a_resumed_run_goes_on_under_the_same_id_and_loses_no_row(resumed):
    run_dir, stub, first_history, _ = resumed
    expected = logged_rows(run_dir / "metrics.jsonl")
    assert [row["global_step"] for row in expected] == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    (run,) = stub.runs.values()
    assert run.name == json.loads((run_dir / "status.json").read_text())["wandb_run_id"]
    assert run.history[:5] == first_history, "nothing of the first part was written over"
    assert [plain(row) for row in run.history] == expected


def test_the_server_knows_config_name_and_end_of_the_run(resumed):
    run_dir, stub, _, _ = resumed
    (run,) = stub.runs.values()
    config = {key: item["value"] for key, item in json.loads(run.config).items()}
    assert config["train"]["steps"] == 8
    assert config["ledger"]["capacity"] == 32
    assert (run.project, run.display_name) == ("trainer-test", run_dir.name)
    assert (run.is_complete, run.exit_code) == (True, 0)
    assert stub.authorizations - {None}, "requests carried the key"


def test_auto_goes_offline_without_a_login_and_says_so(tmp_path):
    run_dir = tmp_path / "run"
    with WandbStub() as stub:
        said = train(
            tmp_path, stub.url, "--steps", 4, "--set", 'metrics.wandb.mode="auto"', "--set", "eval.every=0", key=None
        )
        assert not stub.runs
    assert [*losses(run_dir / "metrics.jsonl")] == [1, 2, 3, 4]
    assert "WARNING" not in said
    assert said.count("wandb: offline, since there is no login (wandb login, or WANDB_API_KEY)") == 1
    assert f"upload with: wandb sync {run_dir}/wandb/offline-run-*" in said


SINK = """
from pathlib import Path
from trainer.metrics.payload_contract import build_payload
from trainer.metrics.services import WandbSink
sink = WandbSink(mode="online", project="p", run_dir=Path({run_dir!r}),
                 init_timeout_sec={patience_sec}, finish_timeout_sec=2, on_event=lambda event: print(event["event"]))
sink.log(build_payload("train", 1, {{"loss": 1.0}}))
print(sink.run_id is not None, flush=True)
input()
for step in range(2, 20):
    sink.log(build_payload("train", step, {{"loss": 1.0}}))
sink.close()
print("done")
"""


@pytest.mark.parametrize("is_stopped_first", [False, True])
def test_a_sink_gives_up_in_time_with_one_warning_and_prints_nothing(tmp_path, is_stopped_first):
    """Dead in the run, or never there."""
    with WandbStub() as stub:
        if is_stopped_first:
            stub.stop()
        program = SINK.format(run_dir=str(tmp_path), patience_sec=2 if is_stopped_first else 60)
        env = {name: value for name, value in environment().items() if name != "WANDB_SERVICE"}
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**env, "WANDB_API_KEY": API_KEY, "WANDB_BASE_URL": stub.url, "HOME": str(tmp_path)},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        said = process.stdout.readline()
        while said.splitlines()[-1] not in ("True", "False"):
            said += process.stdout.readline()
        stub.stop()
        stdout, stderr = process.communicate("\n", timeout=240)
    assert process.returncode == 0, stderr
    lines = (said + stdout).splitlines()
    assert {*lines} - {"wandb_warning"} == {"True", "done"}
    (kept,) = tmp_path.glob(f"wandb/{'offline-run' if is_stopped_first else 'run'}-*/*.wandb")
    assert [row["global_step"] for row in read_history(kept)] == [*range(1, 20)]
    assert stderr.count(f"upload it with: wandb sync {kept.parent}\n") == (not is_stopped_first), stderr
    assert stderr.count("WARNING") == 1, stderr
    assert "Traceback" not in stderr
