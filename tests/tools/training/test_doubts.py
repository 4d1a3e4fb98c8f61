"""Settings that cannot be meant, and what `train check` says of the sources and of the memory of a rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.in_process import plan_of, program, train_here
from tests.support.models import pretrained
from tests.support.runs import make_corpus, write_tiny_config
from trainer.errors import UserError
from trainer.tools import doubts
from trainer.tools.doubts import contents
from trainer.training.build import plan_lanes
from trainer.training.plan import Plan


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return write_tiny_config(tmp_path_factory.mktemp("config"))


DOUBTS = [
    (["train.steps=1"], "scheduler.warmup_steps: 2 of 1 steps: most of the run"),
    (
        ["train.steps=0", "train.tokens=500", "scheduler.warmup_steps=0", "scheduler.warmup_tokens=2000"],
        "scheduler.warmup_tokens: 2,000 of 500 tokens: most of the run",
    ),
    (["train.ema=0.99"], "train.ema: averages about 100 steps of "),
    (["optimizer.lr=100.0"], "optimizer.lr: 100: AdamW moves every weight"),
]


@pytest.mark.parametrize(("overrides", "message"), DOUBTS)
def test_what_works_but_cannot_be_meant_is_said(config, caplog, overrides, message):
    plan_of(config, *overrides)
    assert message in caplog.text


def test_usual_settings_give_no_doubt(config, caplog):
    plan_of(config, "eval.holdout_fraction=0.2", "optimizer.lr=0.01", "train.ema=0.3", "train.steps=3")
    assert not caplog.records


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_what_needs_cuda_is_refused_by_a_run_and_said_by_check(config, tmp_path, capsys):
    override, message = "train.cuda_graph=true", "train.cuda_graph: needs a CUDA device"
    checked = program(["check", "--config", config, "--set", "train.device=auto", "--set", override], capsys)
    assert (checked.returncode, f"a run on this machine is refused: {message}" in checked.stderr) == (0, True)
    with pytest.raises(UserError, match=message):
        train_here(config, tmp_path / "run", "train.device=auto", override)
    assert not (tmp_path / "run").exists()


def test_the_device_decides_the_precision(config, monkeypatch):
    assert plan_of(config).config.train.precision == "fp32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for has_bf16, decided in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has=has_bf16: has)
        assert plan_of(config, "train.device=auto").config.train.precision == decided
        assert plan_of(config, "train.device=cpu").config.train.precision == "fp32"
        assert plan_of(config, "train.device=auto", "train.precision=fp32").config.train.precision == "fp32"


def test_built_in_families_are_compiled_on_cuda(config, monkeypatch):
    assert plan_of(config).config.train.compile is False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    cases = {
        "model.family=transformer": True,
        "model.family=gru": False,
        "model.target=tests.support.models:Scaled": False,
        "train.compile=false": False,
    }
    for changes, decided in cases.items():
        assert plan_of(config, "train.device=auto", changes).config.train.compile is decided, changes
    monkeypatch.setattr("trainer.training.plan.HAS_TRITON", False)
    assert plan_of(config, "train.device=auto").config.train.compile is False


def test_check_says_the_memory_of_a_rank_by_strategy(config, capsys):
    def facts(*options: str) -> dict[str, Any]:
        checked = program(["check", "--config", config, "--no-contract", "--json", *options], capsys)
        assert checked.returncode == 0, checked.stderr
        found: dict[str, Any] = json.loads(checked.stdout)["facts"]
        return found

    ddp, fsdp = facts("--nproc", "4"), facts("--world-size", "4", "--strategy", "fsdp")
    hsdp = facts("--world-size", "4", "--strategy", "hsdp", "--replicas", "2")
    assert ddp["sharding"] == "none: each rank holds the whole model"
    assert (fsdp["sharding"], hsdp["sharding"]) == ("4 shards", "2 replicas of 2 shards")
    sgd = [facts("--set", f"optimizer={{name='sgd', momentum={each}}}")["memory_megabytes"] for each in (0.9, 0)]
    assert [each["optimizer"] for each in sgd] == [sgd[0]["weights"], 0]
    for found, shards in ((ddp, 1), (hsdp, 2), (fsdp, 4)):
        megabytes, weights = found["memory_megabytes"], 4 * found["parameters"] / shards / 1e6
        assert megabytes["weights"] == megabytes["gradients"] == pytest.approx(weights, abs=0.06)
        assert megabytes["optimizer"] == pytest.approx(2 * weights, abs=0.06)
        states = 4 * found["groups_in_flight"] * found["state_width"] / 1e6
        assert megabytes["states"] == pytest.approx(states, abs=0.06)


def test_check_refuses_a_model_that_cannot_be_sharded(config, capsys):
    own = ["--set", "model.target=tests.support.models:Scaled", "--no-contract"]
    assert program(["check", "--config", config, *own], capsys).returncode == 0
    checked = program(["check", "--config", config, *own, "--world-size", "2", "--strategy", "fsdp"], capsys)
    assert "distributed.strategy: scale: a scalar cannot be sharded" in checked.mistake


def test_check_refuses_a_checkpoint_of_another_model_and_accepts_its_own(config, tmp_path, capsys):
    train_here(config, tmp_path / "run", "train.steps=2")
    options = ["check", "--config", config, "--set", f'checkpoint.resume="{tmp_path}/run/checkpoints/latest"']
    assert program(options, capsys).returncode == 0
    assert "model.dim: 16 -> 32" in program([*options, "--set", "model.dim=32"], capsys).mistake


def test_a_file_that_two_sources_name_differently_leaks_held_out_documents_and_is_said(config, caplog):
    """Which documents are held out depends on the name: those held out under one are trained on under the other."""
    path = next((config.parent / "corpus" / "a").glob("*.jsonl"))
    second = f'data.source=[{{name="x", root="{config.parent}/corpus"}}, {{name="y", paths=["{path}"]}}]'
    others = ("data.mixing.batch_size_by_modality={}", second, "ledger.capacity=4096")
    plan_of(config, *others, "eval.holdout_fraction=0.1")
    assert f"eval.holdout_fraction: 1 file in several ways, such as a/{path.name} (source x) and" in caplog.text
    caplog.clear()
    plan_of(config, *others)
    plan_of(
        config, others[0], second.replace(f'paths=["{path}"]', f'root="{config.parent}/corpus"'), "ledger.capacity=4096"
    )
    assert "several ways" not in caplog.text
    blocks = second.replace(f'paths=["{path}"]', f'root="{config.parent}/corpus", text_split="blank_line"')
    (config.parent / "corpus" / "a" / "b.txt").write_text("one\n\ntwo")
    plan_of(config, *others, blocks, "eval.holdout_fraction=0.1")
    assert "1 file in several ways, such as a/b.txt (source x) and a/b.txt (source y)" in caplog.text


def test_modalities_that_no_source_reads_are_said(config, tmp_path, caplog):
    make_corpus(tmp_path / "corpus")
    (tmp_path / "corpus" / "empty" / "deeper").mkdir(parents=True)
    (tmp_path / "corpus" / "empty" / "run.log").write_text("no data")
    others = ("data.mixing.batch_size_by_modality={}", "ledger.capacity=4096")
    source = f'root="{tmp_path}/corpus", modalities=["a"]'
    chosen = f'data.source=[{{name="x", {source}}}]'
    plan_of(config, *others, chosen)
    assert f"root {tmp_path}/corpus: has modalities that no source reads: b; add them to modalities" in caplog.text
    caplog.clear()
    both = f'data.source=[{{name="x", {source}}}, {{name="y", root="{tmp_path}/corpus/", modalities=["b"]}}]'
    whole = f'data.source=[{{name="x", root="{tmp_path}/corpus"}}]'
    validated = f'eval.source=[{{name="v", root="{tmp_path}/corpus", modalities=["b"]}}]'
    paths = both.replace(f'root="{tmp_path}/corpus/", modalities=["b"]', f'paths=["{tmp_path}/corpus/b/*"]')
    for settings in ((both,), (paths,), (whole,), (chosen, validated, "eval.every=2")):
        plan_of(config, *others, *settings)
        assert "modalities that no source" not in caplog.text


@pytest.mark.parametrize(("family", "length", "code"), [("mamba2", 1, 2), ("mamba2", 2, 0), ("lfm2", 1, 0)])
def test_rows_that_a_family_cannot_be_trained_on_are_refused_by_check(tmp_path, capsys, family, length, code):
    pytest.importorskip("transformers")
    read = f'model.args={{from="{pretrained(family, tmp_path / "read", 257)}"}}'
    own = ["--set", f"model.family={family}", "--set", read, "--set", f"data.seq_len={length}", "--no-contract"]
    checked = program(["check", "--config", write_tiny_config(tmp_path), *own], capsys)
    assert checked.returncode == code, checked.stderr
    assert ("data.seq_len: rows of 1 tokens are too short for mamba2" in checked.stderr) == (code == 2)


# Source -> the lengths of the documents of each of its files.
CORPUS: Mapping[str, Sequence[Sequence[int]]] = {"one": [[300, 420], [280], [350]], "two": [[*range(5, 60)], [9, 12]]}


def mixed_plan(folder: Path, *overrides: str, names: Sequence[str] = ("one", "two")) -> Plan:
    for name, files in CORPUS.items():
        (folder / name).mkdir(exist_ok=True)
        for number, lengths in enumerate(files):
            texts = [json.dumps({"text": "x" * size}) for size in lengths]
            (folder / name / f"{number}.jsonl").write_text("\n".join(texts) + "\n")
    sources = ",".join(f'{{name="{name}",paths=["{folder}/{name}/*"]}}' for name in names)
    rows = 'data.mixing={batching_mode="per_row",batch_size=4,num_streams_mixed=3}'
    return plan_of(write_tiny_config(folder), f"data.source=[{sources}]", rows, "data.max_group_cells=0", *overrides)


def test_more_rows_than_documents_are_named_and_the_setting_helps(tmp_path: Path, caplog: Any) -> None:
    plan_lanes(mixed_plan(tmp_path, "data.mixing.batch_size=16", names=["one"]), 0, torch.device("cpu"))
    assert "4 documents for 16 rows: a step has several of one document; set it to 4, or add data" in caplog.text
    caplog.clear()
    plan_lanes(mixed_plan(tmp_path, "data.mixing.batch_size=4", names=["one"]), 0, torch.device("cpu"))
    assert "several of one document" not in caplog.text


def test_small_data_are_counted_and_large_data_go_by_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = mixed_plan(tmp_path)
    for name, found in contents(whole).items():
        sizes = [size for lengths in CORPUS[name] for size in lengths]
        cell = whole.config.data.seq_len
        assert found == (sum(sizes), len(sizes), sum(-(-size // cell) * cell for size in sizes))
    monkeypatch.setattr(doubts, "OPENED_BYTES", 1)
    for source in whole.sources:
        size = sum(Path(stream.path).stat().st_size for stream in source.streams)
        assert contents(whole)[source.name] == (size, 0, 0)
    np.save(tmp_path / "ids.npy", np.arange(250, dtype=np.uint16))
    ids = mixed_plan(tmp_path, f'data.source=[{{name="ids",paths=["{tmp_path}/ids.npy"],eod=3}}]')
    assert contents(ids)["ids"].tokens == 250


def test_a_source_without_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError, match="source one: no document is left to read"):
        contents(mixed_plan(tmp_path, f'data.source=[{{name="one",paths=["{tmp_path}/empty.jsonl"]}}]'))
    with pytest.raises(UserError, match="source one: no document is left to read"):
        contents(mixed_plan(tmp_path, "eval.holdout_fraction=1e-9", "eval.every=1"))
