"""What a run's files hold may be anything: on a terminal it is text, one run's damage is no neighbour's, and links, pipes and
devices in the place of files are refused by name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.core.test_files import PRECIOUS, SPECIAL, nested
from tests.support.in_process import program
from tests.support.runs import run, train, write_tiny_config
from tests.tools.cli.test_ls import make_run
from trainer.metrics.payload_contract import build_payload, encode_payload

pytestmark = pytest.mark.timeout(300)
ODD = "\x1b[31mred\x1b]0;title\x07 \x9b5m \u202e \0 [bold]"


def verbs(first: Path, second: Path) -> list[list[object]]:
    report = ["report", first, second, "--out", first.parent / "report.html", "--force"]
    return [["ls", first.parent], ["diagnose", first], report]


def everything(path: Path) -> Path:
    """A run, each of whose texts holds escapes."""
    make_run(path, "failed", [3.0])
    rows = [
        encode_payload(build_payload("train", step, {"loss": 3.0 / step, ODD: step, f"blend/{ODD}/share": 1.0}))
        for step in range(1, 40)
    ]
    (path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (path / "status.json").write_text(json.dumps({"state": ODD, "reason": ODD, "last_step": 39}))
    environment = {"world_size": 1, "packages": {ODD: ODD, "torch": ODD}, "devices": [ODD]}
    (path / "env.json").write_text(json.dumps(environment))
    events = [{"event": name, "global_step": 3, "message": ODD, "error": ODD} for name in (ODD, "warning", "restart")]
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    text = json.dumps(ODD)
    (path / "config.resolved.toml").write_text(f"[run]\nname = {text}\n[model]\ntarget = {text}\n[train]\nsteps = 40\n")
    return path


def test_no_escape_of_a_run_reaches_the_terminal(tmp_path, capsys):
    first, second = everything(tmp_path / "run \x1b[31mred\x07"), make_run(tmp_path / "second", "done", [2.0, 1.0])
    for verb in [*verbs(first, second), ["ls", "--\x1b[31m"]]:
        done = program(verb, capsys)
        assert done.returncode in (0, 1, 2, 3), (verb, done.stderr)
        said = done.stdout + done.stderr
        assert [character for character in said if not character.isprintable() and character != "\n"] == [], verb
        assert verb[0] not in ("ls", "diagnose") or "\\x1b" in said


DAMAGES = {
    "status.json": ["", "[]", '{"state": [1]}', '{"last_step": 1e400}', '{"last_step": ' + "9" * 5000 + "}", "\xff"],
    "env.json": ['{"world_size": [2]}', '{"packages": 7}', f'{{"a": {nested(900)}}}'],
    "events.jsonl": ["[]\n", '{"event": {}}\n', '{"event": "restart", "global_step": "x"}\n', "\0\n"],
    "config.resolved.toml": ["a = [", "[run]\nseed = [1]", "train = 3", f"a = {nested(900)}", "[data]\nsource = 7"],
    "metrics.jsonl": ["[]\n", '{"global_step": ' + "9" * 5000 + "}\n", f'{{"a": {nested(900)}}}\n'],
}


@pytest.mark.parametrize("file", DAMAGES)
def test_damage_of_one_run_is_no_neighbours(tmp_path, capsys, file):
    good, bad = make_run(tmp_path / "good", "done", [3.0, 2.0]), make_run(tmp_path / "bad", "done", [3.0, 2.0])
    original = (bad / "metrics.jsonl").read_text()
    for content in DAMAGES[file]:
        (bad / file).write_text((original if file == "metrics.jsonl" else "") + content, encoding="latin-1")
        for verb in verbs(bad, good):
            done = program(verb, capsys)
            assert done.returncode in (0, 3), (content[:60], verb, done.stderr)
            assert verb[0] != "ls" or "good" in done.stdout


def test_a_run_whose_names_are_not_utf8_can_be_looked_at_and_resumed(tmp_path, capsys):
    config = write_tiny_config(tmp_path)
    second = tmp_path / "second"
    second.mkdir()
    os.rename(tmp_path / "corpus" / "b", second / "b")
    os.rename(tmp_path / "corpus" / "a", os.fsdecode(os.fsencode(tmp_path / "corpus") + b"/m\xfe"))
    text = config.read_text().replace('modalities = ["a"]\n', "").replace('modalities = ["b"]\n', "")
    before, name, after = text.partition('name = "second"')
    config.write_text(before + name + after.replace(str(tmp_path / "corpus"), str(second)) + "per_source = true\n")
    run_dir = os.fsdecode(os.fsencode(tmp_path) + b"/r\xffun")
    for steps in (2, 3):
        done = run("--config", config, "--run-dir", run_dir, "--steps", steps, "--resume", "auto")
        assert done.returncode == 0, done.stderr
    for verb in [*verbs(Path(run_dir), Path(run_dir)), ["check", "--config", config]]:
        done = program(verb, capsys)
        assert done.returncode in (0, 3), (verb, done.stderr)
        (done.stdout + done.stderr).encode("utf-8", "strict")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("planted")
    config = write_tiny_config(directory)
    train(config, directory / "run", "train.steps=2")
    return config, directory / "run"


def resume(config: Path, run_dir: Path, code: int) -> str:
    return train(config, run_dir, more=("--resume", "auto", "--steps", 3), code=code)


def copy_with(whole: Path, run_dir: Path, name: str, kind: str) -> Path:
    """What is in the place of a file in a copy of the run; a link points to `victim` beside it."""
    shutil.copytree(whole, run_dir, symlinks=True)
    planted = run_dir / name
    planted.parent.mkdir(exist_ok=True)
    planted.unlink(missing_ok=True)
    SPECIAL[kind](planted)
    return planted


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("metrics.jsonl", "a symbolic link"),
        ("status.json", "a pipe"),
        ("logs/rank_000.log", "a symbolic link"),
        (".lock", "a symbolic link"),
        ("checkpoints/latest", "a directory"),
    ],
)
def test_a_resume_refuses_it_by_name_and_writes_nothing(trained, tmp_path, name, kind):
    config, whole = trained
    planted = copy_with(whole, tmp_path / "run", name, kind)
    said = resume(config, tmp_path / "run", code=2)
    assert f"{planted}: cannot be written: not a plain file; choose another" in said
    assert "Traceback" not in said
    assert kind != "a symbolic link" or planted.with_name("victim").read_text() == PRECIOUS
    if kind != "a directory":
        assert (tmp_path / "run" / "events.jsonl").read_bytes() == (whole / "events.jsonl").read_bytes()


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "status.json", "config.resolved.toml"])
def test_reading_verbs_neither_wait_nor_fail(trained, tmp_path, capsys, name, kind):
    path = copy_with(trained[1], tmp_path / "run", name, kind)
    shutil.copytree(trained[1], tmp_path / "neighbour", symlinks=True)
    for verb in verbs(tmp_path / "run", tmp_path / "neighbour"):
        done = program(verb, capsys)
        assert done.returncode in (0, 2, 3)
        if done.returncode == 2:  # there is nothing to show of this run
            assert name == "metrics.jsonl"
            assert (done.stderr.count("\n"), str(path) in done.stderr) == (1, True), done.stderr


def test_linked_directories_are_as_good_as_their_own(trained, tmp_path):
    """A run directory, and its checkpoints on another disk."""
    config, whole = trained
    shutil.copytree(whole, tmp_path / "real", symlinks=True)
    shutil.move(tmp_path / "real" / "checkpoints", tmp_path / "disk")
    (tmp_path / "real" / "checkpoints").symlink_to(tmp_path / "disk")
    (tmp_path / "run").symlink_to("real")
    resume(config, tmp_path / "run", code=0)
    assert (tmp_path / "disk" / "step_00000003" / "COMPLETE").is_file()
