"""Every command, option, file and extra that the container files name exists, and the examples of docs/mixing.md and
docs/ledger.md run as they stand."""

from __future__ import annotations

import re
import shlex
import tomllib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from torch.distributed.run import get_args_parser
from torch.nn.functional import cross_entropy

from tests.support.runs import ROOT, make_corpus
from trainer.cli.main import app
from trainer.config.load import load_config
from trainer.ledger import Ledger, LedgerOptions
from trainer.model import build

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MANIFEST = ROOT / "deploy" / "kubernetes" / "pytorchjob.yaml"
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")


def test_the_manifest_is_one_job_that_torchrun_and_train_understand():
    yaml = pytest.importorskip("yaml")
    spec = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))["spec"]
    worker, elastic = spec["pytorchReplicaSpecs"]["Worker"], spec["elasticPolicy"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert (container["image"], container["command"]) == (f"trainer:{PROJECT['version']}", ["torchrun"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert all(isinstance(each["value"], str) for each in container["env"]), "the API takes strings alone"
    parsed = get_args_parser().parse_args([*container["args"]])
    assert worker["replicas"] == elastic["minReplicas"] == elastic["maxReplicas"]
    assert not any(argument.startswith("--nnodes") for argument in container["args"]), "PET_NNODES says it"
    assert parsed.rdzv_backend == elastic["rdzvBackend"] == "c10d"
    assert int(parsed.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert (parsed.no_python, parsed.training_script) == (True, "train")
    given = dict(argument.split("=", 1) for argument in parsed.training_script_args)
    assert given.keys() <= {name for parameter in typer.main.get_command(app).params for name in parameter.opts}
    assert load_config(ROOT / "train_configs" / "gpu_8x.toml", [given["--set"]]).checkpoint.every > 0


def test_the_image_is_made_of_files_and_extras_that_exist():
    lines = [line.split(None, 1) for line in re.sub(r"\\\n", " ", DOCKERFILE).splitlines() if line]
    copied = [source for name, rest in lines if name == "COPY" for source in shlex.split(rest)[:-1]]
    # What the build of the package reads.
    assert {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"], "trainer"} <= {*copied}
    extras = next(rest.partition("=")[2] for name, rest in lines if name == "ARG" and rest.startswith("EXTRAS"))
    assert {*extras.split(",")} <= PROJECT["optional-dependencies"].keys()
    assert "-c constraints.txt" in next(rest for name, rest in lines if name == "RUN" and "pip install" in rest)
    named = re.findall(r"train_configs/\w+\.toml", DOCKERFILE + MANIFEST.read_text())
    assert all((ROOT / path).exists() for path in [*copied, *named])
    assert not {*copied} & {*(ROOT / ".dockerignore").read_text(encoding="utf-8").split()}


def examples_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_examples_run(tmp_path, monkeypatch, capsys):
    (first,) = examples_of("mixing.md")
    monkeypatch.chdir(tmp_path)
    make_corpus(tmp_path / "data" / "pytext")
    exec(first, {})
    assert "(8, 256) {'stream_mixing/active/remaining_min'" in capsys.readouterr().out


def test_the_loop_of_ones_own_carries_every_state() -> None:
    (example,) = examples_of("ledger.md")
    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (2, 12))
    ids, model, seen = np.array([5, 7]), build(11, 8, 2), []
    batches = []
    for cell, own in enumerate(tokens.split(4, dim=1)):
        last = np.full(2, cell == 2)
        batches.append(
            SimpleNamespace(group_ids=ids, cell_index=np.full(2, cell), is_last=last, tokens=own, targets=own)
        )

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(logits.detach())
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    names = {"Ledger": Ledger, "LedgerOptions": LedgerOptions, "model": model, "batches": batches, "loss_of": loss_of}
    exec(example, names)
    torch.testing.assert_close(torch.cat(seen, dim=1), model(tokens).logits.detach(), rtol=1e-5, atol=1e-5)
    assert names["ledger"].drain_metrics()["ledger/live_groups"] == 0
