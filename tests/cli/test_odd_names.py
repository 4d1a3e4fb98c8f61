"""Names that no one expects, given to the program: a run directory of 300 characters, and names that are not UTF-8."""

from __future__ import annotations

import os

import pytest

from tests.support.in_process import program
from tests.support.runs import run, write_tiny_config


def test_a_path_with_too_long_a_name_is_refused_in_one_line(tmp_path, capsys):
    done = run("--config", write_tiny_config(tmp_path), "--run-dir", tmp_path / ("x" * 300), nproc=2)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "File name too long; choose another place with --run-dir" in done.stderr
    for arguments in (["diagnose"], ["ls"], ["report"], ["checkpoint", "list"]):
        done = program([*arguments, "x" * 300], capsys)
        assert done.returncode == 2, arguments
        assert done.stderr.count("\n") == 1, done.stderr


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A run with a directory and a modality that are not UTF-8."""
    directory = tmp_path_factory.mktemp("odd")
    config = write_tiny_config(directory)
    second = directory / "second"
    second.mkdir()
    os.rename(directory / "corpus" / "b", second / "b")
    os.rename(directory / "corpus" / "a", os.fsdecode(os.fsencode(directory / "corpus") + b"/m\xfe"))
    text = config.read_text().replace('modalities = ["a"]\n', "").replace('modalities = ["b"]\n', "")
    before, name, after = text.partition('name = "second"')
    config.write_text(before + name + after.replace(str(directory / "corpus"), str(second)) + "per_source = true\n")
    run_dir = os.fsdecode(os.fsencode(directory) + b"/r\xffun")
    done = run("--config", config, "--run-dir", run_dir, "--steps", 2)
    assert done.returncode == 0, done.stderr
    return directory, config, run_dir


def test_a_run_whose_names_are_not_utf8_can_be_looked_at(odd, tmp_path, capsys):
    directory, config, run_dir = odd
    verbs = [
        ["diagnose", run_dir],
        ["report", run_dir, "--out", tmp_path / "report.html"],
        ["compare", run_dir, run_dir],
        ["ls", directory],
        ["checkpoint", "list", run_dir],
        ["export", run_dir, "--format", "csv", "--out", tmp_path / "rows.csv"],
        ["check", "--config", config],
        ["preview", "--config", config],
    ]
    for verb in verbs:
        done = program(verb, capsys)
        assert done.returncode in (0, 3), (verb, done.stderr)
        (done.stdout + done.stderr).encode("utf-8", "strict")
    assert (tmp_path / "report.html").read_text(encoding="utf-8")
    done = run("--config", config, "--run-dir", run_dir, "--steps", 3, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert "resuming after step 2" in done.stderr
