"""Settings that cannot be meant, and needs that a machine does not meet: one place, for `check` and for a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.in_process import program
from tests.support.runs import make_corpus, run, write_tiny_config
from trainer.config.load import load_config
from trainer.errors import UserError
from trainer.training.setup import plausible
from trainer.training.setup.plan import Plan, make_plan

CPU = torch.device("cpu")
WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return write_tiny_config(tmp_path_factory.mktemp("config"))


def plan(config: Path, *overrides: str) -> Plan:
    return make_plan(load_config(config, overrides), config, 1)


DOUBTS = [
    (["eval.holdout_fraction=0.99"], "eval.holdout_fraction: holds out 99% of the documents"),
    (["objective.chunk_tokens=64"], "objective.chunk_tokens: 64: a micro-batch has 64 tokens, so nothing is saved"),
    (["optimizer.lr=100.0"], "optimizer.lr: 100: AdamW moves every weight by about this much"),
    (
        ["data.mixing.num_streams_mixed=100", "ledger.capacity=4096"],
        "source first: mixing.num_streams_mixed: 100 readers, but the source has 4 streams",
    ),
    (
        ["data.source.second.mixing.num_streams_mixed=5"],
        "source second: mixing.num_streams_mixed: 5 readers, but the source has 4 streams",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), DOUBTS)
def test_what_works_but_cannot_be_meant_is_said(config, caplog, overrides, message):
    plan(config, *overrides)
    assert message in caplog.text


def test_usual_settings_give_no_doubt(config, caplog):
    plan(
        config,
        "eval.holdout_fraction=0.2",
        "optimizer.lr=0.01",
        "objective.chunk_tokens=16",
        "data.mixing.num_streams_mixed=4",
    )
    assert not caplog.records


def test_a_default_number_of_readers_is_no_mistake_of_the_user(tmp_path, caplog):
    make_corpus(tmp_path / "corpus", streams=1)
    path = tmp_path / "x.toml"
    path.write_text(f'[train]\nsteps = 2\n[[data.source]]\nname = "s"\nroot = "{tmp_path}/corpus"\n')
    plan(path)
    assert not caplog.records


def test_a_hundred_thousand_layers_are_refused_before_one_is_built(config):
    with pytest.raises(UserError, match=r"model\.num_layers: 100,000 layers"):
        plan(config, "model.num_layers=100000")


@WITHOUT_CUDA
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.precision=fp16", 'train.precision: "fp16" needs a CUDA device'),
        ("distributed.backend=nccl", 'distributed.backend: "nccl" needs CUDA devices'),
    ],
)
def test_what_needs_cuda_is_refused_by_a_run_and_said_by_check(config, tmp_path, capsys, override, message):
    options = ["--config", config, "--set", "train.device=auto", "--set", override]
    checked = program(["check", *options], capsys)
    assert checked.returncode == 0
    assert f"a run on this machine is refused: {message}" in checked.stderr
    ended = run(*options, "--run-dir", tmp_path / "run")
    assert ended.returncode == 2
    assert message in ended.stderr
    assert not (tmp_path / "run").exists()


def test_check_says_that_there_is_no_cuda_for_a_run_that_asks_for_it(config, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    checked = program(["check", "--config", config, "--set", "train.device=cuda", "--json"], capsys)
    assert checked.returncode == 0
    assert 'train.device: is "cuda", but torch finds no CUDA device here' in checked.stderr
    assert json.loads(checked.stdout)["facts"]["forward_pass"] == "not tried: the run is for CUDA"


@pytest.mark.parametrize(
    ("overrides", "key", "what"),
    [
        (["data.seq_len=100000000"], "data.seq_len", "the logits that exist together take 411.2 GB"),
        (["model.dim=400000"], "model", "weights, gradients and optimizer take"),
        (["ledger.capacity=10000000000"], "ledger.capacity", "the states of the ledger take"),
    ],
)
def test_memory_that_no_machine_of_this_size_has_is_an_unmet_need(config, monkeypatch, overrides, key, what):
    monkeypatch.setattr(plausible, "memory_bytes", lambda device: 16 * 10**9)
    (found,) = plan(config, *overrides).unmet_needs(CPU)
    assert found.key == key
    assert what in found.problem
    assert "cpu has 16.0 GB of memory here" in found.problem
    assert not plan(config).unmet_needs(CPU)


def test_a_checkpoint_that_is_not_there_is_refused_by_check_as_by_a_run(config, tmp_path, capsys):
    nowhere = tmp_path / "run" / "checkpoints" / "step_00000001"
    (tmp_path / "empty").mkdir()
    for path, message in ((nowhere, "no such directory"), (tmp_path / "empty", "is not complete")):
        options = ["--config", config, "--set", f'checkpoint.resume="{path}"']
        for ended in (program(["check", *options], capsys), run(*options)):
            assert ended.returncode == 2
            assert f"--resume: {path}: {message}" in ended.stderr


def test_check_refuses_a_checkpoint_of_another_model_and_accepts_its_own(config, tmp_path, capsys):
    assert run("--config", config, "--run-dir", tmp_path / "run", "--steps", "2").returncode == 0
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
