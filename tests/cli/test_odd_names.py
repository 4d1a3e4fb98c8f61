"""Names of files and modalities that nobody should use: the program runs, and its output stays harmless."""

from __future__ import annotations

import os

import pytest

from tests.support.in_process import program
from tests.support.runs import make_corpus, run

CONFIG = """
[train]
steps = 4
device = "cpu"
[data]
seq_len = 16
[data.mixing]
batch_size = 2
[[data.source]]
name = "s"
root = "corpus"
modalities = ["a\\\\xff\\\\x1b[31m\\\\n[b]", "b"]
[model]
dim = 16
num_layers = 1
[metrics]
log_interval = 1
per_source = true
"""
LABEL = "a\\xff\\x1b[31m\\n[b]"


@pytest.fixture
def odd(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_corpus(tmp_path / "corpus", streams=2)
    os.rename(b"corpus/a", b"corpus/a\xff\x1b[31m\n[b]")
    os.rename(b"corpus/b/stream0.jsonl", b"corpus/b/s\xfe\x1b[7m\n.jsonl")
    (tmp_path / "x.toml").write_text(CONFIG)
    return tmp_path


def test_every_verb_shows_an_odd_modality_as_one_harmless_word(odd, capsys):
    trained = run("--config", "x.toml", "--run-dir", "r", cwd=odd)
    assert trained.returncode == 0, trained.stderr
    verbs = {
        ("check", "--config", "x.toml"): True,
        ("preview", "--config", "x.toml"): True,
        ("data", "inspect", "corpus"): True,
        ("data", "inspect", "corpus", "--json"): False,
        ("data", "verify", "corpus"): False,
        ("diagnose", "r"): False,
    }
    for arguments, shows_it in verbs.items():
        ended = program(arguments, capsys)
        assert ended.returncode in (0, 3), (arguments, ended)
        for output in (ended.stdout, ended.stderr):
            assert "\x1b" not in output, arguments
            output.encode("utf-8")
        assert not shows_it or LABEL in ended.stdout, arguments


def test_a_damaged_file_is_named_on_one_line(odd, capsys):
    with open(b"corpus/b/s\xfe\x1b[7m\n.jsonl", "wb") as file:
        file.write(b"no json")
    ended = program(["data", "verify", "corpus"], capsys)
    assert ended.returncode == 2
    assert "corpus/b/s\\xfe\\x1b[7m\\n.jsonl: line 1: is not JSON" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
