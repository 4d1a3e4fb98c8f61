"""A real run's samples, its weights and numbers exported, and a run that begins with them."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.in_process import program
from tests.support.runs import losses, run, train, write_tiny_config
from tests.support.wandb_file import find_wandb_file, read_history
from trainer.errors import UserError
from trainer.lab.weights import load_weights
from trainer.tools.saved_model import is_export, load_model
from trainer.tools.verbs.models import sample

CPU = torch.device("cpu")
SAMPLES = '\n[sample]\nevery = 2\nprompt = "the "\ntokens = 20\n\n[checkpoint]\nevery = 3\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with a config and a finished run that wrote samples."""
    path = tmp_path_factory.mktemp("export")
    config = write_tiny_config(path, SAMPLES)
    train(config, path / "run", "metrics.wandb.mode=offline", is_alone=True)
    exported = run("export", path / "run", "--format", "safetensors", "--out", path / "exported")
    assert exported.returncode == 0, exported.stderr
    return path


def generate(where, **changes):
    sample(str(where), **{"prompt": "the ", "tokens": 30, "seed": 4, "device": "cpu", **changes})


def samples_of(run_dir):
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "sample"]


def test_samples_go_to_the_events_and_to_wandb(folder):
    events = samples_of(folder / "run")
    assert [event["global_step"] for event in events] == [2, 4, 6]
    assert {(event["prompt"], bool(event["text"])) for event in events} == {("the ", True)}
    rows = read_history(find_wandb_file(folder / "run"))
    sent = {row["global_step"]: row["sample/text/path"] for row in rows if "sample/text/path" in row}
    assert [*sent] == [2, 4, 6]
    pages = [(folder / "run" / "wandb" / "latest-run" / "files" / path) for path in sent.values()]
    assert all("the \u2502" in page.read_text(encoding="utf-8") for page in pages)


def test_the_seed_decides_and_the_exported_model_says_the_same(folder, capsys, monkeypatch):
    def said(where, **changes):
        generate(folder / where, **changes)
        return capsys.readouterr().out

    text = said("run")
    assert text == said("run") == said("exported")
    assert text not in (said("run", seed=5), said("run", step=3))
    assert len(said("run", top_k=1, tokens=7)) <= 4 + 7 + 1
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = "\u200c\xa0\u3000\xad\n\t"  # parts of words and spaces, but nothing that a terminal acts on
    assert said("run", prompt=f"{shown}\x1b\x9b\u202e", tokens=1).startswith(f"{shown}\ufffd\ufffd\ufffd")


def test_absent_checkpoints_are_refused(folder, capsys):
    for step in (4, -1, "abc"):
        assert f"step {step}; use one of 3, 6" in program(["sample", folder / "run", "--step", step], capsys).mistake
    for absent in (folder / "nowhere", "x" * 300):
        with pytest.raises(UserError, match="is not a directory; name the directory of a run"):
            generate(absent)
    with pytest.raises(UserError, match="exported: has no complete checkpoint; it is an export"):
        generate(folder / "exported", step=3)
    (folder / "no_config").mkdir()
    shutil.copy(folder / "exported" / "model.safetensors", folder / "no_config")
    with pytest.raises(UserError, match=r"no_config/config.toml: cannot be read"):
        generate(folder / "no_config")


def test_a_run_begins_with_the_weights_and_a_resumed_one_with_its_own(folder, tmp_path, caplog):
    place, slow = (folder / "tiny.toml", tmp_path / "run"), ("optimizer.lr=1e-12", "scheduler.warmup_steps=1")
    weights = f"model.weights={folder / 'exported'}"
    said = train(*place, *slow, weights, "checkpoint.every=1", "train.steps=1")
    assert "beginning with the weights of" in said
    assert "tokenizer" not in said
    before, after = (load_model(path, step=None, device=CPU).model for path in (folder / "exported", tmp_path / "run"))
    for name, tensor in before.state_dict().items():
        assert torch.allclose(after.state_dict()[name], tensor, atol=1e-9, rtol=0), name
    (tmp_path / "tokenizer.json").touch()
    load_weights(after, folder / "exported", str(tmp_path / "tokenizer.json"))
    assert "trained with another tokenizer than" in caplog.text
    said = train(*place, *slow, "train.steps=2", more=("--resume", "auto"))
    assert "resuming after step 1" in said
    assert "beginning with" not in said
    assert abs(losses(tmp_path / "run" / "metrics.jsonl")[2] - losses(folder / "run" / "metrics.jsonl")[6]) < 0.5


def test_weights_of_another_shape_are_refused_by_name_by_check_and_run_alike(folder, capsys):
    wrong = ["--config", folder / "tiny.toml", "--set", f"model.weights={folder / 'exported'}", "--set", "model.dim=24"]
    for result in (program(["check", *wrong], capsys), run(*wrong)):
        assert result.returncode == 2
        assert "embedding.weight has the shape (257, 16), the model's (257, 24)" in result.stderr
        assert result.stderr.count("\n") == 1


def test_nothing_but_an_export_is_overwritten(folder, tmp_path, capsys, monkeypatch):
    out = tmp_path / "x"
    assert program(["export", folder / "run", "--out", out], capsys).returncode == 0
    assert {each.name for each in out.iterdir()} == {each.name for each in (folder / "exported").iterdir()}
    assert f"{out}: exists already; name" in program(["export", folder / "run", "--out", out], capsys).mistake
    assert "is not a directory; name" in program(["export", tmp_path / "nowhere", "--out", out], capsys).mistake
    assert "File name too long" in program(["export", folder / "run", "--out", "x" * 300], capsys).mistake
    assert program(["export", folder / "run", "--out", out, "--force"], capsys).returncode == 0
    shutil.copytree(folder / "exported", out / "another")
    for foreign, kept in ((folder, "run"), (out, "another")):
        ended = program(["export", folder / "run", "--format", "safetensors", "--out", foreign, "--force"], capsys)
        assert "with other files than an export" in ended.mistake
        assert (foreign / kept).is_dir()
    shutil.rmtree(out / "another")
    monkeypatch.setattr("pathlib.Path.rename", lambda path, target: path.rmdir())  # the first change fails
    assert "not empty" in program(["export", folder / "run", "--out", out, "--force"], capsys).mistake
    assert (out / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"shared": '{"a": []}'}, "(a is no other name of a stored tensor)"),
        ({"shared": '{"head.weight": "norm.weight"}'}, "(head.weight is no other name of a stored tensor)"),
        ({"shared": "[]"}, "(shared tensors are not named by others)"),
        ({"shared": "[" * 100_000}, "(nested too deeply)"),
    ],
)
def test_an_export_with_hostile_metadata_is_refused_in_one_line(folder, tmp_path, capsys, metadata, said):
    shutil.copy(folder / "exported" / "config.toml", tmp_path)
    assert not is_export(tmp_path), "which is without weights"
    save_file(load_file(folder / "exported" / "model.safetensors"), tmp_path / "model.safetensors", metadata)
    assert said in program(["sample", tmp_path], capsys).mistake


@pytest.mark.parametrize(("option", "value"), [("temperature", "nan"), ("seed", 10**30), ("tokens", 10**30)])
def test_numbers_beyond_all_measure_are_refused_in_one_line(folder, capsys, option, value):
    ended = program(["sample", folder / "run", f"--{option}", value], capsys)
    assert f"Invalid value for '--{option}'" in ended.mistake


def test_a_tokenizer_that_is_not_there_is_named_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = write_tiny_config(tmp_path).read_text()
    (tmp_path / "config.toml").write_text(text.replace("[data]\n", '[data]\ntokenizer = "words/tok.json"\n', 1))
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"words/tok.json: .*relative to the working directory.*go where the run"):
        load_model(tmp_path, step=None, device=CPU)
