"""stdout belongs to the payloads, which nobody has to read; their times are those of all ranks and steps."""

from __future__ import annotations

import fcntl
import os
import re

import pytest

from tests.support.runs import command, fresh, losses, read_rows, run, train, write_tiny_config
from trainer.metrics.payload_contract import validate_stream

pytestmark = pytest.mark.distributed
MODULE = """
import os, sys
from trainer.model import build as build_ours

def build(vocab_size, dim, num_layers):
    model = build_ours(vocab_size, dim=dim, num_layers=num_layers)
    print("a print while the model is made")
    def say(*_):
        print("a print in a step")
        os.write(1, b"a library in C\\n")
        os.system("echo a child process")
    model.register_forward_hook(say)
    return model
"""


def test_what_a_model_prints_goes_to_stderr_on_every_rank(tmp_path):
    (tmp_path / "talks.py").write_text(MODULE)
    config = write_tiny_config(tmp_path)
    line = ("--config", config, "--steps", 3, "--set", "model.target=talks:build")
    done = run(*line, nproc=2, extra={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert list(validate_stream(done.stdout.splitlines())) == []
    assert len(done.stdout.splitlines()) == 3
    assert done.stderr.count("a print while the model is made") >= 2
    for said in ("a print in a step", "a library in C", "a child process"):
        assert done.stderr.count(said) >= 2 * 3, said


def test_a_pipe_that_nobody_reads_holds_up_no_step(tmp_path):
    config, steps, run_dir, out = write_tiny_config(tmp_path), 40, tmp_path / "run", tmp_path / "out"
    os.mkfifo(out)
    reading = os.open(out, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, 4096)  # a few rows
    line = ("--config", config, "--run-dir", run_dir, "--steps", steps)
    done = run(*line, nproc=2, is_alone=True, out=out)
    assert done.returncode == 0, done.stderr
    assert len(losses(run_dir / "metrics.jsonl")) == steps
    dropped = re.search(r"stdout: (\d+) rows were dropped", done.stderr)
    assert dropped is not None, done.stderr
    got = os.read(reading, 1 << 20).count(b"\n")
    os.close(reading)
    assert 0 < got == steps - int(dropped[1]) < steps
    closed = command(["--config", config, "--run-dir", tmp_path / "closed", "--steps", 3])
    twice = '"$0" "$@" <&- >&- 2>&- && exec "$0" "$@" --resume auto --steps 4 2>/dev/full'
    assert fresh(["sh", "-c", twice, *closed]).returncode == 0
    assert [*losses(tmp_path / "closed" / "metrics.jsonl")] == [1, 2, 3, 4], "what is printed goes into no other file"


STALL_SEC = 1.5


def test_a_wait_of_another_rank_in_a_step_that_is_not_logged_is_in_the_next_payload(tmp_path):
    stalls = f'args={{after=7, how="sleep", seconds={STALL_SEC}, ranks=[1]}}'
    settings = (
        f'data.source=[{{name="own", target="tests.support.stalling_data:build", {stalls}}}]',
        *("data.mixing.batch_size_by_modality={}", "data.prefetch=0", "train.steps=10", "metrics.log_interval=5"),
        *("eval.every=0", "eval.holdout_fraction=0", "checkpoint.every=0", "train.micro_batches=1"),
    )
    train(write_tiny_config(tmp_path), tmp_path / "run", *settings, nproc=2)
    rows = {step: row for (_, step), row in read_rows(tmp_path / "run" / "metrics.jsonl").items()}
    seconds = rows[10]["step_time_sec"]
    assert 5 * seconds >= STALL_SEC, "five steps since the payload before"
    assert STALL_SEC <= 5 * rows[10]["time/data_sec"] <= 5 * seconds
    assert rows[10]["time/data_share"] == pytest.approx(rows[10]["time/data_sec"] / seconds)
    assert rows[10]["tokens_per_sec"] == pytest.approx(rows[10]["tokens_in_step"] / seconds), "all steps have as many"
    assert rows[5]["time/data_sec"] < STALL_SEC / 5
