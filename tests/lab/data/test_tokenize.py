"""`train data tokenize`: the tokens of the text itself, the same with any number of processes, and whole or absent."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.ranks import children, wait_for_end
from tests.support.runs import ROOT
from trainer.config.data_tables import DataTable, SourceTable
from trainer.data import open_documents
from trainer.data.tokenizer import load_tokenizer
from trainer.data.weights import ConstantWeight
from trainer.errors import UserError
from trainer.lab import tokenized as pool
from trainer.tools.corpus import tokens as module
from trainer.tools.corpus.documents import discover
from trainer.tools.corpus.tokens import tokenize
from trainer.training.setup.sources import Source

tokenizers = pytest.importorskip("tokenizers", reason="extra tokenizers")
TEXTS = [f"document {i}: " + "ünï " * (i % 7) + "word " * (i * 37 % 211) for i in range(300)]


@pytest.fixture
def source(tmp_path):
    """A corpus of three formats, with `tokenizer.json` beside it."""
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    words.train_from_iterator(TEXTS, trainer)
    words.save(str(tmp_path / "tokenizer.json"))
    for modality in ("prose", "code"):
        (tmp_path / "text" / modality).mkdir(parents=True)
    lines = "".join(json.dumps({"text": text}) + "\n" + "\n" * (i % 3) for i, text in enumerate(TEXTS))
    (tmp_path / "text" / "prose" / "a.jsonl").write_text(lines)
    (tmp_path / "text" / "code" / "a.txt").write_text("\n\n".join(TEXTS[:50]))
    (tmp_path / "text" / "code" / "a.md").write_text(TEXTS[5])
    return tmp_path


def run(source, out, **settings):
    given = {"tokenizer": str(source / "tokenizer.json"), "span_bytes": 3000, "text_split": "blank_line", **settings}
    return tokenize(discover([str(source / "text")]).streams, source / out, **given)


@pytest.fixture
def in_threads(monkeypatch):
    """The work in threads: a process takes long to start."""
    monkeypatch.setattr(pool, "ProcessPoolExecutor", lambda workers, _, **begin: ThreadPoolExecutor(workers, **begin))
    monkeypatch.setattr(pool, "_end_with_parent", lambda: None)
    monkeypatch.setattr(pool.signal, "signal", lambda *_: None)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def contents(directory):
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != module.RECORD)
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def documents(path, words):
    table = open_documents(path, tokenizer=words, text_split="blank_line" if path.suffix in (".txt", ".md") else "file")
    return [table.read(i, 0, int(length)).tolist() for i, length in enumerate(table.lengths)]


def test_tokens_are_those_of_the_text_whatever_the_number_of_processes(source, request):
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    parquet.write_table(pyarrow.table({"text": TEXTS}), source / "text" / "prose" / "b.parquet", row_group_size=40)
    found = run(source, "out", workers=2)
    assert (found.files, found.documents, found.kept_files) == (4, 651, 0)
    words = load_tokenizer(str(source / "tokenizer.json"))
    names = ["code/a.md", "code/a.txt", "prose/a.jsonl", "prose/b.parquet"]
    assert list(contents(source / "out")) == sorted(f"{name}.{end}" for name in names for end in ("bin", "idx"))
    expected = {name: documents(source / "text" / name, words) for name in names}
    assert {name: documents(source / "out" / f"{name}.bin", words) for name in names} == expected
    assert found.tokens == sum(len(each) for tokens in expected.values() for each in tokens)
    request.getfixturevalue("in_threads")
    run(source, "again", workers=1, span_bytes=100_000)
    assert contents(source / "again") == contents(source / "out")


def test_a_killed_call_takes_its_processes_with_it_and_is_gone_on_with(source, in_threads):
    settings = {"span_bytes": 3000, "text_split": "blank_line", "workers": 1}
    run(source, "whole", **settings)
    script = source / "call.py"
    script.write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from trainer.lab import tokenized as pool\n"
        "from trainer.tools.corpus.tokens import tokenize\n"
        "from trainer.tools.corpus.documents import discover\n"
        "pool._join = lambda *_: time.sleep(600)\n"  # it is killed in the middle of its work
        "if __name__ == '__main__':\n"
        f"    tokenize(discover(['text']).streams, Path('out'), tokenizer='tokenizer.json', **{settings})\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, script], env=environment, cwd=source) as process:
        parts = source / "out" / module.PARTS
        while process.poll() is None and len(list(parts.glob("*.npy"))) < 3:
            time.sleep(0.01)
        with pytest.raises(UserError, match="is in use by another train data tokenize"):
            run(source, "out", **settings)
        workers = children(process.pid)
        process.kill()
        process.wait()
    wait_for_end(workers)
    assert workers
    assert len(list(parts.glob("*.npy"))) >= 3
    (source / "out" / "code").mkdir(exist_ok=True)
    (source / "out" / "code" / ".a.md.bin.1234567.tmp").touch()  # what a kill in the middle of a write leaves behind
    assert run(source, "out", **settings).documents == 300 + 50 + 1
    assert contents(source / "out") == contents(source / "whole")
    assert run(source, "out", **settings).kept_files == 3


@pytest.mark.parametrize("paths", [["text"], ["text/**/*.jsonl", "text/**/*.txt", "text/**/*.md"]])
def test_an_added_or_changed_file_is_tokenized_alone_wherever_it_lies(source, in_threads, monkeypatch, paths):
    """Names of outputs do not hang on which files there are: an added one must not move the common directory of all."""
    monkeypatch.chdir(source)
    deep = source / "text" / "prose" / "deep"
    deep.mkdir()
    for path in [*(source / "text" / "code").iterdir(), source / "text" / "prose" / "a.jsonl"]:
        path.rename(deep / path.name)

    def made():
        found = tokenize(discover(paths).streams, source / "out", tokenizer="tokenizer.json", workers=1)
        return found.kept_files, {path: path.stat().st_mtime_ns for path in (source / "out").rglob("*.bin")}

    _, before = made()
    (source / "text" / "code" / "new.txt").write_text("another text")
    kept, now = made()
    assert (kept, len(now)) == (3, 4)
    assert {path: now.get(path) for path in before} == before
    assert [path.name for path in now.keys() - before.keys()] == ["new.txt.bin"]
    (deep / "a.md").write_text("another one")
    _, then = made()
    assert [path.name for path in now if then[path] != now[path]] == ["a.md.bin"]


def test_once_a_full_disk_has_room_what_is_missing_or_cut_is_made(source, in_threads, monkeypatch, caplog):
    """Before a run, into the cache; on a full disk the run reads the text, and has the room for itself."""
    table = SourceTable(name="s", root=str(source / "text"), text_split="blank_line")
    data = DataTable(source=[table], tokenizer=str(source / "tokenizer.json"), cache_dir=str(source / "cache"))
    given = Source("s", table, ConstantWeight(1.0), discover([table.root]).streams)
    plan, info = SimpleNamespace(config=SimpleNamespace(data=data)), SimpleNamespace(local_rank=0)

    def once():
        return [Path(each.tokens) for each in pool._tokenized(plan, info, lambda: False, given).streams]

    def write_index(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pool, "LEAST_BYTES", 1)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "write_index", write_index)
        assert once() == [Path()] * 3
    assert f"delete what no run reads in {source}/cache" in caplog.text
    assert [path.suffix for path in (source / "cache").iterdir()] == [".lock"]
    files = once()
    whole, kept = contents(source / "cache"), files[2].stat().st_mtime_ns
    os.truncate(files[0], 10)
    files[1].with_suffix(".idx").unlink()
    assert once() == files
    assert (contents(source / "cache"), files[2].stat().st_mtime_ns) == (whole, kept)


def test_two_files_never_get_one_name(source, in_threads, monkeypatch):
    monkeypatch.chdir(source)
    for name in ("one", "two"):
        shutil.copytree("text", f"all/{name}")
    with pytest.raises(UserError, match=r"code/a.md.bin would hold both all/one/code/a.md and all/two/code/a.md"):
        tokenize(discover(["all/one/code/*.*", "all/two/code/*.*"]).streams, source / "out", tokenizer="bytes")
    assert not (source / "out").exists()
    assert tokenize(discover(["all/*/code/*.md"]).streams, source / "out", tokenizer="bytes").files == 2


def test_a_lost_process_is_an_error_that_says_so(source, monkeypatch):
    monkeypatch.setattr("trainer.lab.tokenized._begin", os.abort)
    with pytest.raises(UserError, match="a process ended"):
        run(source, "out")


def test_what_would_mix_tokens_of_two_kinds_is_refused(source, in_threads):
    run(source, "out")
    with pytest.raises(UserError, match=r"holds tokens of other files or settings \(text_split\)"):
        run(source, "out", text_split="file")
    with pytest.raises(UserError, match=r"other files or settings \(tokenizer\)"):
        run(source, "out", tokenizer="bytes")
    (source / "text" / "code" / "a.md").unlink()
    with pytest.raises(UserError, match=r"other files or settings \(code/a.md.bin\)"):
        run(source, "out")
    for end in ("bin", "idx"):
        (source / "out" / "code" / f"a.md.{end}").unlink()
    assert run(source, "out").files == 2
    (source / "other").mkdir()
    (source / "other" / "file").touch()
    with pytest.raises(UserError, match="is not empty"):
        run(source, "other")
    with pytest.raises(UserError, match=r"text/tokens: lies in .*text, where the text is"):
        run(source, "text/tokens")
    np.save(source / "text" / "code" / "ids.npy", np.arange(5))
    with pytest.raises(UserError, match="is of the format npy, which cannot be tokenized"):
        run(source, "new")
