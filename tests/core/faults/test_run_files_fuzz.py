"""Anything in the files of a run, under every verb and a resume: an answer or one message, in time."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import random
import shutil
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.support.checkpoints import places, sign
from tests.support.fault_runs import ARGUMENTS, keep, make_config, whole_run
from tests.support.in_process import program
from tests.support.ranks import Ranks
from tests.support.runs import EVERY_FILE, write_tiny_config
from trainer.cli.parts import PARTS
from trainer.config.load import load_config
from trainer.errors import UserError
from trainer.training.main import train
from trainer.training.open_run import Launch

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]
CASES, CPU_SEC, SEED = 300, 40.0, 56
INTEGERS = [0, -1, 1, 2, 7, 2**31, 2**63 - 1, -(2**63), 10**30]
NUMBERS = [*INTEGERS, 0.0, -0.0, 1e-320, 1e308, math.inf, -math.inf, math.nan, 0.5]
KEYWORDS = ["auto", "off", "1e5", "true", "null", "os:system"]
WORDS = [*KEYWORDS, "", " ", "../../x", "/", "\0", "a" * 5000, "\u00e9\u202e\U0001f600", "[x]", "*", "**/*"]
WRONG: tuple[Any, ...] = (*NUMBERS, *WORDS, 2**62, 10**400, None, True, [], {}, [[1]], {"a": {"b": [None]}})
MANY = {f"key{number}": number for number in range(100_000)}
VERBS = """ls {0}/..
diagnose {0}
report {0} {1} --out {2}/page.html --force
sample {0} --tokens 2
eval {0}
export {0} --out {2}/model --force
data at {0} 3
check --config {0}/config.resolved.toml""".splitlines()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, Path]:
    """A config, and a run of it that was resumed, and whose weights were changed."""
    directory = tmp_path_factory.mktemp("files")
    config, run_dir = write_tiny_config(directory), directory / "run"
    for steps in (4, 6):
        sets = [*EVERY_FILE, f"train.steps={steps}", f"data.source.first.weight={steps}", "checkpoint.resume=auto"]
        assert train(load_config(config, sets), Launch(config_path=config, parts=PARTS, run_dir=str(run_dir))) == 0
    return config, run_dir


def with_wrong(content: Any, chance: random.Random) -> Any:
    """One value, or the whole, replaced by another one; or very many keys added."""
    every = list(places(content))
    if not every or chance.random() < 0.1:
        return chance.choice(WRONG)
    *parents, last = chance.choice(every)
    table = content
    for key in parents:
        table = table[key]
    table[last] = chance.choice(WRONG) if chance.random() < 0.85 else MANY
    return content


def spoil(path: Path, chance: random.Random) -> str:
    """Put something wrong into the place of a file; returns what."""
    content = path.read_bytes()
    kinds = ["link", "zero", "pipe", "directory", "gone", "cut", "bytes", "nested", *["values"] * 8]
    kind = chance.choice(kinds if path.suffix in (".json", ".jsonl", ".toml") or path.name == "COMPLETE" else kinds[:7])
    if kind in ("link", "zero", "pipe", "directory", "gone"):
        path.unlink()
    if kind in ("link", "zero"):
        path.symlink_to("/dev/zero" if kind == "zero" else os.environ["VICTIM"])
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "cut":
        path.write_bytes(content[: chance.randrange(len(content) + 1)])
    elif kind == "bytes":
        at = chance.randrange(len(content) + 1)
        path.write_bytes(content[:at] + chance.randbytes(20) + content[at:])
    elif kind == "nested":
        path.write_bytes(content + b"[" * 100_000)
    elif kind == "values" and path.suffix == ".toml":
        try:
            path.write_text(tomli_w.dumps(with_wrong(tomllib.loads(content.decode()), chance)))
        except (TypeError, ValueError, AttributeError):  # which TOML has not
            path.write_text("[train]\nsteps = inf\n")
    elif kind == "values":
        lines = content.splitlines() if path.suffix == ".jsonl" else [content]
        number = chance.randrange(len(lines))
        lines[number] = json.dumps(with_wrong(json.loads(lines[number]), chance)).encode()
        path.write_bytes(b"\n".join(lines) + b"\n")
    return kind


def resume(config: Path, run_dir: Path) -> None:
    with contextlib.suppress(UserError):
        table = load_config(config, [*EVERY_FILE, "train.steps=7", "checkpoint.resume=auto"])
        train(table, Launch(config_path=config, parts=PARTS, run_dir=str(run_dir)))


def test_nothing_in_the_files_of_a_run_hangs_a_verb_or_a_resume_or_ends_it_with_a_traceback(
    whole, tmp_path, capsys, monkeypatch
):
    config, original = whole
    victim = tmp_path / "victim"
    victim.write_text("precious\n")
    monkeypatch.setenv("VICTIM", str(victim))
    chance, found = random.Random(SEED), []
    names = sorted(
        str(path.relative_to(original)) for path in original.rglob("*") if path.is_file() and not path.is_symlink()
    )
    names += [name for name in names if Path(name).suffix in (".json", ".jsonl")] * 3
    for number in range(CASES):
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        run_dir = tmp_path / "runs" / "run"
        shutil.copytree(original, run_dir, symlinks=True)
        name = chance.choice(names)
        kind = spoil(run_dir / name, chance)
        is_part = name.startswith("checkpoints") and not name.endswith("COMPLETE") and (run_dir / name).is_file()
        if is_part and chance.random() < 0.5:
            sign((run_dir / name).parent)
        for verb in [*chance.sample(VERBS, 3), *["resume"] * (number % 3 == 0)]:
            began = time.process_time()
            try:
                if verb == "resume":
                    resume(config, run_dir)
                else:
                    ended = program(verb.format(run_dir, original, tmp_path).split(), capsys)
                    assert ended.returncode in (0, 1, 2, 3)
                    assert "Traceback" not in ended.stderr
            except (Exception, SystemExit) as error:  # noqa: BLE001 - each is a finding
                found.append(f"{number} {name} {kind}: {verb}: {error!r}"[:300])
            if (took := time.process_time() - began) > CPU_SEC:
                found.append(f"{number} {name} {kind}: {verb}: {took:.0f} s")
    assert victim.read_text() == "precious\n"
    assert not found, "\n".join(found)
    keep(7, "anything in any file of a run, under all verbs and resumes", lost="–", times=CASES)


class Malicious:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return os.system, (f"touch {self._path}",)


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
    (checkpoint / name).write_bytes(pickle.dumps({"model": Malicious(proof)}))
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
