"""Tokens of text made ahead: those of the text itself, the same with any number of processes, and whole or absent."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.in_process import program
from tests.support.ranks import children, wait_for_end
from tests.support.runs import ROOT, command, fresh, losses, overrides, train, write_tiny_config
from tests.support.streams import write_arrow
from trainer.config.data_tables import DataTable, SourceTable
from trainer.data import ReadOptions, load_documents
from trainer.data.documents import HEADER, MAGIC
from trainer.data.groups import CutOptions, open_stream
from trainer.data.layout import Stream, discover_direct, discover_nested
from trainer.data.weights import ConstantWeight
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.lab import tokenized
from trainer.lab.loss_mask import LossMask
from trainer.lab.tokenized import tokenize_files, tokenize_source
from trainer.lab.tokenizer_json import load_tokenizer
from trainer.tools.read_step import find_origin
from trainer.training.plan import Source

tokenizers = pytest.importorskip("tokenizers", reason="extra tokenizers")
TEXTS = [f"document {i}: " + "ünï " * (i % 7) + "word " * (i * 37 % 211) for i in range(300)]


def save_words(path, texts):
    """A tokenizer.json that was trained on these texts."""
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    words.train_from_iterator(texts, trainer)
    words.save(str(path))


@pytest.fixture
def source(tmp_path):
    """A corpus of three formats, with `tokenizer.json` beside it."""
    save_words(tmp_path / "tokenizer.json", TEXTS)
    for modality in ("prose", "code"):
        (tmp_path / "text" / modality).mkdir(parents=True)
    lines = "".join(json.dumps({"text": text}) + "\n" + "\n" * (i % 3) for i, text in enumerate(TEXTS))
    (tmp_path / "text" / "prose" / "a.jsonl").write_text(lines)
    (tmp_path / "text" / "code" / "a.txt").write_text("\n\n".join(TEXTS[:50]))
    (tmp_path / "text" / "code" / "a.md").write_text(TEXTS[5])
    return tmp_path


@pytest.fixture
def in_threads(monkeypatch):
    """The work in threads: a process takes long to start."""
    monkeypatch.setattr(
        tokenized, "ProcessPoolExecutor", lambda workers, _, **begin: ThreadPoolExecutor(workers, **begin)
    )
    monkeypatch.setattr(tokenized, "_end_with_parent", lambda: None)
    monkeypatch.setattr(tokenized.signal, "signal", lambda *_: None)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def contents(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.rglob("*")) if path.suffix in (".bin", ".idx")}


def documents(path, words):
    text_split = "blank_line" if path.suffix in (".txt", ".md") else "file"
    table = load_documents(path, ReadOptions(words, text_split=text_split))
    return [table.read(i, 0, int(length)).tolist() for i, length in enumerate(table.lengths)]


def write(source, out, workers=1, look=lambda: None):
    """Tokenize the texts into a directory: the files, by name."""
    (source / out).mkdir(exist_ok=True)
    texts = sorted(path for path in (source / "text").rglob("*") if path.is_file())
    files = {str(path): source / out / f"{path.name}.bin" for path in texts}
    options = ReadOptions(load_tokenizer(str(source / "tokenizer.json")), text_split="blank_line")
    tokenize_files(files, options, workers=workers, look=look)
    return texts


def test_tokens_are_those_of_the_text_whatever_the_processes(source, request):
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    parquet.write_table(pyarrow.table({"text": TEXTS}), source / "text" / "prose" / "b.parquet", row_group_size=40)
    words = load_tokenizer(str(source / "tokenizer.json"))
    for path in write(source, "out", workers=2):
        assert documents(source / "out" / f"{path.name}.bin", words) == documents(path, words)
    assert len(list((source / "out").iterdir())) == 2 * 4
    request.getfixturevalue("in_threads")
    write(source, "again")
    assert contents(source / "again") == contents(source / "out")


def test_a_killed_call_takes_its_processes_with_it_and_is_gone_on_with(source, in_threads):
    write(source, "whole")
    script = source / "call.py"
    script.write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from tests.lab.data.test_tokenize import write\n"
        "if __name__ == '__main__':\n"
        f"    write(Path({str(source)!r}), 'out', look=lambda: time.sleep(600))\n"  # killed in its midst
    )
    with subprocess.Popen([sys.executable, script], env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        while process.poll() is None and not list((source / "out").glob("*.idx")):
            time.sleep(0.01)
        workers = children(process.pid)
        process.kill()
        process.wait()
    wait_for_end(workers)
    assert workers
    kept = {path: path.stat().st_mtime_ns for path in (source / "out").glob("*.idx")}
    write(source, "out")
    assert contents(source / "out") == contents(source / "whole")
    assert kept.items() <= {path: path.stat().st_mtime_ns for path in (source / "out").glob("*.idx")}.items()


@pytest.fixture
def once(source, monkeypatch):
    """Calls for the tokens of the corpus as a run does: their files."""
    monkeypatch.setattr(tokenized, "LEAST_BYTES", 1)
    table = SourceTable(name="s", root=str(source / "text"), text_split="blank_line")
    data = DataTable(source=[table], tokenizer=str(source / "tokenizer.json"), cache_dir=str(source / "cache"))
    plan = SimpleNamespace(config=SimpleNamespace(data=data), tokenizer=load_tokenizer(data.tokenizer))

    def call():
        given = Source("s", table, ConstantWeight(1.0), discover_nested(table.root))
        return [Path(path) for path in tokenize_source(plan, given, RankInfo()).values()]

    return call


def test_tokens_keep_which_of_them_are_trained_and_have_a_key_of_their_own(source, in_threads, monkeypatch):
    monkeypatch.setattr(tokenized, "LEAST_BYTES", 1)
    path, words, places = source / "text" / "prose" / "a.jsonl", load_tokenizer(str(source / "tokenizer.json")), set()
    path.write_text("".join(json.dumps({"text": t, "a": [[2, 9]], "b": [[0, len(t)]]}) + "\n" for t in TEXTS))
    for mask in (None, "a", "b"):
        table = SourceTable(name="s", paths=[str(path)], loss_mask=mask)
        data = DataTable(source=[table], tokenizer=str(source / "tokenizer.json"), cache_dir=str(source / "cache"))
        plan = SimpleNamespace(config=SimpleNamespace(data=data), tokenizer=words)
        (stream,), read = discover_direct([path]), ReadOptions(words, loss_mask=mask and LossMask(mask))
        (tokens,) = tokenize_source(plan, Source("s", table, ConstantWeight(1.0), [stream]), RankInfo()).values()
        places.add(tokens)
        opened = open_stream(replace(stream, tokens=tokens), read, CutOptions("s", 16)).documents
        assert opened.tokens.tolist() == load_documents(path, read).tokens.tolist()
    assert len(places) == 3


@pytest.mark.parametrize("vocab_size", [0, 300])
def test_what_cannot_be_mapped_is_copied_once_with_any_tokenizer(tmp_path, in_threads, monkeypatch, vocab_size):
    monkeypatch.setattr(tokenized, "LEAST_BYTES", 1)
    (tmp_path / "root" / "m").mkdir(parents=True)
    columns = {"tokens": [[1, 299], [2], []]} if vocab_size else {"text": TEXTS}
    lines = "".join(json.dumps({name: value}) + "\n" for name in columns for value in columns[name]).encode()
    for name, content in (("a.jsonl", lines), ("b.jsonl.gz", gzip.compress(lines))):
        (tmp_path / "root" / "m" / name).write_bytes(content)
    write_arrow(tmp_path / "root" / "m" / "c.arrow", columns)
    table = SourceTable(name="s", root=str(tmp_path / "root"))
    name = "ids" if vocab_size else "bytes"
    data = DataTable(source=[table], tokenizer=name, vocab_size=vocab_size, cache_dir=str(tmp_path / "cache"))
    words = load_tokenizer(name, vocab_size=vocab_size)
    plan = SimpleNamespace(config=SimpleNamespace(data=data), tokenizer=words)
    given = Source("s", table, ConstantWeight(1.0), discover_nested(table.root))
    for _ in range(2):
        made = {Path(path).name: Path(tokens) for path, tokens in tokenize_source(plan, given, RankInfo()).items()}
    assert made.keys() == {"b.jsonl.gz", "c.arrow"}
    for path in made.values():
        assert documents(path, words) == documents(tmp_path / "root" / "m" / "a.jsonl", words)


def test_once_a_full_disk_has_room_the_tokens_are_made_and_then_kept_until_a_file_changes(
    source, in_threads, once, monkeypatch
):
    def write_index(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(tokenized, "write_index", write_index)
        with pytest.raises(UserError, match=f"delete what no run reads in {source}/cache"):
            once()
    files = once()
    made = [path.stat().st_mtime_ns for path in files]
    assert once() == files
    with monkeypatch.context() as patch:  # another user's, which this one may only read
        patch.setattr(tokenized, "open_plain", write_index)
        assert once() == files
    assert [path.stat().st_mtime_ns for path in files] == made
    (source / "text" / "code" / "a.md").write_text("another one")
    assert not set(once()) & set(files)


def test_a_damaged_entry_is_made_again(source, in_threads, once):
    (source / "text" / "prose" / "empty.jsonl").write_text('{"text": ""}\n')
    place = once()[0].parent
    whole = contents(place)
    (place / "000001.idx").write_bytes(HEADER.pack(MAGIC, 1, 8, 2**64 - 1, 2**64 - 1))
    assert [path.name for path in once() if path.parent == place] == ["000000.bin", "000001.bin", "000002.bin"]
    assert contents(place) == whole
    os.truncate(place / "000001.bin", 10)  # under a run that has looked
    stream = Stream(0, "a.jsonl", "a.jsonl", "prose", tokens=str(place / "000001.bin"))
    with pytest.raises(UserError, match=f"{place}/000001.idx: .*; delete {place}: a run makes it again"):
        open_stream(stream, ReadOptions(load_tokenizer(str(source / "tokenizer.json"))), CutOptions("s", 8))


def test_a_lost_process_is_an_error_that_says_so(source, once, monkeypatch):
    monkeypatch.setattr(tokenized, "_begin", os.abort)
    with pytest.raises(UserError, match="a process ended"):
        once()


def test_the_verb_makes_what_a_run_reads(source, in_threads, monkeypatch, capsys):
    monkeypatch.setattr(tokenized, "LEAST_BYTES", 1000)
    config, cache = write_tiny_config(source), source / "cache"
    (source / "small.jsonl").write_text('{"text": "a"}\n{"tokens": [3, 1]}')
    small = f'eval.source=[{{name="small", paths=["{source}/small.jsonl"]}}]'
    values = (f"data.tokenizer={source}/tokenizer.json", f"data.cache_dir={cache}", small)
    given = ["--config", config, *overrides(*values, "distributed={strategy='hsdp', replicas=2}")]
    ended = program(["data", "tokenize", *given], capsys)
    assert (ended.returncode, "source first: tokens of " in ended.stderr) == (0, True), ended.stderr
    made = {path: path.stat().st_mtime_ns for path in cache.rglob("*.bin")}
    assert made
    assert program(["data", "tokenize", *given], capsys).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.bin")} == made
    of_run = ["check", "--no-contract", "--config", config, *overrides(*values, "distributed.shards=2")]
    (source / "config.resolved.toml").write_text(program(of_run, capsys).stdout)
    (source / "metrics.jsonl").touch()
    shards = find_origin(source, 1, trust_code=False).blends
    assert len(shards) == 2
    for each in shards:  # documents are dealt by the sizes of the files that are read
        assert {stream.tokens for stream in each.sources[0].dataset.streams} <= {*map(str, made)}
    ended = program(["data", "tokenize", "--config", config], capsys)
    assert (ended.returncode, "name a tokenizer.json" in ended.stderr) == (2, True)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of a run on more text than is tokenized where it is read, with a tokenizer.json."""
    path = write_tiny_config(tmp_path)
    lines = "".join(f"{json.dumps({'text': f'line {i} of some words ' * 20})}\n" for i in range(2500))
    for number in range(4):
        (tmp_path / "corpus" / "a" / f"stream{number}.jsonl").write_text(lines)
    save_words(tmp_path / "tokenizer.json", ["line of some words"])
    path.write_text(path.read_text().replace("[data]\n", f'[data]\ntokenizer = "{tmp_path}/tokenizer.json"\n'))
    return path


@pytest.mark.distributed
@pytest.mark.parametrize("nproc", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_one_process_tokenizes_for_all_runs_and_says_so(config: Path, nproc: int | None) -> None:
    cached = {"XDG_CACHE_HOME": str(config.parent / "cache")}
    line = ("--config", config, "--run-dir", config.parent / "first", "--steps", 3)
    first = fresh(command(line, nproc=nproc), **cached)
    assert first.returncode == 0, first.stderr
    assert first.stderr.count("INFO tokenizing source first (") == 1, first.stderr
    assert "tokenizing source second" not in first.stderr  # little text
    # A process of the tests' server may have no others: it reads what is there, or tokenizes what it reads.
    assert "tokenizing" not in train(config, config.parent / "again", "train.steps=3", nproc=nproc, extra=cached)
    train(config, config.parent / "whole", "train.steps=3", nproc=nproc)
    first, again, whole = (losses(config.parent / name / "metrics.jsonl") for name in ("first", "again", "whole"))
    assert first == again == whole
    assert len(whole) == 3
    for name, extra in (("ended", cached), ("ended_whole", {})):
        train(config, config.parent / name, "train.steps=3", "data.eod=7", nproc=nproc, extra=extra)
    ended, whole = (losses(config.parent / name / "metrics.jsonl") for name in ("ended", "ended_whole"))
    assert ended == whole != first, "those of the cache are without the id that ends documents"
