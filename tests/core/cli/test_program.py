"""The program as its users meet it: help, mistakes, the ways to launch."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.in_process import program
from tests.support.runs import ROOT, fresh, losses, overrides, run, write_tiny_config
from trainer.metrics.payload_contract import validate_stream
from trainer.tools import launcher


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "nowhere.toml"], "nowhere.toml: cannot be read: No such file or directory"),
        (["--steps", "0", "--config", "x.toml"], "Invalid value for '--steps': "),
        (["--nproc", "2", "--config", ""], "--config: is required"),
        (["--run-dir", "", "--config", "x.toml"], "--run-dir: it is empty"),
        (["init", "data", "--out", "", "--force"], "--out: it is empty"),
        (["data", "build", "--a.b", "1"], "train data build: No such option: --a.b"),
        (["chekc"], "No such command 'chekc'. Did you mean 'check'? (see train --help)"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_exit_code_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert message in program(arguments, capsys).mistake
    assert not list(tmp_path.iterdir())


def test_the_version_is_all_that_is_done(capsys):
    ended = program(["--version", "ls", "nowhere"], capsys)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert re.fullmatch(r"trainer [\d.]+, torch [\d.]+\S*\n", ended.stdout)


def test_check_prints_a_config_that_is_itself_a_config(tmp_path, capsys):
    config = write_tiny_config(tmp_path)
    result = program(["check", "--config", config, "--steps", "9", "--nproc", "2", "--no-contract"], capsys)
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


def launches(config: Path, run_dir: Path) -> dict[str, tuple[list[str], Path, int]]:
    """Every documented way to start the trainer: command, working directory, ranks."""
    arguments = ["--config", str(config), "--run-dir", str(run_dir), "--steps", "3"]
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node=1"]
    installed = str(Path(sys.executable).with_name("train"))
    return {
        "torchrun on the file train, from the root": ([*torchrun, "train", *arguments], ROOT, 1),
        "torchrun --no-python": ([*torchrun, "--no-python", installed, *arguments], config.parent, 1),
        "torchrun -m trainer": ([*torchrun, "-m", "trainer", *arguments], config.parent, 1),
        "train --nproc": ([installed, "--nproc", "2", *arguments], config.parent, 2),
        "python -m trainer": ([sys.executable, "-m", "trainer", *arguments], config.parent, 1),
    }


# `--nproc` starts `-m trainer`.
REPEATS = ("torchrun -m trainer", "python -m trainer", "torchrun --no-python")


@pytest.mark.distributed
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] * (way in REPEATS)) for way in launches(Path("x"), Path("y"))]
)
def test_every_way_to_launch_trains(way, tmp_path):
    line, cwd, world_size = launches(write_tiny_config(tmp_path), tmp_path / "run")[way]
    result = fresh(line, cwd=cwd, MASTER_PORT="0")  # any that is free
    assert result.returncode == 0, result.stderr
    assert not list(validate_stream(result.stdout.splitlines()))
    assert len(result.stdout.splitlines()) == 3
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "done"
    assert json.loads((tmp_path / "run" / "env.json").read_text())["world_size"] == world_size
    assert len(list((tmp_path / "run" / "logs").iterdir())) == world_size
    assert ("starting 2 ranks" in result.stderr.splitlines()) == (way == "train --nproc")


@pytest.mark.parametrize(
    ("first", "second", "code"), [("true", "true", 0), ("cat", "exit 3", 3), ("exit 3", "kill -9 $$", 1)]
)
def test_the_launcher_ends_with_the_code_of_the_first_rank_that_failed_and_ends_the_others(first, second, code, capfd):
    ranks = [subprocess.Popen(["sh", "-c", how], stdin=subprocess.PIPE) for how in (first, second)]
    for rank in ranks[first == "cat" :]:
        rank.wait()
    assert launcher._wait(ranks) == code
    assert ("rank 1 was ended by SIGKILL" in capfd.readouterr().err) == (code == 1)
    assert ranks[0].returncode == {"true": 0, "cat": -signal.SIGTERM, "exit 3": 3}[first]


def test_a_rank_of_torchrun_starts_no_ranks(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    said = program(["--nproc", 2, "--config", write_tiny_config(tmp_path)], capsys).mistake
    assert "--nproc: this process is already a rank of torchrun" in said


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


def test_a_finished_run_is_not_overwritten_and_goes_on_with_its_settings_by_the_command_that_is_offered(
    tmp_path, capsys
):
    config, metrics = write_tiny_config(tmp_path), tmp_path / "a run" / "metrics.jsonl"
    (tmp_path / "set.toml").write_text(f'[[source]]\nname = "v1.5"\nroot = "{tmp_path}/corpus"\nweight = 0.5\n')
    sets = overrides("train.micro_batches=1", "data.source.second={name='more', include='set.toml', weight=3}")
    same = ["--config", config, "--run-dir", tmp_path / "a run", "--steps", "2", *sets]
    first = run(*same)
    assert first.returncode == 0, first.stderr
    assert "the gradient noise scale is not measured: one micro-batch per step on one rank" in first.stderr
    said = " ".join(program(["diagnose", metrics.parent], capsys).stdout.split())
    assert "needs gns/b_big; that takes gns.enabled = true and at least two micro-batches per step" in said
    before = metrics.read_bytes()
    again = run(*same)
    assert again.returncode == 2
    assert "holds a run already; continue it with --resume auto" in again.stderr
    done = run(*same, "--resume", "auto")
    assert done.returncode == 0
    assert "the run is at step 2, train.steps = 2" in done.stderr
    assert metrics.read_bytes() == before
    [offered] = [line for line in first.stderr.splitlines() if "train beyond step 2 with: train --config" in line]
    name, *arguments = shlex.split(offered.partition(" with: ")[2])
    longer = run(*arguments, *overrides("data.source.more.v1.5.weight=1.25"))
    assert (name, longer.returncode) == ("train", 0), longer.stderr
    assert "resuming after step 2" in longer.stderr
    changes = [line.partition(" with another config: ")[2] for line in longer.stderr.splitlines()]
    assert [*filter(None, changes)] == ["data.source.more.v1.5.weight: 1.5 -> 1.25", "train.steps: 2 -> 4"]
    assert sorted(losses(metrics)) == [1, 2, 3, 4]
    assert (tmp_path / "a run" / "config.toml").read_bytes() == config.read_bytes()
