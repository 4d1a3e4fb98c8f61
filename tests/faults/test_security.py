"""No code runs from data: checkpoints with a malicious pickle, and names that point out of the run directory."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest

from tests.support.checkpoints import sign
from tests.support.fault_runs import ARGUMENTS, keep, make_config, whole_run
from tests.support.ranks import Ranks
from tests.support.runs import run

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


class Malicious:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return os.system, (f"touch {self._path}",)


def as_plain_pickle(file: Path, proof: Path) -> None:
    file.write_bytes(pickle.dumps({"model": Malicious(proof)}))


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    directory = tmp_path_factory.mktemp("security")
    config = make_config(directory)
    return config, whole_run(config, directory / "run", "--steps", 5)


@pytest.mark.parametrize("name", ["model_000.safetensors", "rank_001.safetensors"])
def test_a_malicious_pickle_in_a_checkpoint_does_not_run(untouched, tmp_path, name):
    config, whole = untouched
    run_dir, proof = tmp_path / "run", tmp_path / "proof"
    checkpoint = run_dir / "checkpoints" / "step_00000005"
    shutil.copytree(whole, run_dir, symlinks=True)
    as_plain_pickle(checkpoint / name, proof)
    # The plant works: plain unpickling runs it.
    pickle.loads((checkpoint / name).read_bytes())
    assert proof.exists()
    proof.unlink()
    sign(checkpoint)
    arguments = ("--config", config, "--run-dir", run_dir, "--resume", "auto", *ARGUMENTS, "--steps", 8)
    with Ranks(arguments, logs=tmp_path / "logs") as ranks:
        codes = ranks.wait()
        said = ranks.said()
    assert 2 in codes
    assert 0 not in codes
    assert "cannot be read" in said
    assert "Traceback" not in said
    assert not proof.exists()
    keep(8, f"malicious pickle in {name}, in a plain pickle, with the marker made to agree", lost="–")


def test_code_that_a_checkpoint_names_is_not_imported(untouched, tmp_path):
    _, whole = untouched
    run_dir, proof = tmp_path / "run", tmp_path / "proof"
    shutil.copytree(whole, run_dir, symlinks=True)
    (tmp_path / "planted.py").write_text(f"import pathlib\npathlib.Path({str(proof)!r}).touch()\n")
    path = run_dir / "checkpoints" / "step_00000005"
    state = json.loads((path / "state.json").read_text())
    state["config"]["model"]["target"] = "planted:build"
    (path / "state.json").write_text(json.dumps(state))
    sign(path)
    verbs = (["sample", run_dir], ["eval", run_dir], ["export", run_dir, "--format", "hf", "--out", tmp_path / "out"])
    for verb in verbs:
        result = run(*verb, cwd=tmp_path)
        assert result.returncode == 2, result.stderr
        assert "names code: planted:build; add --trust-code" in result.stderr
    assert not proof.exists()
    run("sample", run_dir, "--trust-code", cwd=tmp_path)
    assert proof.exists(), "the plant works"
    keep(8, "code named in a checkpoint's state.json", lost="–", times=3)


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "status.json"])
def test_a_link_in_the_place_of_a_runs_file_is_not_followed(untouched, tmp_path, name):
    config, whole = untouched
    run_dir, victim = tmp_path / "run", tmp_path / "victim"
    shutil.copytree(whole, run_dir, symlinks=True)
    victim.write_text("precious, without a newline")
    (run_dir / name).unlink()
    (run_dir / name).symlink_to(victim)
    result = run("--config", config, "--run-dir", run_dir, "--resume", "auto", *ARGUMENTS, "--steps", 8)
    assert result.returncode == 2, result.stderr
    assert "a symbolic link, not a plain file" in result.stderr
    assert victim.read_text() == "precious, without a newline"
    keep(7, f"a link in the place of {name}")


ESCAPES = [
    ("--set", "run.name=../../x"),
    ("--set", "run.name=/x"),
    ("--set", "run.name=.."),
    ("--set", 'data.source=[{name="../x", root="corpus"}]'),
    ("--set", 'data.mixing.batch_size_by_modality={"../../x"=2}'),
]


@pytest.mark.parametrize("escape", ESCAPES, ids=lambda escape: escape[1])
def test_names_cannot_leave_the_run_directory(tmp_path, escape):
    config = make_config(tmp_path / "inside")
    before = sorted(tmp_path.rglob("*"))
    result = run("--config", config, "--steps", 2, *escape)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(tmp_path.rglob("*")) == before
    keep(8, "names that point out of the run directory (run, source, modality)", lost="–", times=len(ESCAPES))
