"""`train data inspect` and `train data verify`, as real processes."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.support.in_process import program
from tests.support.runs import command, environment, make_corpus, run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), streams=2, documents=5)


def texts(corpus: Path, modality: str) -> list[bytes]:
    lines = [line for path in sorted((corpus / modality).iterdir()) for line in path.read_text().splitlines()]
    return [json.loads(line)["text"].encode() for line in lines]


def test_inspect_counts_what_is_there(corpus: Path) -> None:
    inspecting = ("data", "inspect", corpus, "--json", "--seq-len", "16", "--max-group-cells", "4")
    result = run(*inspecting)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert found["layout"] == "nested"
    every = b""
    for modality in ("a", "b"):
        documents = texts(corpus, modality)
        cells = [-(-len(text) // 16) for text in documents]
        tokens = sum(map(len, documents))
        expected = {
            "streams": 2,
            "documents": 10,
            "empty_documents": 0,
            "tokens": tokens,
            "groups": sum(-(-c // 4) for c in cells),
            "cells": sum(cells),
            "padding_share": pytest.approx(1 - tokens / (16 * sum(cells))),
        }
        facts = dict(found["modalities"][modality])
        packed = facts.pop("packed_cells")
        assert facts.pop("packed_padding_share") == pytest.approx(1 - tokens / (16 * packed))
        assert facts == expected
        assert packed <= sum(cells)
        every += b"".join(documents)
    assert found["totals"]["tokens"] == len(every) == sum(stream["tokens"] for stream in found["streams"])
    assert [stream["stream"] for stream in found["streams"]][:2] == ["a/stream0.jsonl", "a/stream1.jsonl"]
    assert {stream["format"] for stream in found["streams"]} == {"jsonl"}
    histogram = found["histogram"]
    spaces = every.count(b" ")
    assert histogram["types"]["space"] == {"tokens": spaces, "share": pytest.approx(spaces / len(every))}
    assert histogram["types"]["letter"]["tokens"] == len(every) - spaces
    assert histogram["top_ids"][0] == {
        "id": 32,
        "text": " ",
        "tokens": spaces,
        "share": pytest.approx(spaces / len(every)),
    }
    assert histogram["distinct_ids"] == len(set(every))


def test_inspect_draws_tables_that_say_the_same(corpus: Path) -> None:
    result = run("data", "inspect", corpus, "--seq-len", "16")
    assert result.returncode == 0, result.stderr
    assert "layout nested; cells of 16 tokens, at most 64 a group" in result.stdout
    for word in ("modality", "if packed", "letter", "32 ' '", "all"):
        assert word in result.stdout
    tokens = sum(len(text) for modality in "ab" for text in texts(corpus, modality))
    assert f"{tokens:,}" in result.stdout


def test_inspect_reads_files_and_globs_of_any_format(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    np.array([1, 2, 0, 3, 0], dtype=np.uint16).tofile(tmp_path / "x" / "a.bin")
    np.save(tmp_path / "x" / "b.npy", np.array([9, 9, 0]))
    arguments = ("--tokenizer", "ids", "--vocab-size", "10", "--dtype", "uint16", "--eod", "0", "--json")
    for paths in ([tmp_path / "x"], [tmp_path / "x" / "a.bin", tmp_path / "x" / "*.npy"]):
        result = run("data", "inspect", *paths, *arguments)
        assert result.returncode == 0, result.stderr
        found = json.loads(result.stdout)
        assert (found["layout"], list(found["modalities"])) == ("direct", ["x"])
        assert [(s["format"], s["documents"], s["tokens"]) for s in found["streams"]] == [("bin", 2, 5), ("npy", 1, 3)]
        assert found["histogram"]["types"] == {}
        assert found["histogram"]["top_ids"][0] == {"id": 0, "text": "0", "tokens": 3, "share": pytest.approx(3 / 8)}


@pytest.mark.parametrize("verb", [("data", "inspect"), ("data", "verify"), ("init",)])
def test_options_that_no_file_heeds_are_refused(corpus: Path, tmp_path: Path, verb: tuple[str, ...]) -> None:
    out = ("--out", str(tmp_path / "x.toml")) if verb == ("init",) else ()
    result = run(*verb, corpus, "--eod", "0", *out)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == "eod: is 0, but there are no npy or bin files; remove it"


def test_verify_says_that_all_is_well(corpus: Path) -> None:
    tokens = sum(len(text) for modality in "ab" for text in texts(corpus, modality))
    result = run("data", "verify", corpus)
    assert (result.returncode, result.stdout) == (0, f"4 streams, 20 documents, {tokens:,} tokens: no damage\n")
    assert result.stderr == ""


def test_verify_reports_every_damaged_file_on_a_line_and_exits_with_2(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus", streams=3, documents=4)
    with (corpus / "a" / "stream1.jsonl").open("a") as file:
        file.write('{"text": ')
    (corpus / "b" / "stream0.jsonl").write_bytes(b"")
    (corpus / "b" / "c.bin").write_bytes(b"123")
    result = run("data", "verify", corpus, "--dtype", "uint16")
    assert result.returncode == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 3, result.stderr
    assert lines[0].startswith(f"{corpus}/a/stream1.jsonl: line 5: is not JSON")
    assert lines[1].startswith(f"{corpus}/b/c.bin: ends in the middle of a token")
    assert lines[2].startswith(f"{corpus}/b/stream0.jsonl: the file is empty")
    inspected = run("data", "inspect", corpus, "--dtype", "uint16")
    assert (inspected.returncode, inspected.stderr.splitlines()) == (2, lines[:1])


def test_verify_compares_a_built_corpus_with_its_manifest(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.md").write_text(f"Text number {number}.\n" * 20)
    corpus = tmp_path / "corpus"
    built = run("data", "build", "text", "--out", corpus, "--modality", f"prose={tmp_path}/*.md")
    assert built.returncode == 0, built.stderr
    result = run("data", "verify", corpus)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("no damage, hashes as in manifest.json\n")

    stream = next((corpus / "prose").iterdir())
    whole = stream.read_bytes()
    stream.write_bytes(whole.replace(b"number 1", b"number 7", 1))  # still good JSON, of the same size
    (corpus / "prose" / "new.txt").write_text("more")
    lines = run("data", "verify", corpus).stderr.splitlines()
    assert [line.split("; ")[0] for line in lines] == [
        f"{stream}: differs from what manifest.json says",
        f"{corpus}/prose/new.txt: is not in manifest.json",
    ]
    stream.unlink()
    result = run("data", "verify", corpus)
    assert result.returncode == 2
    assert f"{stream}: is in manifest.json, but not here" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "nowhere"], "nowhere: no such file or directory"),
        (["verify", "."], ".: has no stream files"),
        (["inspect"], "Missing argument"),
        (["verify", "x.txt", "--tokenizer", "words"], "data.tokenizer: must be"),
        (["inspect", "x.txt", "--format", "xml"], "format: must be one of auto, text"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if "x.txt" in arguments:
        (tmp_path / "x.txt").write_text("text")
    result = program(["data", *arguments], capsys)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1, result.stderr


def test_a_terminal_gets_a_progress_bar_on_stderr(corpus: Path) -> None:
    parent, child = pty.openpty()
    process = subprocess.Popen(
        command(["data", "verify", corpus]), env=environment({"TERM": "xterm"}), stdout=subprocess.PIPE, stderr=child
    )
    os.close(child)
    shown = b""
    try:
        while block := os.read(parent, 4096):
            shown += block
    except OSError:  # the other end of a terminal was closed
        pass
    out, _ = process.communicate(timeout=240)
    os.close(parent)
    assert process.returncode == 0
    assert out.decode().count("\n") == 1
    assert b"4/4" in shown


def test_skipped_files_are_a_count_and_three_examples(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for number in range(40):
        (tmp_path / "in" / f"bad{number:02d}.txt").write_bytes(b"\xff")
    (tmp_path / "in" / "good.txt").write_text("a text")
    loop = tmp_path / "in" / "loop"
    loop.symlink_to(tmp_path / "in")
    ended = program(
        ["data", "build", "text", "--out", tmp_path / "out", "--modality", f"m={tmp_path}/in/**/*.txt"], capsys
    )
    assert ended.returncode == 0
    assert len(ended.stderr.splitlines()) == 3
    assert ended.stderr.startswith("skipped 40 files: m/bad00.txt (not UTF-8: byte 0xff at offset 0), m/bad01.txt (")
    assert "m/bad02.txt (not UTF-8: byte 0xff at offset 0) and 37 more; the manifest lists them all" in ended.stderr


def test_lost_files_come_before_copies(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for number in range(50):
        (tmp_path / "in" / f"a{number:02d}.txt").write_text("the same")
    for number in range(3):
        (tmp_path / "in" / f"b{number}.txt").write_bytes(b"\xff")
    (tmp_path / "in" / "c.txt").touch()
    (tmp_path / "in" / "d.txt").write_bytes(b"a\0b")
    build = ["data", "build", "text", "--out", tmp_path / "out", "--modality", f"m={tmp_path}/in/*.txt"]
    line = program(build, capsys).stderr.splitlines()[0]
    assert line == (
        "skipped 54 files: m/b0.txt (not UTF-8: byte 0xff at offset 0), m/b1.txt (not UTF-8: byte 0xff at offset 0), "
        "m/b2.txt (not UTF-8: byte 0xff at offset 0) and 51 more; the manifest lists them all"
    )


def test_verify_warns_of_text_files_that_are_not_text(tmp_path, capsys):
    (tmp_path / "good.txt").write_text("a text")
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "wide.txt").write_bytes("a text".encode("utf-16-le"))
    ended = program(["data", "verify", f"{tmp_path}/*.txt"], capsys)
    assert ended.returncode == 0
    assert "2 of 3 files are not UTF-8 text: " in ended.stderr
    assert "latin.txt (not UTF-8: byte 0xe9 at offset 3), " in ended.stderr
    assert "wide.txt (binary: a NUL byte at offset 1); a run would read the bytes as they are; convert" in ended.stderr
    assert "good.txt" not in ended.stderr
    assert not program(["data", "verify", tmp_path / "good.txt"], capsys).stderr


def test_blocks_of_a_text_file_are_documents_when_asked(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree\n")
    for given, documents in ((), 1), (("--text-split", "blank_line"), 3):
        ended = program(["data", "inspect", tmp_path / "a.txt", "--json", *given], capsys)
        assert json.loads(ended.stdout)["totals"]["documents"] == documents
        ended = program(["data", "verify", tmp_path / "a.txt", *given], capsys)
        assert f"{documents} documents" in ended.stdout


BUILDS = {
    "build": ("data", "build", "text", "--modality", "prose=text/**/*.txt"),
    "tokenize": ("data", "tokenize", "text", "--tokenizer", "bytes", "--workers", "1"),
    "synth": ("data", "synth", "key-recall", "--streams", "1"),
}


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with `text/prose/a.txt`."""
    (tmp_path / "text" / "prose").mkdir(parents=True)
    (tmp_path / "text" / "prose" / "a.txt").write_text("Some words. " * 20_000)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("verb", BUILDS)
@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("loop", "loop: "),
        ("loop/new", "loop"),
        ("file/new", "file"),
        ("/proc/new", "/proc/"),
        ("/dev/full", "/dev/full: "),
        ("n" * 300, "nnn"),
    ],
)
def test_an_output_that_cannot_be_written_is_one_line(
    text: Path, capsys: pytest.CaptureFixture[str], verb: str, out: str, says: str
) -> None:
    (text / "loop").symlink_to("loop")
    (text / "file").write_text("")
    ended = program((*BUILDS[verb], "--out", out), capsys)
    assert ended.returncode == 2
    assert says in ended.stderr.partition(": ")[0] + ": "
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert sorted(path.name for path in text.iterdir()) == ["file", "loop", "text"]


@pytest.mark.parametrize("verb", BUILDS)
def test_a_full_disk_is_one_line_and_the_next_call_makes_what_a_first_one_would(text: Path, verb: str) -> None:
    """The limit on the size of a file has the kernel refuse a write in its midst, as a full disk does."""

    def call(limit: str, out: str) -> subprocess.CompletedProcess[str]:
        arguments = shlex.join(command((*BUILDS[verb], "--out", out)))
        script = f"ulimit -f {limit}; exec {arguments}"
        return subprocess.run(["bash", "-c", script], text=True, capture_output=True, check=False, env=environment())

    full = call("64", "out")
    assert full.returncode == 2, full.stderr
    assert full.stderr.splitlines()[-1].startswith("out: cannot be written (File too large); make room"), full.stderr
    assert "Traceback" not in full.stderr
    for out in ("out", "fresh"):
        done = call("unlimited", out)
        assert done.returncode == 0, done.stderr
    out, fresh = (
        {path.relative_to(text / name): path.read_bytes() for path in (text / name).rglob("*") if path.is_file()}
        for name in ("out", "fresh")
    )
    assert out == fresh
