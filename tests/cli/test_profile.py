"""`train --profile N`: a trace of N steady steps in the run directory, and where the time went."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.support.in_process import program
from tests.support.runs import make_corpus, read_rows, run, write_tiny_config
from trainer.extensions.profile import SETTLING, WARM_UP


@pytest.fixture
def config(tmp_path: Path) -> Path:
    make_corpus(tmp_path / "corpus")
    return write_tiny_config(tmp_path)


def profiled(config: Path, *options: object, nproc: int | None = None):
    run_dir = config.parent / "run"
    done = run("--config", config, "--run-dir", run_dir, "--profile", 3, *options, nproc=nproc)
    assert done.returncode == 0, done.stderr
    return run_dir, done


@pytest.mark.distributed
@pytest.mark.parametrize("nproc", [None, 2])
def test_the_trace_has_the_steps_the_report_where_their_time_went(config, nproc, capsys):
    run_dir, done = profiled(config, "--steps", 20, nproc=nproc)
    summary = json.loads((run_dir / "profile" / "summary.json").read_text())
    assert summary["num_steps"] == 3
    assert summary["first_step"] == SETTLING + WARM_UP + 1
    assert sum(kernel["share"] for kernel in summary["kernels"]) <= 1.0 + 1e-9
    assert 0 < sum(kernel["total_ms"] for kernel in summary["kernels"]) / 3 < 1.5 * summary["step_ms"]
    events = json.loads(gzip.decompress((run_dir / "profile" / "trace.json.gz").read_bytes()))["traceEvents"]
    steps = {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep#")}
    assert len(steps) == 3
    assert done.stderr.count("profile of 3 steps") == 1
    assert "USDT" not in done.stderr  # torch's own log of its profiler
    page = config.parent / "page.html"
    assert program(["report", run_dir, "--out", page], capsys).returncode == 0
    html = page.read_text(encoding="utf-8")
    assert "Where the time went" in html
    assert f"rank 0, steps {summary['first_step']} to {summary['first_step'] + 2}: " in html
    assert summary["kernels"][0]["name"] in html


def test_profiling_changes_no_number_and_no_step_time_holds_the_writing_of_the_trace(config):
    plain = config.parent / "plain"
    done = run("--config", config, "--run-dir", plain, "--steps", 16)
    assert done.returncode == 0, done.stderr
    run_dir, _ = profiled(config, "--steps", 16)
    losses = [[row["loss"] for row in read_rows(path / "metrics.jsonl").values()] for path in (plain, run_dir)]
    assert losses[0] == losses[1]
    assert not (plain / "profile").exists()


def test_a_run_that_ends_before_says_that_there_is_no_profile(config, capsys):
    run_dir, done = profiled(config, "--steps", 12)
    assert "the run ended before steps 11 to 13 were recorded: there is no profile" in done.stderr
    assert not (run_dir / "profile" / "summary.json").exists()
    page = config.parent / "page.html"
    assert program(["report", run_dir, "--out", page], capsys).returncode == 0
    assert "Where the time went" not in page.read_text(encoding="utf-8")


def test_a_profile_that_cannot_be_written_costs_one_warning_and_not_the_run(config):
    (config.parent / "run").mkdir()
    (config.parent / "run" / "profile").write_text("a file where the folder should be")
    _, done = profiled(config, "--steps", 12)
    assert done.stderr.count("profile") >= 1
    assert "Traceback" not in done.stderr
