"""Losses and metrics of a user's own model and code, through the program."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_process import program
from tests.support.runs import FULL_ROWS, overrides, read_rows, train, write_tiny_config

MODULE = """
from functools import partial
import torch
from torch import nn
from trainer.metrics.catalog import register
from trainer.metrics.catalog_rows import MetricSpec
from trainer.model.encoder import build
from trainer.model.protocol import ModelOutput

texts = dict(unit="", description="x", healthy="x", pathological="x", group="x", title="x")
register(MetricSpec(name="my/calls", window="sum", ranks="sum", **texts))

class Regular(nn.Module):
    loss_keys, metric_keys = {"energy": "tokens", "size": "rows", "norm": "tokens"}, ("my/calls", "my/last")
    def __init__(self, returned, **sizes):
        super().__init__()
        self.inner, self.returned = build(**sizes), returned
        if returned in ("loss", 1):
            self.metric_keys = [returned]
        self.state_width, self.blocks, self.head = self.inner.state_width, self.inner.blocks, self.inner.head
    def forward(self, tokens, state=None, resets=None):
        output = self.inner(tokens, state, resets)
        state, embedded = output.state, self.inner.embedding(tokens)
        losses = {"energy": embedded.square().mean(-1), "size": embedded.abs().mean((1, 2)),
                  "norm": self.inner.norm.weight.square().mean(), "other": tokens.float().mean()}
        if self.returned == "energy in one shape":
            losses["energy"] = losses["energy"].flatten()
        kept = [name for name in losses if self.returned == name or self.returned != "no norm" and name != "other"
                or name in ("energy", "size")]
        metrics = {"my/calls": 1.0, "my/last": tokens.float().mean(), "my/unknown": 1.0}
        metrics = {"metrics as a number": 3}.get(self.returned, metrics)
        return ModelOutput(output.logits, output.state, {name: losses[name] for name in kept}, metrics)

def build_model(vocab_size, dim, num_layers, *, returned="all"):
    return Regular(returned, vocab_size=vocab_size, dim=dim, num_layers=num_layers)

def bad_keys(vocab_size, dim, num_layers, keys=["energy"]):
    model = build_model(vocab_size, dim, num_layers)
    model.loss_keys = keys
    return model

taken_name = partial(bad_keys, keys={"z_loss": "tokens"})

class Missed:
    def __init__(self, form="tokens"):
        self.form = form
    def __call__(self, logits, targets):
        mask = targets != -100
        losses = 1 - logits.float().softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        return {"tokens": losses, "sum": (losses[mask].sum(), mask.sum()), "mean": (losses.mean(), {}),
                "flat": losses.detach(), "all": (losses.sum(), mask.numel())}[self.form]
"""
OWN, NOTHING = "objective.target=own_losses:Missed", "objective.losses={energy=0, size=0, norm=0}"
MODEL = ("model.target=own_losses:build_model", "model.dim=16", "model.num_layers=1")
LOSSES = ("token_ce", "energy", "size", "norm")
EVALUATED = "\n[eval]\nevery = 4\nbatches = 2\nholdout_fraction = 0.2\n"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_losses.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return write_tiny_config(tmp_path, EVALUATED)


def trained(config: Path, *sets: str, **options: Any) -> tuple[dict[tuple[str, int], dict[str, float]], str]:
    run_dir = config.parent / f"run{len(list(config.parent.glob('run*')))}"
    said = train(config, run_dir, *MODEL, *sets, extra={"PYTHONPATH": str(config.parent)}, **options)
    return read_rows(run_dir / "metrics.jsonl"), said


def adds_up(row: dict[str, float], names: tuple[str, ...], *, prefix: str = "") -> bool:
    return row[f"{prefix}loss"] == pytest.approx(sum(row[f"{prefix}objective/{name}"] for name in names), rel=2e-6)


@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("objective.chunk_tokens=8", "train.activation_checkpointing=block", FULL_ROWS),
        ("train.precision=bf16", "train.on_non_finite=skip", "objective.token_ce=0.5"),
    ],
    ids=lambda sets: " ".join(sets) or "plain",
)
def test_losses_are_trained_on_and_reported_whatever_the_step_does(config, sets):
    rows, said = trained(
        config, *sets, "objective.losses={energy=0.5, size=3}", "metrics.log_interval=3", "eval.batches=1000"
    )
    for at in (("train", 1), ("train", 3), ("train", 6)):
        assert adds_up(rows[at], LOSSES), rows[at]
    for step in (4, 6):
        assert adds_up(rows["eval", step], LOSSES, prefix="eval_"), rows["eval", step]
        assert "eval_my/last" in rows["eval", step]
        ce = rows["eval", step]["eval_objective/token_ce"] / (0.5 if "objective.token_ce=0.5" in sets else 1.0)
        assert rows["eval", step]["eval_perplexity"] == pytest.approx(math.exp(ce), rel=1e-6)
    # 2 micro-batches of each of the steps since the last logged one.
    assert [rows["train", step]["my/calls"] for step in (1, 3, 6)] == [2, 4, 6]
    assert said.count("'my/unknown' is left out") == 1
    assert "objective.losses: energy with weight 0.5, size with weight 3, norm with weight 1" in said
    assert rows["train", 6]["objective/norm"] == pytest.approx(1.0, abs=0.1)  # weight 1 without an entry


def test_what_replaces_the_cross_entropy_is_trained_on_and_reported(config):
    chunked, in_sums, of_model = (
        trained(config, *own, "eval.batches=1000", "metrics.per_source=true", "eval.depth=true")
        for own in ((OWN, "objective.chunk_tokens=8"), (OWN, "objective.args.form=sum"), ("objective.token_ce=0",))
    )
    for (rows, said), first in ((chunked, ("own",)), (in_sums, ("own",)), (of_model, ())):
        assert "off from now on" not in said
        for at, row in rows.items():
            prefix = "eval_" if at[0] == "eval" else ""
            assert adds_up(row, (*first, *LOSSES[1:]), prefix=prefix)
            assert f"{prefix}accuracy" in row
            assert not [key for key in row if "token_ce" in key or "perplexity" in key or "bits_per_byte" in key]
            if first:
                assert row[f"{prefix}loss"] == pytest.approx(chunked[0][at][f"{prefix}loss"], rel=1e-4)
        keys = {key for row in rows.values() for key in row}
        starts = ("source/", "modality/", "eval/depth/")
        assert [any(key.startswith(start) for key in keys) for start in starts] == [rows is chunked[0]] * 3


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("objective.losses.enrgy=1",), "objective.losses.enrgy: the model has no such loss; its loss_keys are energy"),
        (("model.target=own_losses:bad_keys",), "model.target: Regular.loss_keys is ['energy']; make it a dict"),
        *(((f"model.args.returned={x}",), f"Regular.metric_keys is [{x!r}]; make it a tuple") for x in ("loss", 1)),
        *(((f"objective.target=builtins:{x}",), y) for x, y in (("dict", "a dict, no func"), ("any", "; name what"))),
        (("objective.token_ce=0", NOTHING), "token_ce: is 0, and no other loss would be trained on; set loss_keys"),
        (("objective.token_ce=0", "objective.chunk_tokens=8"), "objective: no loss of logits is left"),
        ((OWN, "objective.args.form=flat"), "objective.target: fails: ValueError: what it returned has no gradient"),
        ((OWN, "objective.args.form=all"), "objective.target: fails on a few tokens: ValueError: the loss is nan"),
        (("model.args.returned=other",), 'returns the loss other, which is not in its loss_keys: {"other": "tokens"}'),
        (("model.args.returned=no norm",), "returns no loss norm in train(), which its loss_keys name"),
        (("model.args.returned=metrics as a number",), "returns metrics as a int, no mapping of names to numbers"),
        (("model.args.returned=energy in one shape",), "loss energy by tokens with the shape [16], not [1, 16] or []"),
        (("model.target=own_losses:taken_name",), "model.target: loss_keys name z_loss, which is a loss of the"),
        ((OWN, "objective.z_loss=0.1"), "objective: z_loss would have no effect beside target"),
        (("objective.args.form=sum",), "objective: args are those of a target of your own"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_run(config, capsys, sets, message):
    assert message in program(("check", "--config", config, *overrides(*MODEL, *sets)), capsys).mistake


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("model.args.returned=other",), "model.target: it returns the loss other, which is not in its loss_keys"),
        (("model.args.returned=no norm",), "model.target: it returns no loss norm in train()"),
        ((OWN, "objective.args.form=mean"), "fails: TypeError: returned torch.float32 [] and dict, not"),
    ],
)
def test_what_the_first_step_shows_ends_the_run(config, sets, message):
    _, said = trained(config, *sets, "model.contract=false", code=2)
    assert message in said, said


def test_an_evaluation_of_a_checkpoint_has_the_losses_but_imports_no_code_unasked(config, capsys, monkeypatch):
    run_dir = config.parent / "run"
    sets = (*MODEL, OWN, "objective.losses.energy=0.5", "eval.batches=1000")
    train(config, run_dir, *sets, extra={"PYTHONPATH": str(config.parent)})
    monkeypatch.chdir(config.parent)
    refused = program(("eval", run_dir), capsys)
    assert ": the config in" in refused.stderr, refused.stderr
    found = json.loads(program(("eval", run_dir, "--trust-code", "--json"), capsys).stdout)
    logged = read_rows(run_dir / "metrics.jsonl")["eval", 6]
    assert adds_up(logged, ("own", *LOSSES[1:]), prefix="eval_")
    assert {key: found["metrics"][key] for key in logged} == pytest.approx(logged, rel=1e-5)
