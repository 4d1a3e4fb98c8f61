"""Averaged weights by a plain recurrence over recorded weights, and the best checkpoint over evaluations with known scores."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support import faulty_model
from tests.support.checkpoints import model_content, sign
from tests.support.in_process import plan_of, train_here
from tests.support.ranks import checkpoint_differences
from tests.support.runs import read_rows, write_tiny_config
from trainer.errors import UserError
from trainer.lab.extensions import refuse_unfit_best
from trainer.objective import Auxiliary
from trainer.tools.offline import evaluate_checkpoint
from trainer.training import checkpoint
from trainer.training.plan import build_model

EMA, STEPS, REJECTED = 0.75, 6, 3
CPU = torch.device("cpu")
FROZEN = "blocks.0.mlp_norm.weight"


def build(dtype: str, **sizes: int) -> torch.nn.Module:
    """The model in numbers of a type, with a frozen parameter and a buffer that counts forwards."""
    model = faulty_model.build(**sizes)
    model.implementation = "of our own"  # which built-in families have as a method
    model.get_parameter(FROZEN).requires_grad_(False)
    model.register_buffer("seen", torch.zeros(()))
    model.register_forward_pre_hook(lambda *_: model.seen.add_(model.training) and None)
    return model.to(getattr(torch, dtype))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def averaged(request, tmp_path_factory):
    """A directory with a run of averages, whose third of six steps is rejected, and what trains more of its like."""
    directory = tmp_path_factory.mktemp(request.param)
    config = write_tiny_config(directory)
    sets = [f"model.target={__name__}:build", f'model.args.dtype="{request.param}"', "model.contract=false"]
    sets += ['train.on_non_finite="skip"', "checkpoint.every=1", "checkpoint.keep_last=9", "eval.every=2"]
    sets += ["eval.holdout_fraction=0.2", "eval.batches=100000", f"train.steps={STEPS}", "metrics.log_interval=4"]

    def go(name, *more, ema=EMA, rejected=REJECTED):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FAULT", json.dumps({"what": "nan", "step": rejected}))
            train_here(config, directory / name, *sets, "metrics.per_source=true", f"train.ema={ema}", *more)
        return directory / name

    return go("run"), go


def at(run_dir, step):
    return run_dir / "checkpoints" / f"step_{step:08d}"


def averages(path):
    return {name.removeprefix("ema."): each for name, each in model_content(path)["others"].items()}


def test_averages_are_the_recurrence_over_the_weights_after_each_step_that_was_taken(averaged):
    run_dir, _ = averaged
    expected = {name: average.double() for name, average in averages(at(run_dir, 1)).items()}  # its begin: see below
    for step in range(2, STEPS + 1):
        weights, found = model_content(at(run_dir, step))["model"], averages(at(run_dir, step))
        assert found.keys() == expected.keys() == weights.keys() - {FROZEN, "seen"}
        for name, average in found.items():
            if step != REJECTED:
                expected[name] = EMA * expected[name] + (1 - EMA) * weights[name].double()
            assert average.dtype == torch.float32
            np.testing.assert_allclose(average, expected[name], rtol=1e-5, atol=1e-7, err_msg=f"{name}, {step}")


def test_averages_change_nothing_and_are_evaluated_and_exported_as_the_weights_are(averaged, verb):
    run_dir, go = averaged
    plain, out = go("plain", ema=0), run_dir.with_name("exported")
    ours, others = (model_content(at(each, STEPS))["model"] for each in (run_dir, plain))
    assert all(torch.equal(each, others[name]) for name, each in ours.items())
    rows, plain_rows = (read_rows(each / "metrics.jsonl")["eval", STEPS] for each in (run_dir, plain))
    assert {key: rows[key] for key in plain_rows} == plain_rows
    assert rows.keys() - plain_rows.keys() == {f"ema/{key}" for key in plain_rows}
    documents = [(each / "evaluations" / f"step_{STEPS:08d}.jsonl").read_text() for each in (run_dir, plain)]
    assert documents[0] == documents[1]
    for ema, key in ((False, "eval_loss"), (True, "ema/eval_loss")):
        _, found = evaluate_checkpoint(run_dir, [], step=None, ema=ema, device=CPU, trust_code=True)
        assert found["eval_loss"] == pytest.approx(rows[key], rel=1e-6)
    # Exported are the averages in the type of the weights, and what has none as the model has it.
    assert verb("export", run_dir, "--ema", "--out", out).returncode == 0
    exported, own = load_file(out / "model.safetensors"), averages(at(run_dir, STEPS))
    for name, weight in ours.items():
        assert torch.equal(exported[name], own.get(name, weight).to(weight.dtype)), name
    assert ours["seen"] > 0
    said = [verb("sample", each, "--ema", "--trust-code", "--tokens", 3) for each in (run_dir, plain, out)]
    assert [each.returncode for each in said] == [0, 2, 2]
    assert "it has no averaged weights, for which a run has train.ema; name another one" in said[1].stderr


def test_a_resumed_average_has_the_same_bits_and_one_that_is_turned_on_or_off_is_said(averaged, capsys):
    run_dir, go = averaged
    resume = f"checkpoint.resume={at(run_dir, 2)}"
    resumed = go("resumed", resume, rejected=REJECTED - 2)
    assert checkpoint_differences(at(run_dir, STEPS), at(resumed, STEPS)) == []
    rows = [read_rows(each / "metrics.jsonl")["eval", STEPS] for each in (run_dir, resumed)]
    assert rows[0] == rows[1]
    assert not re.search("averages begin|dropped", capsys.readouterr().err)
    off = go("off", resume, "metrics.per_source=false", "train.steps=4", ema=0, rejected=99)
    assert re.findall("are dropped|left out", capsys.readouterr().err) == ["are dropped"]
    assert averages(at(off, 4)) == {}
    on = go("on", f"checkpoint.resume={at(off, 4)}", "train.steps=5", rejected=99)
    assert "train.ema: the averages begin with the weights after step 4" in capsys.readouterr().err
    before, after = (model_content(at(each, step))["model"] for each, step in ((off, 4), (on, 5)))
    for name, average in averages(at(on, 5)).items():
        expected = EMA * before[name].double() + (1 - EMA) * after[name].double()
        np.testing.assert_allclose(average, expected, rtol=1e-5, atol=1e-7, err_msg=name)


def score(*, step: int, **_: object) -> dict[str, float]:
    """For `[eval] target`: the scores by step are in the environment."""
    return {"score": json.loads(os.environ["SCORES"]).get(str(step), 9.0), "loss": -1.0}


@pytest.fixture
def go(tmp_path, monkeypatch):
    """Train here, with scores by step; the steps of the checkpoints, newest first, and the best."""
    sets = ["eval.every=2", "metrics.log_interval=100", "checkpoint.every_minutes=0", "checkpoint.keep_last=1"]
    sets += [f"eval.target={__name__}:score", 'checkpoint.keep_best="eval/score"']

    def train(steps, scores, *more, code=0):
        monkeypatch.setenv("SCORES", json.dumps(scores))
        train_here(write_tiny_config(tmp_path), tmp_path / "run", *sets, f"train.steps={steps}", *more, code=code)
        found = checkpoint.complete_checkpoints(tmp_path / "run" / "checkpoints")
        return [*map(checkpoint.step_of, found)], checkpoint.best_step(found[0]) if found else None

    return train


NAN = float("nan")


def test_the_best_is_saved_at_once_survives_later_ones_resumes_and_is_what_verbs_read(go, tmp_path, verb, capsys):
    assert go(8, {2: NAN, 4: 3.0, 6: NAN, 8: 3.0}) == ([8, 4], 4)  # the last step is always saved
    assert capsys.readouterr().err.splitlines()[-1].endswith("best: step 4, eval/score 3.0000")
    run_dir, auto = tmp_path / "run", "checkpoint.resume=auto"
    assert go(10, {10: 2.0}, auto) == ([10], 10)
    assert go(13, {12: 2.5}, auto) == ([13, 10], 10)
    assert "after step 10" in verb("export", run_dir, "--step", "best", "--out", tmp_path / "out").stderr
    assert json.loads(verb("eval", run_dir, "--step", "best", "--trust-code", "--json").stdout)["step"] == 10
    every = ("checkpoint.every=2", "checkpoint.keep_every=2", auto)
    assert go(18, {14: 1.0, 16: 0.5}, *every) == ([18, 16, 14, 10], 16)
    # Back to step 14: the best of then, and later ones are set aside.
    assert go(17, {16: 3.0}, f"checkpoint.resume={at(run_dir, 14)}") == ([17, 14], 14)
    assert (run_dir / "checkpoints" / "abandoned" / "step_00000016").is_dir()
    # One that is gone, as after a step back, or in another directory, is no best.
    shutil.rmtree(at(run_dir, 14))
    assert go(19, {18: 7.0}, auto) == ([19, 18], 18)
    (at(run_dir, 19) / "state.json").write_text("{}")
    assert verb("sample", run_dir, "--step", "best").returncode == 2


def test_an_evaluation_of_a_checkpoint_in_another_directory_is_no_best(go, tmp_path):
    go(2, {2: 1.0})
    state = json.loads((at(tmp_path / "run", 2) / "state.json").read_text())
    # As of a run that was stopped while it evaluated.
    state |= {"evaluation_is_due": True, "extensions": {**state["extensions"], "best": {}}}
    (at(tmp_path / "run", 2) / "state.json").write_text(json.dumps(state))
    sign(at(tmp_path / "run", 2))
    (tmp_path / "run").rename(tmp_path / "before")
    resume = f"checkpoint.resume={at(tmp_path / 'before', 2)}"
    assert go(5, {2: 1.0, 4: 2.0}, resume) == ([5, 4], 4)


def test_without_a_best_the_verbs_say_so_and_a_number_that_never_comes_ends_the_run(go, tmp_path, verb, capsys):
    assert go(4, {2: NAN, 4: NAN}) == ([4], -1)
    assert "has no best checkpoint" in verb("sample", tmp_path / "run", "--step", "best").stderr
    shutil.rmtree(tmp_path / "run")
    assert go(6, {}, 'checkpoint.keep_best="eval/scores"', "eval.holdout_fraction=0.2", code=1) == ([], None)
    assert "metric 'eval/loss' is left out" in capsys.readouterr().err  # shown as the held-out loss is
    reason = json.loads((tmp_path / "run" / "status.json").read_text())["reason"]
    assert "checkpoint.keep_best: eval/scores is no number of an evaluation" in reason


FIT = ("eval_loss", "ema/eval_loss", "eval_objective/token_ce", "eval/books/bits_per_byte", "eval/depth/8/loss")
UNFIT = ("eval_los", "eval_lr", "loss", "eval_loss_se", "eval/boks/loss", "ema/loss", "eval/books/accuracy")
SETTINGS = {"ema/": "train.ema=0.9", "depth": "eval.depth=true", "eval_": "eval.holdout_fraction=0.2"}


@pytest.mark.parametrize("key", [*FIT, *UNFIT])
def test_a_key_that_no_evaluation_gives_or_that_should_rise_is_refused_by_name(key, tmp_path):
    sets = [f'eval={{every=2, source=[{{name="books", paths=["{tmp_path}/*/*/*"]}}]}}', f'checkpoint.keep_best="{key}"']
    for off in (None, *SETTINGS):
        plan = plan_of(write_tiny_config(tmp_path), *sets, *(SETTINGS[part] for part in SETTINGS if part != off))
        is_fit = key in FIT and (off is None or off not in key.replace("eval/depth", "eval_depth"))
        with nullcontext() if is_fit else pytest.raises(UserError, match=f"{key} is no number of this run's eval"):
            refuse_unfit_best(plan, build_model(plan.config.model, plan.vocab_size), Auxiliary())
