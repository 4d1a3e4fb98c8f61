"""Validation sets and tasks of one's own: in a run, and on its checkpoints by `train eval`."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.support.in_process import plan_of, program
from tests.support.runs import losses, read_rows, train, write_tiny_config
from trainer.tools.offline import _plan
from trainer.tools.saved_model import load_model

SETS = """
[[eval.source]]
name = "near"
paths = ["{directory}/near/*.jsonl"]

[[eval.source]]
name = "far"
root = "{directory}/far"
batches = 4
"""
WHOLE_DOCUMENTS = "data.max_group_cells=64"


def make_config(directory: Path) -> Path:
    """A config with two validation sets, their files beside it."""
    (directory / "near").mkdir()
    (directory / "far" / "x").mkdir(parents=True)
    words = ["to be", "or not to be that is the question " * 4, "whether tis nobler in the mind " * 3]
    lines = [json.dumps({"text": text}) + "\n" for text in words]
    (directory / "near" / "1.jsonl").write_text("".join(lines))
    (directory / "near" / "2.jsonl").write_text("".join(lines[1:]))
    (directory / "far" / "x" / "1.jsonl").write_text("".join(lines) * 9)
    sets = SETS.format(directory=directory) + "[eval]\nevery = 3\ndepth = true\n[checkpoint]\nevery = 3\n"
    return write_tiny_config(directory, sets)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return make_config(tmp_path)


def trained(config: Path, *sets: str, **options: object) -> tuple[Path, str]:
    """The directory of a run, and what it said."""
    run_dir = config.parent / "run"
    return run_dir, train(config, run_dir, WHOLE_DOCUMENTS, *sets, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run on an included file, with held-out documents and two sets, which tests only read."""
    config = make_config(tmp_path_factory.mktemp("finished"))
    (config.parent / "more.toml").write_text(f"[[source]]\nname = 'b'\nroot = '{config.parent}/corpus'\n")
    included = "data.source=[{name='a', include='more.toml'}]"
    return trained(config, included, "eval.holdout_fraction=0.3", "eval.batches=1000")[0]


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """A run without evaluations."""
    return trained(write_tiny_config(tmp_path_factory.mktemp("bare")))[0]


def evaluated(run_dir: Path, capsys, *arguments: object) -> dict[str, float]:
    ended = program(["eval", run_dir, "--trust-code", "--json", *arguments], capsys)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)["metrics"]


def loss_of(run_dir: Path, files: list[Path]) -> tuple[float, float]:
    """(nats per token, accuracy) of each document in one piece, which the ledger's cells must add up to."""
    saved = load_model(run_dir, step=None, device=torch.device("cpu"))
    losses, hits = [], []
    for line in [line for file in files for line in file.read_text().splitlines()]:
        targets = torch.tensor(list(json.loads(line)["text"].encode()))
        tokens = torch.cat([torch.tensor([saved.tokenizer.bos_id]), targets])[:-1]
        with torch.no_grad():
            logits = saved.model(tokens[None], state=torch.zeros(1, saved.model.state_width)).logits[0]
        losses.append(F.cross_entropy(logits, targets, reduction="none"))
        hits.append((logits.argmax(dim=-1) == targets).double())
    return float(torch.cat(losses).double().mean()), float(torch.cat(hits).mean())


def test_a_set_has_its_own_keys_and_its_loss_is_that_of_its_documents(finished, capsys):
    logged = {step: row for (mode, step), row in read_rows(finished / "metrics.jsonl").items() if mode == "eval"}
    assert logged.keys() == {3, 6}
    own = ("eval_", "eval/depth/")
    rows = {step: {key: row[key] for key in row if not key.startswith(own)} for step, row in logged.items()}
    depth = {key for key in logged[6] if "depth/" in key}
    assert {f"eval/{name}depth/beyond_cell/carry_gain" for name in ("", "near/", "far/")} <= depth
    of_each = ("loss", "accuracy", "perplexity", "bits_per_byte")
    of_both = {f"eval/{name}/{key}" for name in ("near", "far") for key in of_each}
    assert rows[6].keys() - depth == of_both | {"eval/far/loss_se"}
    loss, accuracy = loss_of(finished, sorted((finished.parent / "near").iterdir()))
    assert rows[6]["eval/near/loss"] == pytest.approx(loss, rel=1e-5)
    assert rows[6]["eval/near/accuracy"] == pytest.approx(accuracy)
    assert rows[6]["eval/near/bits_per_byte"] == pytest.approx(loss / math.log(2), rel=1e-5)
    assert rows[3]["eval/near/loss"] > rows[6]["eval/near/loss"]
    assert rows[6]["eval/far/loss"] != pytest.approx(rows[6]["eval/near/loss"], rel=1e-4)  # a part of it
    for step in (3, 6):
        assert evaluated(finished, capsys, "--step", step) == pytest.approx(rows[step], rel=1e-6)
    said = program(["eval", finished, "--trust-code"], capsys).stdout.partition("near: ")[2].partition("far: ")[0]
    table = {line.split()[0]: line.split()[1] for line in said.splitlines()[2:]}
    by_depth = [key.split("/") for key in rows[6] if re.fullmatch(r"eval/near/depth/\d+/loss", key)]
    assert all(table[key[3]] == f"{rows[6]['/'.join(key)]:.4f}" for key in by_depth)
    held_out = {key: value for key, value in logged[6].items() if key.startswith(own)}
    found = evaluated(finished, capsys, "--held-out")
    assert found == pytest.approx(held_out, rel=1e-6)
    assert evaluated(finished, capsys, "--held-out", "--batches", 1)["eval_loss"] != found["eval_loss"]
    exported = finished.parent / "exported"
    assert program(["export", finished, "--format", "safetensors", "--out", exported], capsys).returncode == 0
    assert evaluated(exported, capsys) == pytest.approx(rows[6], rel=1e-6)


@pytest.mark.distributed
def test_two_ranks_share_drawn_documents(config, capsys):
    sets = ("eval.holdout_fraction=0.3", "eval.batches=2", "objective.token_types=true")
    run_dir, said = trained(config, *sets, nproc=2)
    row = read_rows(run_dir / "metrics.jsonl")["eval", 6]
    logged = {key: value for key, value in row.items() if key.startswith(("eval_", "eval/depth/"))}
    some = {"eval_loss_se", "eval/depth/beyond_cell/carry_gain_se", "eval_bits_per_byte", "eval_token_type/space/loss"}
    assert some <= logged.keys()
    assert "held out: over documents, carrying " in said
    assert f"held out {logged['eval_loss']:.4f} +- {2 * logged['eval_loss_se']:.4f} (95 %; " in said
    # Of one rank, twice as many micro-batches are as many documents.
    assert evaluated(run_dir, capsys, "--held-out", "--batches", 4) == pytest.approx(logged, rel=1e-6)
    assert "eval.every" not in program(["eval", run_dir, "--held-out", "--batches", 40], capsys).stderr


def test_a_checkpoint_is_evaluated_where_its_training_data_are_not(bare, tmp_path, capsys):
    config, run_dir = make_config(tmp_path), bare
    file = bare.parent / "corpus" / "a" / "stream0.jsonl"
    ended = program(["eval", bare, "--source", f"seen={file}", "--batches", 1], capsys)
    assert "eval source seen: 1 file trained on too, by source first: " in ended.stderr
    (bare.parent / "corpus").rename(bare.parent / "elsewhere")
    near = (config.parent / "near").rename(config.parent / "data[1]")
    found = evaluated(run_dir, capsys, "--source", f"a={near}", "--source", f"b={near}/1.jsonl")
    assert found["eval/a/loss"] == pytest.approx(loss_of(run_dir, sorted(near.iterdir()))[0], rel=1e-5)
    assert found["eval/b/loss"] == pytest.approx(loss_of(run_dir, [near / "1.jsonl"])[0], rel=1e-5)
    ended = program(["eval", run_dir, "--source", f"a={near}"], capsys)
    assert f"eval/a/loss {found['eval/a/loss']:.4f}\n" in ended.stdout, ended.stderr
    assert "WARNING" not in ended.stderr
    (bare.parent / "elsewhere").rename(bare.parent / "corpus")


def test_what_a_run_needs_refuses_no_evaluation(config):
    stale, held_out = "ledger={wipe_mode='periodic_stale', stale_threshold=2}", "eval.holdout_fraction=0.3"
    for ranks in ("strategy='hsdp', replicas=2", "shards=20000"):
        given = plan_of(config, f"distributed={{{ranks}}}", stale, held_out, ranks=4).config
        assert all(_plan(given, sets, None, takes_mask=False) for sets in ([], given.eval.source))


def test_evaluations_change_nothing_of_the_training(config, bare, tmp_path):
    (tmp_path / "my_task.py").write_text(TASK)
    task = ("eval.target=my_task:evaluate", "eval.every=1", "eval.args={scale=2.0}")
    run_dir, said = trained(config, *task, cwd=tmp_path)
    rows = read_rows(run_dir / "metrics.jsonl")
    assert losses(run_dir / "metrics.jsonl") == losses(bare / "metrics.jsonl")
    assert [rows["eval", step]["eval/my/score"] for step in (1, 2, 3)] == [2.0, 4.0, 6.0]
    assert rows["eval", 3]["eval/near/loss"] > 0
    assert not [key for key in rows["eval", 3] if key.startswith("eval/my/") and key != "eval/my/score"]
    assert said.count("metric 'eval/near/loss' is left out: ") == 1
    assert said.count("is left out: must be a number") == 2
    assert said.count("the name of a metric must be a text that is not empty") == 2


TASK = """
import torch

def evaluate(*, model, tokenizer, step, device, rank, world_size, scale=1.0, fails=False):
    torch.rand(7)
    assert not model.training and not torch.is_grad_enabled()
    model(torch.zeros(1, 4, dtype=torch.long, device=device), state=torch.zeros(1, model.state_width, device=device))
    if fails and rank == 1:
        raise RuntimeError("of rank 1")
    odd = {"": 1.0, 7: 1.0, "my/text": "7", "my/huge": 10**400, "near/loss": -1.0}
    return {"my/score": scale * step, **odd} if rank == 0 else None
"""


@pytest.mark.distributed
def test_a_task_that_fails_on_one_rank_is_switched_off_and_the_run_goes_on(config, tmp_path):
    (tmp_path / "my_task.py").write_text(TASK)
    run_dir, said = trained(config, "eval.target=my_task:evaluate", "eval.args={fails=true}", nproc=2, cwd=tmp_path)
    assert said.count("RuntimeError: of rank 1") == 1
    rows = read_rows(run_dir / "metrics.jsonl")
    assert not any("eval/my/score" in row for row in rows.values())
    assert "eval/near/loss" in rows["eval", 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "has neither [[eval.source]] nor held-out documents to evaluate on; name a set with --source NAME=PATH"),
        (["--source", "books"], "--source: 'books' is not NAME=PATH"),
        (["--source", "bücher=x.txt"], "--source: 'bücher=x.txt' is not NAME=PATH"),
        (["--source", "a=.", "--source", "a=."], "--source: names one set twice"),
        (["--held-out", "--source", "a=."], "--held-out: cannot be combined with --source"),
        (["--held-out"], "has no held-out documents to evaluate on; name a set with --source NAME=PATH"),
    ],
)
def test_a_mistake_in_a_call_is_one_line(bare, options, message, capsys):
    assert message in program(["eval", bare, *options], capsys).mistake


def test_a_resume_on_a_set_that_changed_is_refused_by_name(config):
    trained(config)
    more = ("--resume", "auto", "--steps", 8)
    _, said = trained(config, more=("--resume", "auto", "--steps", 7, "--set", "eval.source.near.batches=1"))
    assert "near: evaluations read 5 of 5 documents, 69 of 463 tokens, each to a depth of 16 tokens, and all" in said
    file = config.parent / "near" / "2.jsonl"
    file.write_text(file.read_text().replace("nobler", "NOBLER"))
    _, refused = trained(config, more=more, code=2)
    assert "the data changed since the checkpoint was saved: source eval/near: 1 changed (" in refused
