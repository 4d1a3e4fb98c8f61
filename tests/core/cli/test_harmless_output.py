"""What a run's files hold may be anything: on a terminal it is text, and one run's damage is no neighbour's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.grouped import run
from tests.support.in_process import program
from tests.support.runs import write_tiny_config
from tests.tools.cli.test_ls import make_run
from trainer.metrics.payload_contract import build_payload, encode_payload

ODD = "\x1b[31mred\x1b]0;title\x07 \x9b5m \u202e \0 [bold]"


def verbs(first: Path, second: Path) -> list[list[object]]:
    out = first.parent / "report.html"
    return [
        ["ls", first.parent],
        ["diagnose", first],
        ["diagnose", first, "--all"],
        ["compare", first, second],
        ["compare", first, second, first],
        ["report", first, second, "--out", out, "--force"],
    ]


def everything(path: Path) -> Path:
    """A run, each of whose texts holds escapes."""
    make_run(path, "failed", [3.0])
    rows = [
        encode_payload(build_payload("train", step, {"loss": 3.0 / step, ODD: step, f"blend/{ODD}/share": 1.0}))
        for step in range(1, 40)
    ]
    (path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (path / "status.json").write_text(json.dumps({"state": ODD, "reason": ODD, "last_step": 39}))
    (path / "env.json").write_text(
        json.dumps({"world_size": 1, "packages": {ODD: ODD, "torch": ODD}, "devices": [ODD]})
    )
    events = [{"event": name, "global_step": 3, "message": ODD, "error": ODD} for name in (ODD, "warning", "restart")]
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    text = json.dumps(ODD)
    (path / "config.resolved.toml").write_text(f"[run]\nname = {text}\n[model]\ntarget = {text}\n[train]\nsteps = 40\n")
    return path


@pytest.mark.parametrize("name", ["run", "run \x1b[31mred\x07 \u202e"])
def test_no_escape_of_a_run_reaches_the_terminal(tmp_path, capsys, name):
    first, second = everything(tmp_path / name), make_run(tmp_path / "second", "done", [2.0, 1.0])
    for verb in verbs(first, second):
        done = program(verb, capsys)
        assert done.returncode in (0, 3), (verb, done.stderr)
        said = done.stdout + done.stderr
        assert [character for character in said if not character.isprintable() and character != "\n"] == [], verb
        assert verb[0] not in ("ls", "diagnose") or "\\x1b" in said


def test_a_message_about_a_file_is_text_too(tmp_path, capsys):
    record = tmp_path / "it"
    record.write_text(json.dumps({"schema_version": 1, "mode": "train", "global_step": 1, "metrics": {ODD: "x"}}))
    done = program(["payload", "validate", record], capsys)
    assert done.returncode != 0
    assert "\x1b" not in done.stdout + done.stderr
    done = program(["ls", "--\x1b[31m"], capsys)
    assert done.returncode == 2
    assert "\x1b" not in done.stderr


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


DAMAGES = {
    "status.json": ["", "[]", '{"state": [1]}', '{"last_step": 1e400}', '{"last_step": ' + "9" * 5000 + "}", "\xff"],
    "env.json": ['{"world_size": [2]}', '{"packages": 7}'],
    "events.jsonl": ["[]\n", '{"event": {}}\n', '{"event": "restart", "global_step": "x"}\n', "\0\n"],
    "config.resolved.toml": ["a = [", "[run]\nseed = [1]", "train = 3", "[train]\nsteps = [1]", "[data]\nsource = 7"],
    "metrics.jsonl": ["[]\n", '{"global_step": ' + "9" * 5000 + "}\n"],
}


@pytest.mark.parametrize("file", DAMAGES)
@pytest.mark.parametrize("levels", [None, 900])
def test_damage_of_one_run_is_no_neighbours(tmp_path, capsys, file, levels):
    good, bad = make_run(tmp_path / "good", "done", [3.0, 2.0]), make_run(tmp_path / "bad", "done", [3.0, 2.0])
    if levels is None:
        contents = DAMAGES[file]
    else:
        contents = [f"a = {nested(levels)}" if file.endswith("toml") else f'{{"a": {nested(levels)}}}\n']
    original = (bad / "metrics.jsonl").read_text()
    for content in contents:
        (bad / file).write_text((original if file == "metrics.jsonl" else "") + content, encoding="latin-1")
        listing, verdict, _, pair, _, page = verbs(bad, good)
        for verb in (listing, verdict, pair, page):
            done = program(verb, capsys)
            assert done.returncode in (0, 3), (content[:60], verb, done.stderr)
            if verb[0] == "ls":
                assert "good" in done.stdout
            elif levels is not None and verb[0] in ("diagnose", "report"):
                line = "skipped 1 " if file.endswith("jsonl") else f"{file} cannot be read: nested too deeply"
                assert line in " ".join((done.stdout + done.stderr).split())


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
        ["check", "--config", config],
    ]
    for verb in verbs:
        done = program(verb, capsys)
        assert done.returncode in (0, 3), (verb, done.stderr)
        (done.stdout + done.stderr).encode("utf-8", "strict")
    assert (tmp_path / "report.html").read_text(encoding="utf-8")
    done = run("--config", config, "--run-dir", run_dir, "--steps", 3, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert "resuming after step 2" in done.stderr
