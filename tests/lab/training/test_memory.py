"""The memory that `train check` predicts is what the run's own step takes, counted tensor by tensor, and as a process."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.in_process import train_here
from tests.support.runs import ROOT, write_tiny_config
from trainer.cli.parts import PARTS
from trainer.config.load import load_config
from trainer.errors import UserError
from trainer.lab.memory import LiveBytes, memory_lines, predict_memory
from trainer.training.setup.plan import Plan, make_plan

MB = 1e6
MOSTLY_WEIGHTS = ("model.dim=512", "data.seq_len=64", "data.mixing.batch_size=4")


def plan_of(tmp_path: Path, *sets: str, world_size: int = 1) -> Plan:
    config = write_tiny_config(tmp_path)
    return make_plan(load_config(config, list(sets)), config, world_size, parts=PARTS)


def test_storages_are_counted_once_and_until_they_go():
    with LiveBytes() as live:
        one = torch.zeros(1000)
        view = one[10:].view(2, -1)
        assert live.now == 4000
        two = one.double()
        assert (live.now, live.peak) == (12_000, 12_000)
        del one
        assert live.now == 12_000  # the view holds it
        del view
        assert live.now == 8000
        two = two + 1
        assert (live.now, live.peak) == (8000, 16_000)
    del two


def test_parts_are_what_they_are_by_count(tmp_path):
    plan = plan_of(tmp_path, "ledger.capacity=100", "model.dim=32")
    memory = predict_memory(plan)
    weights = 4 * plan.num_parameters()
    assert memory.weights == weights
    assert memory.optimizer == pytest.approx(2 * weights, rel=0.02)
    assert memory.ledger == 100 * plan.state_width() * 4
    assert memory.buckets == 0
    assert predict_memory(plan_of(tmp_path, "model.dim=32", world_size=2)).buckets == weights
    sgd = predict_memory(plan_of(tmp_path, "model.dim=32", "optimizer.name=sgd"))
    assert sgd.optimizer == pytest.approx(weights, rel=0.02)


@pytest.mark.parametrize(
    ("world_size", "sets", "shards"), [(4, ("strategy=hsdp", "replicas=2"), 2), (64, ("strategy=fsdp",), 64)]
)
def test_a_rank_of_several_holds_its_share_of_the_model(tmp_path, world_size, sets, shards):
    """Rows do not divide by 64 everywhere: a share is rounded up to whole rows."""
    distributed = [f"distributed.{each}" for each in sets]
    sizes = ("model.dim=128", "train.micro_batches=2")
    plan = plan_of(tmp_path, *sizes, *distributed, world_size=world_size)
    memory = predict_memory(plan)
    share = pytest.approx(4 * plan.num_parameters() / shards, rel=0.12 if shards == 64 else 0.02)
    assert (memory.weights, memory.optimizer / 2, memory.gradients) == (share, share, share)
    assert memory.buckets == 0
    held = memory.weights + memory.optimizer + memory.gradients + memory.ledger
    assert memory.peak > held


def test_what_makes_a_sharded_step_smaller_or_larger_shows(tmp_path):
    sizes = ("data.seq_len=8", "model.dim=128", "model.num_layers=3", "train.micro_batches=2")

    def peak(*sets: str) -> int:
        return predict_memory(plan_of(tmp_path, *sizes, *(f"distributed.{each}" for each in sets), world_size=4)).peak

    fsdp = peak("strategy=fsdp")
    assert fsdp < 0.9 * peak("strategy=hsdp", "replicas=2") < 0.8 * peak("strategy=ddp")
    assert peak("strategy=fsdp", "reshard_after_forward=false") > 1.1 * fsdp
    assert peak("strategy=fsdp", "accumulate=whole") > 1.1 * fsdp


def test_no_process_group_is_left_behind(tmp_path):
    plan = plan_of(tmp_path, "distributed.strategy=fsdp", world_size=4)
    before = predict_memory(plan)
    assert not torch.distributed.is_initialized()
    with pytest.raises(TimeoutError):
        predict_memory(plan, most_seconds=0.01)
    assert not torch.distributed.is_initialized()
    assert predict_memory(plan) == before


def test_what_makes_a_step_smaller_or_larger_shows(tmp_path):
    sizes = ("data.seq_len=128", "data.mixing.batch_size=8", "model.dim=64", "model.num_layers=3", "ledger.capacity=64")

    def peak(*sets: str) -> int:
        return predict_memory(plan_of(tmp_path, *sizes, *sets)).peak

    plain = peak()
    assert peak("train.activation_checkpointing=block") < 0.7 * plain
    assert peak("objective.chunk_tokens=64") < 0.95 * plain
    assert peak("train.compile=true") < 0.95 * plain
    assert peak("data.mixing.batch_size=16") > 1.7 * plain
    assert peak("train.precision=bf16") < 0.95 * plain
    assert peak("data.max_group_cells=8", "train.tbptt_cells=2") > 1.7 * plain


@pytest.mark.parametrize(
    ("target", "moments"), [("torch.optim:Adamax", 2), ("torch.optim:Adagrad", 1), ("torch.optim:SGD", 0)]
)
def test_the_state_of_an_optimizer_of_one_s_own_is_counted(tmp_path, target, moments):
    """These read numbers of the host, which the step without numbers does not have."""
    memory = predict_memory(plan_of(tmp_path, f"optimizer.target={target}"))
    assert memory.optimizer == pytest.approx(moments * memory.weights, rel=0.01, abs=1000)


def test_the_generators_and_the_gradient_mode_are_left_as_they_were(tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    predict_memory(plan_of(tmp_path, "model.family=lstm", "model.args={dropout=0.5}"))
    assert torch.equal(torch.rand(3), expected)
    assert torch.is_grad_enabled()


CHECKPOINTED = "train.activation_checkpointing=block"
FREED = """
import ctypes
from pathlib import Path
from trainer.cli.launch import give_back_freed_blocks

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
give_back_freed_blocks()
libc.free(libc.malloc(16 * 2**20))
before, blocks = resident(), []
for _ in range(20):
    blocks.append(libc.malloc(6 * 2**20))
    ctypes.memset(blocks[-1], 1, 6 * 2**20)
    libc.malloc(500_000)  # stays behind it, so that none is at the end of the heap
for block in blocks:
    libc.free(block)
print(resident() - before)
"""


FULL = """
import itertools, torch
from trainer.model import build as build_ours

def build(vocab_size, dim, num_layers):
    model, calls = build_ours(vocab_size, dim=dim, num_layers=num_layers), itertools.count()
    def fill(_, args, kwargs):
        if next(calls) == 7:
            torch.empty(1 << 50, dtype=torch.uint8, device=kwargs["tokens"].device)
    model.register_forward_pre_hook(fill, with_kwargs=True)
    return model
"""


@pytest.mark.cuda
def test_a_run_out_of_memory_says_what_took_it_and_which_settings_take_less(tmp_path, device, monkeypatch, caplog):
    (tmp_path / "full_model.py").write_text(FULL)
    monkeypatch.syspath_prepend(str(tmp_path))
    is_cuda = str(device.type == "cuda").lower()
    own = [f"train.device={device.type}", "model.target=full_model:build", "model.dim=128", "model.contract=false"]
    own += [f"train.memory_snapshot={is_cuda}", "train.compile=false", "train.cuda_graph=false"]
    train_here(write_tiny_config(tmp_path), tmp_path / "run", *own, "train.precision=fp32", code=1)
    said = caplog.text
    rows = [line.replace(",", "").split(" MB") for line in said.partition(" measured\n")[2].splitlines()]
    (weights, states, gradients), peak = ([float(row[0].split()[-1]), float(row[1])] for row in rows[:3]), rows[5]
    assert 0 < weights[0] == weights[1] == gradients[0] == gradients[1]
    assert states[0] == states[1] == pytest.approx(2 * weights[0], rel=0.02)
    peaks = [
        float(peak[0].split()[1]),
        *(float(row[0].split()[-1]) for row in rows[6:] if "is predicted with" in row[-1]),
    ]
    assert len(peaks) > 2
    assert peaks[1:] == sorted(peaks[1:]), "the best first"
    assert max(peaks) == peaks[0], "what takes more is left out"
    assert "data.mixing.batch_size=2 and train.micro_batches=4" in said
    assert (tmp_path / "run" / "memory_rank_0.pickle").exists() == (device.type == "cuda")


def test_without_a_prediction_settings_are_named_all_the_same(tmp_path):
    lines = "\n".join(memory_lines(None, {"weights": 2 * 10**9, "peak": 3 * 10**9}, {("a=1", "b=2"): None}))
    assert re.search(r"weights +not known +2,000.0 MB\n", lines), lines
    assert re.search(r"activations and others +not known +1,000.0 MB\n", lines), lines
    assert lines.endswith("a=1 and b=2 may help")


def test_a_snapshot_of_a_cpu_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"train.memory_snapshot: records CUDA's memory, not that of cpu; remove it"):
        train_here(write_tiny_config(tmp_path), tmp_path / "run", "train.memory_snapshot=true")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("kept", [False, True])
def test_freed_blocks_are_given_back_unless_the_user_wants_otherwise(kept):
    environment = {**os.environ, **({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432"} if kept else {})}
    found = subprocess.run([sys.executable, "-c", FREED], env=environment, capture_output=True, check=True, cwd=ROOT)
    assert (int(found.stdout) > 100 * MB) == kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "sets"),
    [
        (2, ("objective.chunk_tokens=256", CHECKPOINTED)),
        (1, ("train.precision=bf16", "model.family=transformer", "optimizer.name=muon")),
        (4, ("distributed.strategy=hsdp", "distributed.replicas=2", "train.micro_batches=2", *MOSTLY_WEIGHTS)),
    ],
)
def test_a_process_takes_what_was_predicted(tmp_path, nproc, sets):
    """Resident memory of the run's ranks; where small tensors prevail, with all blocks that glibc keeps given back at once."""
    config = write_ids_config(tmp_path)
    words = [word for each in sets for word in ("--set", each)]
    predicted = predict_memory(make_plan(load_config(config, list(sets)), config, nproc, parts=PARTS)).peak
    command = [sys.executable, "-m", "trainer", "--config", str(config), *words]
    command += ["--nproc", str(nproc)] if nproc > 1 else []
    small_blocks = {} if CHECKPOINTED in sets else {"MALLOC_MMAP_THRESHOLD_": "65536"}
    environment = {**os.environ, **small_blocks, "OMP_NUM_THREADS": "1"}
    tiny = ["--set", "data.seq_len=8", "--set", "model.dim=8"]
    small = most_resident([*command, *tiny, "--run-dir", str(tmp_path / "small")], environment, nproc)
    found = most_resident([*command, "--run-dir", str(tmp_path / "run")], environment, nproc)
    assert found - small == pytest.approx(predicted, rel=0.1), (found / MB, small / MB, predicted / MB)


def write_ids_config(directory: Path) -> Path:
    """A config whose micro-batches are all full."""
    (directory / "ids" / "all").mkdir(parents=True)
    tokens = np.random.default_rng(0).integers(500, size=400_000, dtype=np.uint16)
    np.save(directory / "ids" / "all" / "tokens.npy", tokens)
    path = directory / "ids.toml"
    path.write_text(f"""
run = {{ name = "ids" }}
train = {{ steps = 3 }}
model = {{ dim = 256, num_layers = 8 }}
ledger = {{ capacity = 64 }}
metrics = {{ wandb = {{ mode = "disabled" }} }}

[data]
seq_len = 256
tokenizer = "ids"
vocab_size = 500
max_group_cells = 8
mixing = {{ num_streams_mixed = 1, batch_size = 16 }}
source = [{{ name = "ids", root = "{directory}/ids" }}]
""")
    return path


def most_resident(command: list[str], environment: dict[str, str], ranks: int) -> float:
    """The highest resident memory of a run's rank, in bytes, as seen every 20 ms."""
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        peaks: dict[int, int] = {}
        while process.poll() is None:
            for child in descendants(process.pid):
                try:
                    status = Path(f"/proc/{child}/status").read_text(encoding="utf-8")
                    peaks[child] = int(status.partition("VmHWM:")[2].split()[0]) * 1024
                except (OSError, IndexError):  # it has just ended
                    continue
            time.sleep(0.02)
        assert process.returncode == 0
    return sorted(peaks.values())[-ranks]


def descendants(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text(encoding="utf-8").split()
        except OSError:
            continue
        for child in children:
            found += descendants(int(child))
    return found
