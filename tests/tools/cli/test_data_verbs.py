"""`train data verify` and what makes corpora."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import numpy as np
import pytest

from tests.support.forks import Forked
from tests.support.in_process import program
from tests.support.runs import TIMEOUT_SEC, environment, make_corpus
from tests.support.terminal import Terminal


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


def test_verify_compares_a_built_corpus_with_its_manifest(tmp_path, data):
    for number in range(3):
        (tmp_path / f"{number}.md").write_text(f"Text number {number}.\n" * 20)
    corpus = tmp_path / "corpus"
    built = data("build", "text", "--out", corpus, "--modality", f"prose={tmp_path}/*.md")
    assert built.returncode == 0, built.stderr
    result = data("verify", corpus)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("no damage, hashes as in manifest.json\n")

    stream = next((corpus / "prose").iterdir())
    whole = stream.read_bytes()
    stream.write_bytes(whole.replace(b"number 1", b"number 7", 1))  # still good JSON, of the same size
    (corpus / "prose" / "new.txt").write_text("more")
    lines = data("verify", corpus).stderr.splitlines()
    assert [line.split(": ")[0] for line in lines] == [str(stream), f"{corpus}/prose/new.txt"]
    stream.unlink()
    result = data("verify", corpus)
    assert result.returncode == 2
    assert f"{stream}: is in manifest.json, but not here" in result.stderr


def test_mistakes_are_one_line(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    for path, message in (("nowhere", "nowhere: no such file or directory"), (".", ".: has no stream files")):
        result = data("verify", path)
        assert (result.returncode, message in result.stderr, result.stderr.count("\n")) == (2, True, 1)


def test_a_terminal_gets_a_progress_bar_on_stderr(corpus, tmp_path):
    terminal, out = Terminal(), tmp_path / "out"
    env = environment({"TERM": "xterm"})
    verify = Forked(["data", "verify", corpus], env, cwd=tmp_path, out=out, err=terminal.path)
    assert verify.wait(TIMEOUT_SEC) == 0
    assert out.read_text().count("\n") == 1
    assert "4/4" in terminal.text()


def test_skipped_files_are_counted_by_reason(tmp_path, capsys):
    for number in range(50):
        (tmp_path / f"a{number:02d}.txt").write_text("the same")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    build = ["data", "build", "text", "--out", tmp_path / "out", "--modality", f"m={tmp_path}/*.txt"]
    line = program(build, capsys).stderr.splitlines()[0]
    copies = "m/a01.txt, m/a02.txt, m/a03.txt and 46 more (the same text)"
    assert line.startswith(f"skipped 50 files: {copies}; m/b.txt (not UTF-8); ")


BUILDS = {
    "build": ("data", "build", "text", "--modality", "prose=text/**/*.txt"),
    "tokenize": ("data", "tokenize", "text", "--tokenizer", "bytes", "--workers", "1"),
    "synth": ("data", "synth", "key-recall", "--streams", "1"),
}


@pytest.fixture
def text(tmp_path: Path, monkeypatch) -> Path:
    """A working directory with `text/prose/a.txt`."""
    (tmp_path / "text" / "prose").mkdir(parents=True)
    (tmp_path / "text" / "prose" / "a.txt").write_text("Some words. " * 20_000)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("verb", BUILDS)
def test_an_output_that_cannot_be_written_is_one_line(text, capsys, verb):
    (text / "loop").symlink_to("loop")
    (text / "file").write_text("")
    for out, says in (("loop/new", "loop"), ("file/new", "file"), ("/dev/full", "/dev/full: "), ("n" * 300, "nnn")):
        ended = program((*BUILDS[verb], "--out", out), capsys)
        assert ended.returncode == 2, out
        assert says in ended.stderr.partition(": ")[0] + ": "
        assert len(ended.stderr.splitlines()) == 1, ended.stderr
        assert sorted(path.name for path in text.iterdir()) == ["file", "loop", "text"]


@pytest.mark.parametrize("verb", ["build", "tokenize"])
def test_a_full_disk_is_one_line_and_the_next_call_makes_what_a_first_one_would(text, capsys, verb):
    """The limit on the size of a file has the kernel refuse a write in its midst, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    try:
        full = program((*BUILDS[verb], "--out", "full"), capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert full.returncode == 2
    assert full.stderr.splitlines()[-1].startswith("full: cannot be used (File too large); "), full.stderr
    assert "Traceback" not in full.stderr
    made = []
    for name in ("full", "fresh"):
        assert program((*BUILDS[verb], "--out", name), capsys).returncode == 0
        files = [path for path in (text / name).rglob("*") if path.is_file()]
        made.append({path.relative_to(text / name): path.read_bytes() for path in files})
    assert made[0] == made[1]
