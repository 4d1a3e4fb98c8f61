"""The program as its users meet it: help, mistakes, the ways to launch."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from tests.support.grouped import run
from tests.support.in_process import program
from tests.support.runs import ROOT, command, environment, losses, overrides, write_tiny_config
from trainer.cli.launch import EXIT_CODE, report_to_launcher
from trainer.metrics.payload_contract import validate_stream


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "nowhere.toml"], "nowhere.toml: cannot be read: No such file or directory"),
        (["--steps", "0", "--config", "x.toml"], "value for '--steps': must be >= 1, got \"0\"; see train --help"),
        (["--nproc", "2"], "--config: is required"),
        (["chekc"], "No such command 'chekc'. Did you mean 'check'? See train --help"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_exit_code_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    result = program(arguments, capsys)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert not list(tmp_path.iterdir())


def test_config_mistakes_are_listed_together_with_their_lines_and_nothing_is_written(tmp_path, capsys):
    config = write_tiny_config(tmp_path)
    text = (
        config.read_text().replace('device = "cpu"', 'device = "gpu"').replace("num_streams_mixed", "num_stream_mixed")
    )
    config.write_text(text)
    line = {key: 1 + text[: text.index(key)].count("\n") for key in ("device =", "num_stream_mixed")}
    result = program(["--config", config], capsys)
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f'{config}:{line["device ="]}: train.device: must be one of auto, cpu, cuda; got "gpu"',
        f"{config}:{line['num_stream_mixed']}: data.mixing.num_stream_mixed: unknown key; did you mean num_streams_mixed?",
    ]
    assert result.stdout == ""
    assert not (tmp_path / "runs").exists()


def test_check_prints_a_config_that_is_itself_a_config(tmp_path, capsys):
    config = write_tiny_config(tmp_path)
    result = program(["check", "--config", config, "--set", "train.steps=9", "--nproc", "2", "--no-contract"], capsys)
    assert result.returncode == 0, result.stderr
    assert "#   tokens_per_step = 256" in result.stdout  # 4 cells * 16 tokens * 2 micro-batches * 2 ranks
    assert "#   groups_in_flight = 16" in result.stdout  # 2 sources * K 2 * 4 cells
    assert "#   capacity_to_change_ranks = 48" in result.stdout  # of both ranks before, and of one after
    assert "#   ledger_capacity = 32" in result.stdout
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(result.stdout)
    again = program(["check", "--config", resolved, "--nproc", "2", "--no-contract"], capsys)
    found, expected = (re.sub(r" and of \d+ rows in .*?(?= \(judged)", "", each.stdout) for each in (again, result))
    assert found == expected.replace(str(config), str(resolved))


def test_check_takes_the_short_options_of_train(tmp_path, capsys):
    options = ["--steps", "7", "--stdout=off", "--resume", "auto", "--strategy", "ddp", "--json"]
    found = program(["check", "--config", write_tiny_config(tmp_path), *options], capsys)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["config"]["train"]["steps"] == 7


def nameless() -> list[str]:
    """What makes a command run on a host whose own name does not resolve; [] where that takes rights."""
    line = ["unshare", "--uts", "sh", "-c", 'hostname no-such-host && exec "$@"', "sh"]
    is_allowed = shutil.which("unshare") and subprocess.run([*line, "true"], capture_output=True).returncode == 0
    return line if is_allowed else []


def launches(config: Path, run_dir: Path) -> dict[str, tuple[list[str], Path, int]]:
    """Every documented way to start the trainer: command, working directory, ranks."""
    arguments = ["--config", str(config), "--run-dir", str(run_dir), "--steps", "3"]
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node=1"]
    installed = str(Path(sys.executable).with_name("train"))
    return {
        "torchrun on the file train, from the root": ([*torchrun, "train", *arguments], ROOT, 1),
        "torchrun --no-python": ([*torchrun, "--no-python", installed, *arguments], config.parent, 1),
        "torchrun -m trainer": ([*torchrun, "-m", "trainer", *arguments], config.parent, 1),
        "train --nproc": ([*nameless(), installed, "--nproc", "2", *arguments], config.parent, 2),
        "python -m trainer": ([sys.executable, "-m", "trainer", *arguments], config.parent, 1),
    }


def call(line: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """A process of its own, to its end."""
    own = environment({"MASTER_PORT": "0"})  # any that is free
    return subprocess.run(line, env=own, cwd=cwd, capture_output=True, text=True, check=False)


# `--nproc` starts `-m trainer`.
REPEATS = ("torchrun -m trainer", "python -m trainer", "torchrun --no-python")


@pytest.mark.distributed
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] * (way in REPEATS)) for way in launches(Path("x"), Path("y"))]
)
def test_every_way_to_launch_trains(way, tmp_path):
    line, cwd, world_size = launches(write_tiny_config(tmp_path), tmp_path / "run")[way]
    result = call(line, cwd)
    assert result.returncode == 0, result.stderr
    assert not list(validate_stream(result.stdout.splitlines()))
    assert len(result.stdout.splitlines()) == 3
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "done"
    assert json.loads((tmp_path / "run" / "env.json").read_text())["world_size"] == world_size
    assert len(list((tmp_path / "run" / "logs").iterdir())) == world_size
    assert ("starting 2 ranks" in result.stderr.splitlines()) == (way == "train --nproc")


@pytest.fixture
def nproc(monkeypatch, tmp_path, capsys):
    """`train --nproc`, whose ranks are `run_ranks` in the place of torch's `run`."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", "")

    def launch(number, *arguments, run_ranks=lambda _: None):
        monkeypatch.setattr("torch.distributed.run.run", run_ranks)
        return program(["--nproc", number, "--config", write_tiny_config(tmp_path), *arguments], capsys)

    return launch


@pytest.mark.parametrize(("tasks", "rank", "is_said"), [("2", "0", True), ("2", "1", False), ("1", "0", False)])
def test_tasks_of_srun_are_told_once_that_they_train_apart(nproc, monkeypatch, tasks, rank, is_said):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", tasks)
    monkeypatch.setenv("SLURM_PROCID", rank)
    assert nproc(2).stderr.count("srun started 2 of this: each trains a run of its own") == is_said


@pytest.mark.parametrize(
    ("arguments", "rank", "message"),
    [
        (["--strategy", "hsdp", "--replicas", "2"], "", "distributed.replicas: 2 replicas do not divide 3 ranks"),
        ([], "0", "--nproc: this process is already a rank of torchrun"),
        (
            ["--set", "train.device=auto"],
            "",
            "--nproc: 3 ranks, but this machine has 2 CUDA devices; lower it to 2, or train on the CPU: ",
        ),
    ],
)
def test_ranks_that_cannot_work_are_refused_before_one_is_started(nproc, monkeypatch, arguments, rank, message):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    if rank:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    found = nproc(3, *arguments)
    assert found.returncode == 2
    assert message in found.stderr
    assert found.stderr.count("\n") == 1, found.stderr


def test_a_record_of_another_program_is_not_continued_but_a_run_without_its_status_is(tmp_path):
    config, foreign, own = write_tiny_config(tmp_path), tmp_path / "foreign", tmp_path / "own"
    foreign.mkdir()
    row = '{"schema_version": 1, "mode": "train", "global_step": 9, "metrics": {"loss": 1.0}}\n'
    (foreign / "metrics.jsonl").write_text(row)
    found = run("--config", config, "--run-dir", foreign, "--resume", "auto")
    assert found.returncode == 2
    assert "--run-dir: " in found.stderr
    assert "holds a metrics.jsonl that is not of a run of this program" in found.stderr
    assert (foreign / "metrics.jsonl").read_text() == row
    assert run("--config", config, "--run-dir", own, "--steps", 2).returncode == 0
    (own / "status.json").unlink()
    found = run("--config", config, "--run-dir", own, "--resume", "auto", "--steps", 4)
    assert found.returncode == 0, found.stderr
    assert "done at step 4 of 4" in found.stderr


@pytest.mark.parametrize(("reported", "code"), [("00", 0), ("11", 1), ("0", 130)])
def test_a_launch_that_is_stopped_ends_with_the_code_of_the_run(nproc, reported, code):
    def stopped(_: object) -> None:
        for rank, code in enumerate(reported):
            report_to_launcher(EXIT_CODE, code, {**os.environ, "RANK": str(rank)})
        raise SignalException("stopped", signal.SIGINT)

    assert nproc(2, run_ranks=stopped).returncode == code


@pytest.mark.parametrize("is_nohup", [False, True])
def test_a_launcher_passes_on_what_stops_a_run_and_ignores_what_nohup_does(nproc, is_nohup):
    passed_on = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_nohup else signal.SIG_DFL)
    try:
        nproc(2, run_ranks=lambda given: passed_on.extend(given.signals_to_handle.split(",")))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert set(passed_on) == {"SIGTERM", "SIGINT", "SIGUSR1"} | (set() if is_nohup else {"SIGHUP"})


@pytest.mark.parametrize("silent", [None, 1])
def test_a_launch_whose_ranks_all_exit_with_0_fails_unless_each_said_that_it_is_done(nproc, silent):
    def run_ranks(_: object) -> None:
        for rank in {0, 1, 2} - {silent}:
            report_to_launcher(EXIT_CODE, "0", {**os.environ, "RANK": str(rank)})

    found = nproc(3, run_ranks=run_ranks)
    assert found.returncode == (0 if silent is None else 1)
    assert ("train: rank 1 exited with 0 before the run was over" in found.stderr) == (silent == 1)


@pytest.mark.slow
def test_a_mistake_that_the_ranks_find_is_one_line_and_something_is_said_before_torch_is_there(tmp_path):
    (tmp_path / "empty").mkdir()
    root = f"data.source.first.root={tmp_path / 'empty'}"
    found = call(command(["--nproc", "2", "--config", write_tiny_config(tmp_path), "--set", root]), tmp_path)
    assert found.returncode == 2
    said, refused = found.stderr.splitlines()
    assert said == "starting 2 ranks"
    assert "source first: root: " in refused
    assert "has no modality 'a'" in refused


def test_damaged_contents_are_told_once_in_the_last_line(tmp_path):
    config = write_tiny_config(tmp_path)
    for path in (tmp_path / "corpus").glob("*/*.jsonl"):
        path.write_text("{\n")
    done = run("--config", config, "--run-dir", tmp_path / "run")
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, done.stderr.count(last)) == (2, 1)
    assert "line 1" in last
    assert last in (tmp_path / "run" / "logs" / "rank_000.log").read_text()


def test_a_finished_run_is_not_overwritten_and_goes_on_with_its_settings_by_the_command_that_is_offered(
    tmp_path, capsys
):
    config, metrics = write_tiny_config(tmp_path), tmp_path / "a run" / "metrics.jsonl"
    same = ["--config", config, "--run-dir", tmp_path / "a run", "--steps", "2", *overrides("train.micro_batches=1")]
    first = run(*same)
    assert first.returncode == 0, first.stderr
    assert "the gradient noise scale is not measured: one micro-batch per step on one rank" in first.stderr
    said = " ".join(program(["diagnose", metrics.parent, "--all"], capsys).stdout.split())
    assert "needs gns/b_big; that takes gns.enabled = true and at least two micro-batches per step" in said
    before = metrics.read_bytes()
    again = run(*same)
    assert again.returncode == 2
    assert "holds a run already; add --resume auto" in again.stderr
    done = run(*same, "--resume", "auto")
    assert done.returncode == 0
    assert "the run is at step 2, train.steps = 2" in done.stderr
    assert metrics.read_bytes() == before
    [offered] = [line for line in first.stderr.splitlines() if "train beyond step 2 with: train --config" in line]
    name, *arguments = shlex.split(offered.partition(" with: ")[2])
    longer = run(*arguments)
    assert (name, longer.returncode) == ("train", 0), longer.stderr
    assert "resuming after step 2" in longer.stderr
    assert longer.stderr.count("resuming with another config: train.steps: 2 -> 4") == 1
    assert sorted(losses(metrics)) == [1, 2, 3, 4]
    assert (tmp_path / "a run" / "config.toml").read_bytes() == config.read_bytes()


def test_a_wrong_command_line_is_refused_with_a_typer_that_raises_click_s_own_errors_too(capsys, monkeypatch):
    click = pytest.importorskip("click")  # newer releases of typer have a private copy of it

    def refuse(**_):
        raise click.UsageError("No such option: --confg.", ctx=None)

    monkeypatch.setattr("trainer.cli.main.app", refuse)
    done = program(["--confg"], capsys)
    assert (done.returncode, done.stderr) == (2, "train: No such option: --confg; see train --help\n")
