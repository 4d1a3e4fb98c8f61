"""Who chooses the code that is imported: the config that the user names, and neither a checkpoint nor a stray file."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from tests.support.in_process import program
from tests.support.runs import ROOT, fresh, train, write_tiny_config
from trainer.config.schema import RunConfig
from trainer.errors import UserError
from trainer.tools.saved_model import read_checkpoint, refuse_code

MODEL = """\
from pathlib import Path
Path(__file__).with_name("imported").touch()
from trainer.model import build
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(working directory, run) of a model of the user's own, which lies in the working directory."""
    directory = tmp_path_factory.mktemp("code")
    config = write_tiny_config(directory)
    config.write_text(config.read_text().replace("[model]\n", '[model]\ntarget = "my_own_model:build"\n'))
    (directory / "my_own_model.py").write_text(MODEL)
    own = ("train.steps=2", "eval.holdout_fraction=0.3", "eval.every=2")
    train(config, directory / "run", *own, cwd=directory)
    assert (directory / "imported").exists(), "the plant works"
    return directory, directory / "run"


@pytest.fixture
def here(trained, monkeypatch):
    """In the working directory, with nothing imported yet."""
    directory, run_dir = trained
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("my_own_model", None)
    (directory / "imported").unlink(missing_ok=True)
    return directory, run_dir


def test_a_checkpoints_own_code_is_not_imported_by_itself(here, capsys):
    directory, run_dir = here
    said = program(["eval", run_dir], capsys).mistake
    assert "model.target: the config in " in said
    assert "names code: my_own_model:build; add --trust-code" in said
    assert not (directory / "imported").exists()


def test_it_is_with_the_flag_and_an_export_names_code_as_well(here, capsys, tmp_path):
    directory, run_dir = here
    out = tmp_path / "exported"
    done = program(["export", run_dir, "--format", "safetensors", "--out", out], capsys)
    assert done.returncode == 0, "weights alone need no code: " + done.stderr
    assert "add --trust-code" in program(["sample", out, "--tokens", "3"], capsys).mistake
    assert not (directory / "imported").exists()
    for verb in (["sample", out, "--tokens", "3"], ["eval", run_dir]):
        done = program([*verb, "--trust-code"], capsys)
        assert done.returncode == 0, done.stderr
    assert (directory / "imported").exists()


@pytest.mark.parametrize("key", ["eval.target", "data.source.0.format", "data.source.0.target"])
def test_an_evaluation_imports_no_other_code_of_it_either(here, key):
    content = read_checkpoint(here[1]).config.model_dump()
    content["model"]["target"] = None
    table = content["eval"] if key.startswith("eval") else content["data"]["source"][0]
    table[key.rpartition(".")[2]] = "stray:f"
    config = RunConfig.model_construct(**content)
    with pytest.raises(UserError, match=rf"{key}: the config in x .* code: stray:f"):
        refuse_code(config, "x", "data", "eval", trusted=False)
    refuse_code(config, "x", "model", trusted=False)
    refuse_code(config, "x", trusted=True)


LAUNCHERS = {
    "torchrun -m": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "trainer"],
    "train": ["train"],
}
STRAYS = ("typer", "rich", "wandb", "fsspec", "pydantic", "tomli_w", "safetensors", "yaml")


@pytest.mark.distributed
@pytest.mark.parametrize("launcher", ["train", pytest.param("torchrun -m", marks=pytest.mark.slow)])
def test_a_stray_file_is_not_taken_for_a_package_and_ones_own_module_is_found(trained, tmp_path, launcher):
    """In a clone of the repository: `trainer` itself is found where one stands."""
    directory, _ = trained
    clone = tmp_path / "clone"
    clone.mkdir()
    shutil.copy(ROOT / "train", clone)
    (clone / "trainer").symlink_to(ROOT / "trainer")
    (clone / "my_own_model.py").write_text(MODEL)
    for name in STRAYS:
        (clone / f"{name}.py").write_text(f"raise SystemExit('PLANTED {name}.py was imported')\n")
    # torchrun itself begins to search where it stands: that is torch's, and its packages are none of these.
    arguments = ["--config", str(directory / "tiny.toml"), "--run-dir", str(tmp_path / "run"), "--steps", "1"]
    done = fresh([sys.executable, *LAUNCHERS[launcher], *arguments], cwd=clone)
    assert done.returncode == 0, done.stderr
    assert "PLANTED" not in done.stderr
    assert (clone / "imported").exists()
    assert os.path.exists(tmp_path / "run" / "metrics.jsonl")
