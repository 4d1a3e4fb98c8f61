"""No code runs from data: checkpoints with a malicious pickle."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest

from tests.support.checkpoints import sign
from tests.support.fault_runs import ARGUMENTS, keep, make_config, whole_run
from tests.support.ranks import Ranks

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
