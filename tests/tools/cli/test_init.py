"""`train init` on data of every kind: what it writes is a config that checks and trains."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.core.data.test_formats import WRITERS
from tests.support.in_process import plan_of, program
from tests.support.runs import ROOT, losses, make_corpus, train
from tests.support.streams import write_megatron
from trainer.config.load import load_config
from trainer.data.formats import FORMATS
from trainer.errors import UserError
from trainer.tools.verbs.before_run import init

TEXT = "".join(
    (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("config.md", "training/METRICS_LOSSES.md")
)


def ids(count: int, largest: int, seed: int = 0) -> np.ndarray:
    """Skewed ids as of text; the largest occurs."""
    drawn = np.random.Generator(np.random.Philox(seed)).zipf(1.3, count) % largest
    drawn[-1] = largest
    return drawn


def text_folder(path: Path) -> str:
    for i in range(6):
        (path / f"part{i}.txt").write_text(TEXT[i * 4000 : (i + 1) * 4000], encoding="utf-8")
    return ""


def of_texts(suffix: str) -> Callable[[Path], str]:
    """Makes a file of paragraphs, and gives what names it in the folder."""

    def make(path: Path) -> str:
        WRITERS[suffix](path / f"all{suffix}", {"text": [paragraph for paragraph in TEXT.split("\n\n") if paragraph]})
        return f"/all{suffix}" if suffix == ".jsonl" else ""

    return make


def npy_files(path: Path) -> str:
    for shard in range(3):
        np.save(path / f"shard{shard}.npy", ids(9000, 1234, shard).astype(np.uint16))
    return ""


def bin_file(path: Path) -> str:
    ids(30000, 50256).astype("<u4").tofile(path / "tokens.bin")
    return "/*.bin"


def megatron(path: Path) -> str:
    write_megatron(path / "corpus.bin", [ids(int(n), 900, int(n)).tolist() for n in range(50, 450, 10)], dtype="int32")
    return ""


def compressed(path: Path) -> str:
    lines = (json.dumps({"text": paragraph}) for paragraph in TEXT.split("\n\n"))
    (path / "all.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return ""


def nested(path: Path) -> str:
    make_corpus(path)
    return ""


# Of every format.
KINDS = {
    "text": (text_folder, "direct", "bytes", 0),
    "jsonl": (of_texts(".jsonl"), "direct", "bytes", 0),
    "npy": (npy_files, "direct", "ids", 1235),
    "bin": (bin_file, "direct", "ids", 50257),
    "megatron": (megatron, "direct", "ids", 901),
    "parquet": (of_texts(".parquet"), "direct", "bytes", 0),
    "jsonl_compressed": (compressed, "direct", "bytes", 0),
    "arrow": (of_texts(".arrow"), "direct", "bytes", 0),
    "nested": (nested, "nested", "bytes", 0),
}
QUICK = ("npy", "nested")
assert KINDS.keys() >= FORMATS.keys()


# Every kind is read, checked and trained on; the ones that differ most in what is written stand in the short suite.
@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_a_starter_config_checks_and_trains(kind, tmp_path, monkeypatch):
    make, layout, tokenizer, vocab_size = KINDS[kind]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my data").mkdir()
    paths, dtype = ["my data" + make(tmp_path / "my data")], {"bin": "uint32"}.get(kind)
    if dtype:
        with pytest.raises(UserError, match="dtype: does not follow from "):
            init(paths)
    init(paths, out="x.toml", dtype=dtype)
    config = load_config("x.toml")
    source = config.data.source[0]
    found = ("nested" if source.root else "direct", config.data.tokenizer, config.data.vocab_size)
    assert found == (layout, tokenizer, vocab_size)
    plan_of(Path("x.toml"))
    assert config.data.mixing.batching_mode == "per_row"
    assert config.data.mixing.num_streams_mixed == 0
    assert (source.name, source.weight) == ("all" if kind == "jsonl" else "my-data", 1.0)
    small = ("model.dim=16", "scheduler.warmup_steps=1", "train.device=cpu", "metrics.log_interval=1")
    train(Path("x.toml"), Path("run"), *small, more=("--steps", 3), cwd=tmp_path)
    assert [*losses(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    """A folder of texts in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    text_folder(tmp_path / "data")
    return tmp_path / "data"


def test_without_out_it_prints_the_config_alone_and_the_editors_schema_lies_beside_a_file(data, tmp_path, capsys):
    printed = program(["init", "data"], capsys)
    assert printed.returncode == 0, printed.stderr
    assert "#:schema" not in printed.stdout
    assert not (tmp_path / "config.schema.json").exists()
    (tmp_path / "config.schema.json").write_text('{"$defs": {"BatchScheduleTable": "as it was"}}')
    written = program(["init", "data", "--out", "x.toml"], capsys)
    text = (tmp_path / "x.toml").read_text()
    assert text == "#:schema config.schema.json\n" + printed.stdout
    assert (tmp_path / "config.schema.json").read_text() == (ROOT / "docs" / "config.schema.json").read_text()
    assert "next: train check --config x.toml" in written.stderr
    again = program(["init", "data", "--out", "x.toml"], capsys)
    assert again.mistake == "x.toml: exists already; name another file, or add --force\n"
    (tmp_path / "config.schema.json").write_text("{}")  # not ours
    assert "config.schema.json: exists already" in program(["init", "data", "--out", "y.toml"], capsys).mistake


def test_what_cannot_be_one_run_is_refused(data, capsys):
    assert "nowhere: no such file or directory; check the path" in program(["init", "nowhere"], capsys).mistake
    odd = os.fsdecode(b"d\xff")
    Path(odd).symlink_to(data)
    assert program(["init", "data", odd], capsys).mistake.startswith("d\\xff: is not a name in UTF-8")
    unheeded = program(["init", "data", "--eod", "0"], capsys)
    assert unheeded.returncode == 2
    assert unheeded.stderr.splitlines()[-1] == "eod: is 0, but there are no npy or bin files; remove it"
    np.save(data / "ids.npy", ids(100, 50).astype(np.int64))
    assert "is text, and data/ids.npy holds token ids" in program(["init", "data"], capsys).mistake


def test_files_below_a_folder_that_cannot_be_read_are_not_passed_over_for_those_in_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("top.txt", "splits/dataset_dict.json", "splits/train/a.arrow", "splits/test/a.arrow"):
        path = Path("d", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEXT[:4000])
    assert "is a data set of splits" in program(["init", "d"], capsys).stderr


def test_text_files_that_are_not_text_are_noted(data, capsys):
    (data / "latin.txt").write_bytes(TEXT[:4000].encode() + b"caf\xe9")
    ended = program(["init", "data", "--force"], capsys)
    assert ended.returncode == 0, ended.stderr
    words = " ".join((ended.stdout + ended.stderr).split())
    assert "not UTF-8 text: 1 of 7 files, data/latin.txt (not UTF-8: byte 0xe9 at offset" in words


def test_why_nothing_is_evaluated_is_noted_where_no_document_can_be_held_out(data, capsys):
    assert "no [eval]" not in program(["init", "data"], capsys).stdout
    said = program(["init", "data/part0.txt"], capsys).stdout
    assert "no [eval]: it would hold out almost none of 1 document, or more than 30% of the text;" in said
    assert "\n[eval]" not in said


@pytest.mark.usefixtures("data")
def test_a_tokenizer_of_ones_own_is_named_in_the_config():
    tokenizers = pytest.importorskip("tokenizers")
    words = dict.fromkeys(["?", *TEXT.split()])
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="?")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save("words.json")
    init(["data"], out="x.toml", tokenizer="words.json")
    plan = plan_of(Path("x.toml"))
    assert plan.vocab_size == tokenizer.get_vocab_size() + 1
    assert plan.config.objective.token_types is False


def test_of_a_folder_of_code_the_verb_that_reads_the_rest_is_named(tmp_path, capsys):
    for name in ("setup.py", "package/__init__.py", "package/main.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(TEXT[:2000])
    ended = program(["init", tmp_path], capsys)
    said = (
        "does not read 2 files: package/__init__.py, setup.py; if they are text, train data build text does, whatever"
    )
    assert said in ended.stderr
    assert program(["data", "build", "text", "--out", tmp_path / "all", "--modality", f"all={tmp_path}/**/*"], capsys)
    manifest = json.loads((tmp_path / "all" / "manifest.json").read_text())
    assert (manifest["modalities"]["all"]["documents"], len(manifest["skipped"])) == (1, 2), "copies of one text"
