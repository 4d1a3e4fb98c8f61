"""Settings that cannot be meant, and needs that a machine does not meet: one place, for `check` and for a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.in_process import program, train_here
from tests.support.models import pretrained
from tests.support.runs import make_corpus, write_tiny_config
from trainer.cli.parts import PARTS
from trainer.config.load import load_config
from trainer.errors import UserError
from trainer.tools import doubts
from trainer.training.setup.plan import Plan, make_plan

CPU = torch.device("cpu")
WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return write_tiny_config(tmp_path_factory.mktemp("config"))


def plan(config: Path, *overrides: str, world_size: int = 1) -> Plan:
    return make_plan(load_config(config, overrides), config, world_size, parts=PARTS)


DOUBTS = [
    (["train.steps=1"], "scheduler.warmup_steps: 2 of 1 steps: most of the run"),
    (
        ["train.steps=0", "train.tokens=500", "scheduler.warmup_steps=0", "scheduler.warmup_tokens=2000"],
        "scheduler.warmup_tokens: 2,000 of 500 tokens: most of the run",
    ),
    (["optimizer.lr=100.0"], "optimizer.lr: 100: AdamW moves every weight"),
    (["data.source.second.mixing.num_streams_mixed=5"], "mixing.num_streams_mixed: 5 readers"),
]


@pytest.mark.parametrize(("overrides", "message"), DOUBTS)
def test_what_works_but_cannot_be_meant_is_said(config, caplog, overrides, message):
    plan(config, *overrides)
    assert message in caplog.text


def test_usual_settings_give_no_doubt(config, caplog):
    plan(config, "eval.holdout_fraction=0.2", "optimizer.lr=0.01", "data.mixing.num_streams_mixed=4")
    assert not caplog.records


@WITHOUT_CUDA
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.precision=fp16", 'train.precision: "fp16" needs a CUDA device'),
    ],
)
def test_what_needs_cuda_is_refused_by_a_run_and_said_by_check(config, tmp_path, capsys, override, message):
    options = ["--config", config, "--set", "train.device=auto", "--set", override]
    checked = program(["check", *options], capsys)
    assert checked.returncode == 0
    assert f"a run on this machine is refused: {message}" in checked.stderr
    with pytest.raises(UserError, match=re.escape(message)):
        train_here(config, tmp_path / "run", "train.device=auto", override)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "key", "what"),
    [
        (["data.seq_len=100000000"], "data.seq_len", "the logits that exist together take 411.2 GB"),
        (["model.dim=400000"], "model", "weights, gradients and optimizer take"),
        (["ledger.capacity=1000000000"], "ledger.capacity", "the states of the ledger take"),
    ],
)
def test_memory_that_no_machine_of_this_size_has_is_an_unmet_need(config, monkeypatch, overrides, key, what):
    monkeypatch.setattr(doubts, "memory_bytes", lambda device: 16 * 10**9)
    (found,) = plan(config, *overrides).unmet_needs(CPU)
    assert found.key == key
    assert what in found.problem
    assert "cpu has 16.0 GB" in found.problem
    assert not plan(config).unmet_needs(CPU)


def test_the_device_decides_the_precision(config, monkeypatch):
    assert plan(config).config.train.precision == "fp32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for has_bf16, decided in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has=has_bf16: has)
        assert plan(config, "train.device=auto").config.train.precision == decided
        assert plan(config, "train.device=cpu").config.train.precision == "fp32"
        assert plan(config, "train.device=auto", "train.precision=fp16").config.train.precision == "fp16"


def test_built_in_families_are_compiled_on_cuda(config, monkeypatch):
    assert plan(config).config.train.compile is False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    cases = {
        "model.family=transformer": True,
        "model.family=gru": False,
        "model.target=tests.support.models:scaled": False,
        "train.compile=false": False,
    }
    for changes, decided in cases.items():
        assert plan(config, "train.device=auto", changes).config.train.compile is decided, changes
    monkeypatch.setattr("trainer.training.setup.plan.HAS_TRITON", False)
    assert plan(config, "train.device=auto").config.train.compile is False


def test_graphs_that_are_asked_for_need_cuda(config):
    (found,) = plan(config, "train.cuda_graph=true").unmet_needs(CPU)
    assert found.message.startswith('train.cuda_graph: "true" needs a CUDA device')


def test_of_a_sharded_model_a_rank_needs_memory_for_its_shards_alone(config, monkeypatch):
    large = ["model.dim=4096", "ledger.capacity=64"]
    needed = plan(config, *large).num_parameters() * 4 * 4
    monkeypatch.setattr(doubts, "memory_bytes", lambda device: needed * 2 // 3)

    def unmet(world_size: int, *sets: str) -> list[str]:
        overrides = [*large, *(f"distributed.{each}" for each in sets)]
        return [need.key for need in plan(config, *overrides, world_size=world_size).unmet_needs(CPU)]

    assert unmet(4, "strategy=ddp") == unmet(1, "strategy=fsdp") == ["model"]
    assert unmet(4, "strategy=fsdp") == unmet(4, "strategy=hsdp", "replicas=2") == []
    assert unmet(4, "strategy=hsdp", "replicas=4") == ["model"]
    assert unmet(4, "strategy=hsdp") == []  # one node, so one replica
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert unmet(4, "strategy=hsdp") == ["model"]


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
    for found, shards in ((ddp, 1), (hsdp, 2), (fsdp, 4)):
        megabytes, weights = found["memory_megabytes"], 4 * found["parameters"] / shards / 1e6
        assert megabytes["weights"] == megabytes["gradients"] == pytest.approx(weights, abs=0.06)
        assert megabytes["optimizer"] == pytest.approx(2 * weights, abs=0.06)
        states = 4 * found["groups_in_flight"] * found["state_width"] / 1e6
        assert megabytes["states"] == pytest.approx(states, abs=0.06)


def test_check_refuses_a_model_that_cannot_be_sharded(config, capsys):
    own = ["--set", "model.target=tests.support.models:scaled", "--no-contract"]
    assert program(["check", "--config", config, *own], capsys).returncode == 0
    checked = program(["check", "--config", config, *own, "--world-size", "2", "--strategy", "fsdp"], capsys)
    assert checked.returncode == 2
    assert "distributed.strategy: scale: a scalar cannot be sharded" in checked.stderr


def test_check_refuses_a_checkpoint_of_another_model_and_accepts_its_own(config, tmp_path, capsys):
    train_here(config, tmp_path / "run", "train.steps=2")
    options = ["check", "--config", config, "--set", f'checkpoint.resume="{tmp_path}/run/checkpoints/latest"']
    assert program(options, capsys).returncode == 0
    refused = program([*options, "--set", "model.dim=32"], capsys)
    assert refused.returncode == 2
    assert "model.dim: 16 -> 32" in refused.stderr


def test_a_file_that_two_sources_name_differently_leaks_held_out_documents_and_is_said(config, caplog):
    """Which documents are held out depends on the name: those held out under one are trained on under the other."""
    path = next((config.parent / "corpus" / "a").glob("*.jsonl"))
    second = f'data.source=[{{name="x", root="{config.parent}/corpus"}}, {{name="y", paths=["{path}"]}}]'
    others = ("data.mixing.batch_size_by_modality={}", second, "ledger.capacity=4096")
    plan(config, *others, "eval.holdout_fraction=0.1")
    assert f"eval.holdout_fraction: 1 file under several names, such as a/{path.name} (source x) and" in caplog.text
    caplog.clear()
    plan(config, *others)
    plan(
        config, others[0], second.replace(f'paths=["{path}"]', f'root="{config.parent}/corpus"'), "ledger.capacity=4096"
    )
    assert "several names" not in caplog.text


def test_modalities_and_files_of_a_root_that_no_source_reads_are_said(config, tmp_path, caplog):
    make_corpus(tmp_path / "corpus")
    others = ("data.mixing.batch_size_by_modality={}", "ledger.capacity=4096")
    source = f'root="{tmp_path}/corpus", modalities=["a"]'
    chosen = f'data.source=[{{name="x", {source}}}]'
    plan(config, *others, chosen)
    assert f"root {tmp_path}/corpus: has modalities that no source reads: b; add them to modalities" in caplog.text
    caplog.clear()
    (tmp_path / "corpus" / "loose.csv").write_text("a,b")
    both = f'data.source=[{{name="x", {source}}}, {{name="y", root="{tmp_path}/corpus/", modalities=["b"]}}]'
    whole = f'data.source=[{{name="x", root="{tmp_path}/corpus"}}]'
    validated = f'eval.source=[{{name="v", root="{tmp_path}/corpus", modalities=["b"]}}]'
    for settings in ((both,), (whole,), (chosen, validated, "eval.every=2")):
        plan(config, *others, *settings)
        assert "modalities that no source" not in caplog.text
        said = f"root {tmp_path}/corpus: has 1 file in no modality's directory, which no source reads: loose.csv; move"
        assert caplog.text.count(said) == 1
        caplog.clear()


@pytest.mark.parametrize(("family", "length", "code"), [("mamba2", 1, 2), ("mamba2", 2, 0), ("lfm2", 1, 0)])
def test_rows_that_a_family_cannot_be_trained_on_are_refused_by_check(tmp_path, capsys, family, length, code):
    pytest.importorskip("transformers")
    read = f'model.args={{from="{pretrained(family, tmp_path / "read", 257)}"}}'
    own = ["--set", f"model.family={family}", "--set", read, "--set", f"data.seq_len={length}", "--no-contract"]
    checked = program(["check", "--config", write_tiny_config(tmp_path), *own], capsys)
    assert checked.returncode == code, checked.stderr
    assert ("data.seq_len: rows of 1 tokens are too short to train mamba2" in checked.stderr) == (code == 2)
