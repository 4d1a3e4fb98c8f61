"""`train init` on data of every kind: what it writes is a config that checks and trains."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.in_process import program
from tests.support.runs import ROOT, losses, make_corpus, run
from tests.unit.data.megatron_writer import write_megatron
from trainer.config.load import load_config
from trainer.data.formats import FORMATS
from trainer.errors import UserError
from trainer.tools.verbs.init import init
from trainer.training.setup.plan import make_plan

TEXT = "".join(
    (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("config.md", "training/METRICS_LOSSES.md")
)


def ids(count: int, largest: int, seed: int = 0) -> np.ndarray:
    """Skewed ids as of text; the largest occurs."""
    drawn = np.random.Generator(np.random.Philox(seed)).zipf(1.3, count) % largest
    drawn[-1] = largest
    return drawn


def text_folder(path: Path) -> list[str]:
    path.mkdir()
    for i in range(6):
        (path / f"part{i}.txt").write_text(TEXT[i * 4000 : (i + 1) * 4000], encoding="utf-8")
    return [path.name]


def jsonl_file(path: Path) -> list[str]:
    path.mkdir()
    records = [json.dumps({"text": paragraph}) for paragraph in TEXT.split("\n") if paragraph]
    (path / "all.jsonl").write_text("\n".join(records) + "\n", encoding="utf-8")
    return [f"{path.name}/all.jsonl"]


def jsonl_tokens(path: Path) -> list[str]:
    path.mkdir()
    records = [json.dumps({"tokens": ids(200, 700, seed).tolist()}) for seed in range(40)]
    (path / "ids.jsonl").write_text("\n".join(records) + "\n", encoding="utf-8")
    return [path.name]


def npy_files(path: Path) -> list[str]:
    path.mkdir()
    for shard in range(3):
        np.save(path / f"shard{shard}.npy", ids(9000, 1234, shard).astype(np.uint16))
    return [path.name]


def bin_file(path: Path) -> list[str]:
    path.mkdir()
    ids(30000, 50256).astype("<u4").tofile(path / "tokens.bin")
    return [f"{path.name}/*.bin"]


def megatron(path: Path) -> list[str]:
    path.mkdir()
    write_megatron(path / "corpus.bin", [ids(int(n), 900, int(n)).tolist() for n in range(50, 450, 10)], dtype="int32")
    return [path.name]


def parquet(path: Path) -> list[str]:
    table = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    path.mkdir()
    files.write_table(table.table({"text": TEXT.split("\n\n")}), path / "all.parquet")
    return [path.name]


def nested(path: Path) -> list[str]:
    make_corpus(path)
    return [path.name]


# Of every format.
KINDS = {
    "text": (text_folder, "direct", "bytes", 0),
    "jsonl": (jsonl_file, "direct", "bytes", 0),
    "jsonl_tokens": (jsonl_tokens, "direct", "ids", 701),
    "npy": (npy_files, "direct", "ids", 1235),
    "bin": (bin_file, "direct", "ids", 50257),
    "megatron": (megatron, "direct", "ids", 901),
    "parquet": (parquet, "direct", "bytes", 0),
    "nested": (nested, "nested", "bytes", 0),
}
QUICK = ("jsonl_tokens", "nested")


# Every kind is read, checked and trained on; the ones that differ most in what is written stand in the short suite.
@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_a_starter_config_checks_and_trains(kind, tmp_path, monkeypatch):
    make, layout, tokenizer, vocab_size = KINDS[kind]
    monkeypatch.chdir(tmp_path)
    paths = make(tmp_path / "my data")
    init(paths, out="x.toml", minutes=0)
    config = load_config("x.toml")
    assert (config.data.source[0].layout, config.data.tokenizer, config.data.vocab_size) == (
        layout,
        tokenizer,
        vocab_size,
    )
    plan = make_plan(config, Path("x.toml"), 1)
    assert plan.facts.groups_in_flight <= config.ledger.capacity
    small = ["--set", "model.dim=16", "--set", "scheduler.warmup_steps=1", "--steps", "3", "--set", "train.device=cpu"]
    trained = run("--config", "x.toml", "--run-dir", "run", *small, "--set", "metrics.log_interval=1", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert [*losses(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


def test_every_format_is_tried():
    assert KINDS.keys() >= FORMATS.keys()


def test_without_out_it_prints_the_config_alone_and_the_editors_schema_lies_beside_a_file(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    text_folder(tmp_path / "data")
    printed = program(["init", "data", "--minutes", "0"], capsys)
    assert printed.returncode == 0, printed.stderr
    assert "#:schema" not in printed.stdout
    assert not (tmp_path / "config.schema.json").exists()
    written = program(["init", "data", "--out", "x.toml", "--minutes", "0"], capsys)
    text = (tmp_path / "x.toml").read_text()
    assert text == "#:schema config.schema.json\n" + printed.stdout
    assert (tmp_path / "config.schema.json").read_text() == (ROOT / "docs" / "config.schema.json").read_text()
    assert "next: train check --config x.toml" in written.stderr
    again = program(["init", "data", "--out", "x.toml", "--minutes", "0"], capsys)
    assert again.returncode == 2
    assert again.stderr == "x.toml: exists already; name another file, or add --force\n"


def test_what_cannot_be_one_run_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    nothing = program(["init", "nowhere"], capsys)
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert "nowhere: no such file or directory; check the path" in nothing.stderr
    data = tmp_path / "data"
    text_folder(data)
    np.save(data / "ids.npy", ids(100, 50).astype(np.int64))
    mixed = program(["init", "data", "--minutes", "0"], capsys)
    assert mixed.returncode == 2
    assert "is text, and data/ids.npy holds token ids" in mixed.stderr


def test_all_empty_files_are_named_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text_folder(tmp_path / "data")
    for name in ("empty1.txt", "empty2.txt"):
        (tmp_path / "data" / name).touch()
    with pytest.raises(
        UserError, match=r"data/empty1.txt, data/empty2.txt: 2 of 8 files are empty, which a run refuses"
    ):
        init(["data"], minutes=0)


def test_text_files_that_are_not_text_are_noted(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text_folder(tmp_path / "data")
    (tmp_path / "data" / "latin.txt").write_bytes(TEXT[:4000].encode() + b"caf\xe9")
    ended = program(["init", "data", "--minutes", "0", "--force"], capsys)
    assert ended.returncode == 0, ended.stderr
    words = " ".join((ended.stdout + ended.stderr).split())
    assert "1 of 7 files is not UTF-8 text: data/latin.txt (not UTF-8: byte 0xe9 at offset" in words


def test_a_tokenizer_of_ones_own_is_named_in_the_config(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import models, pre_tokenizers, trainers

    monkeypatch.chdir(tmp_path)
    text_folder(tmp_path / "data")
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=400, special_tokens=["?"], show_progress=False)
    )
    tokenizer.save("words.json")
    init(["data"], out="x.toml", minutes=0, tokenizer="words.json")
    plan = make_plan(load_config("x.toml"), Path("x.toml"), 1)
    assert plan.vocab_size == tokenizer.get_vocab_size() + 1
    assert plan.config.objective.token_types is False
