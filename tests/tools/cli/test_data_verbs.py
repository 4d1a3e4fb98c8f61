"""`train data verify` and what makes corpora."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.in_process import program
from tests.support.runs import make_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), streams=2, documents=5)


@pytest.fixture
def data(capsys):
    """Runs `train data <arguments>`."""
    return lambda *arguments: program(["data", *arguments], capsys)


def test_files_and_globs_of_any_format_are_read(tmp_path, data):
    (tmp_path / "x").mkdir()
    np.array([1, 2, 0, 3, 0], dtype=np.uint16).tofile(tmp_path / "x" / "a.bin")
    np.save(tmp_path / "x" / "b.npy", np.array([9, 9, 0]))
    arguments = ("--tokenizer", "ids", "--vocab-size", "10", "--dtype", "uint16", "--eod", "0")
    for paths in ([tmp_path / "x"], [tmp_path / "x" / "a.bin", tmp_path / "x" / "*.npy"]):
        result = data("verify", *paths, *arguments)
        assert (result.stdout, result.stderr) == ("2 streams, 3 documents, 8 tokens: no damage\n", "")


@pytest.mark.parametrize("verb", [("data", "verify"), ("init",)])
def test_options_that_no_file_heeds_are_refused(corpus, capsys, verb):
    result = program((*verb, corpus, "--eod", "0"), capsys)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == "eod: is 0, but there are no npy or bin files; remove it"


def test_verify_reports_every_damaged_file_on_a_line_and_exits_with_2(tmp_path, data):
    corpus = make_corpus(tmp_path / "corpus", streams=3, documents=4)
    well = data("verify", corpus)
    assert (well.returncode, well.stderr) == (0, "")
    assert re.fullmatch(r"6 streams, 24 documents, [\d,]+ tokens: no damage\n", well.stdout)
    with (corpus / "a" / "stream1.jsonl").open("a") as file:
        file.write('{"text": ')
    (corpus / "b" / "stream0.jsonl").write_bytes(b"")
    (corpus / "b" / "c.bin").write_bytes(b"123")
    result = data("verify", corpus, "--dtype", "uint16")
    assert result.returncode == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 3, result.stderr
    assert lines[0].startswith(f"{corpus}/a/stream1.jsonl: line 5: is not JSON")
    assert lines[1].startswith(f"{corpus}/b/c.bin: ends in the middle of a token")
    assert lines[2].startswith(f"{corpus}/b/stream0.jsonl: the file is empty")


def test_skipped_files_are_counted_with_examples(tmp_path, capsys):
    for number in range(50):
        (tmp_path / f"a{number:02d}.txt").write_text("the same")
    build = ["data", "build", "text", "--out", tmp_path / "out", "--modality", f"m={tmp_path}/*.txt"]
    line = program(build, capsys).stderr.splitlines()[0]
    assert line.startswith("skipped 49 files: m/a01.txt (a copy: of a00.txt), m/a02.txt (")
    assert line.endswith(" and 46 more; see manifest.json")


def test_an_output_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    for out in ("loop/new", "file/new", "/dev/full", "n" * 300):
        ended = program(("data", "synth", "key-recall", "--streams", "1", "--out", out), capsys)
        assert ended.returncode == 2, out
        assert ended.stderr.startswith(f"{out}: ")
        assert len(ended.stderr.splitlines()) == 1, ended.stderr
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]
