"""The container files: their structure is right, and every command, option, file and extra that they name exists."""

from __future__ import annotations

import re
import shlex
import tomllib

import pytest
import typer
from torch.distributed.run import get_args_parser

from tests.support.runs import ROOT
from trainer.cli.main import app
from trainer.config.load import load_config

yaml = pytest.importorskip("yaml")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MANIFEST = ROOT / "deploy" / "kubernetes" / "pytorchjob.yaml"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"


@pytest.fixture
def job():
    return yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))


@pytest.fixture
def pod(job):
    return job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]


def options_of_train() -> set[str]:
    return {name for parameter in typer.main.get_command(app).params for name in parameter.opts}


def test_the_manifest_is_one_job_whose_parts_refer_to_each_other(job, pod):
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert [container["name"] for container in pod["containers"]] == ["pytorch"]
    container = pod["containers"][0]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert all(isinstance(each["value"], str) for each in container["env"]), "the API takes strings alone"
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in container["env"]
    assert container["image"] == f"trainer:{PROJECT['version']}"


@pytest.mark.parametrize("page", ["docs/cluster.md", "scripts/slurm/train.sbatch"])
def test_torchrun_starts_the_installed_program_from_any_directory(page):
    commands = re.findall(r"torchrun (?:[^\n]*\\\n)*[^\n]*", (ROOT / page).read_text(encoding="utf-8"))
    started = [each for each in commands if re.search(r"\btrain\b", each) and "--n" in each]
    assert [each for each in started if "--no-python" not in each] == [] != started


def test_torchrun_and_train_take_the_arguments(job, pod):
    container = pod["containers"][0]
    assert container["command"] == ["torchrun"]
    parsed = get_args_parser().parse_args([*container["args"]])
    elastic = job["spec"]["elasticPolicy"]
    replicas = job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]
    assert replicas == elastic["minReplicas"] == elastic["maxReplicas"]
    assert not any(argument.startswith("--nnodes") for argument in container["args"]), "PET_NNODES says it"
    assert parsed.rdzv_backend == elastic["rdzvBackend"] == "c10d"
    assert int(parsed.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert parsed.no_python
    assert parsed.training_script in PROJECT["scripts"]
    given = dict(argument.split("=", 1) for argument in parsed.training_script_args)
    assert given.keys() <= options_of_train()
    assert given["--config"].startswith("/etc/train/")
    assert load_config(ROOT / "train_configs" / "gpu_8x.toml", [given["--set"]]).checkpoint.every > 0


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def test_the_image_is_made_of_files_and_extras_that_exist():
    found = instructions()
    assert [name for name, _ in found][:2] == ["ARG", "FROM"]
    copied = [source for name, rest in found if name == "COPY" for source in shlex.split(rest)[:-1]]
    assert all((ROOT / source).exists() for source in copied), copied
    # What the build of the package reads.
    assert {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"], "trainer"} <= {*copied}
    extras = next(rest.partition("=")[2] for name, rest in found if name == "ARG" and rest.startswith("EXTRAS"))
    assert {*extras.split(",")} <= PROJECT["optional-dependencies"].keys()
    installs = [rest for name, rest in found if name == "RUN" and "pip install" in rest]
    assert ["-c constraints.txt" in each for each in installs] == [True]
    named = re.findall(r"train_configs/\w+\.toml", DOCKERFILE.read_text() + MANIFEST.read_text())
    assert named
    assert all((ROOT / path).is_file() for path in named)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert not {*copied} & {*ignored}
