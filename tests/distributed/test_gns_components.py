"""Where gradient noise comes from, measured in real training: hooks on two ranks, and whole runs."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.checkpoints import weights
from tests.support.gloo import run_on_ranks
from tests.support.runs import losses, read_rows, run, write_tiny_config
from trainer.extensions.noise_components import NoiseComponents, Piece, normal_equations
from trainer.metrics.noise_scale.hooks import GradientNoiseScale

pytestmark = pytest.mark.distributed

STEPS, MICROS, ROWS, DIM = 150, 4, 4, 40
MEAN, T_STREAM, T_ROW = 0.5, 8.0, 40.0
TRUTH = (T_STREAM + T_ROW) / (MEAN**2 * DIM)


class Linear(nn.Module):
    """loss = theta . x, whose gradient is x, in two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(DIM // 2)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, : DIM // 2] @ self.first + x[:, DIM // 2 :] @ self.second


def drawn_per_stream(rank: int, world_size: int) -> tuple[dict[str, float], float]:
    """Metrics of 150 steps in which all ranks share the stream of a micro-batch, and the largest relative difference between
    the equations by hooks and by hand."""
    torch.manual_seed(0)
    model = Linear()
    ddp = DistributedDataParallel(model) if world_size > 1 else model
    gns = GradientNoiseScale(ddp, ema=0.999)
    shared, own = torch.Generator().manual_seed(7), torch.Generator().manual_seed(100 + rank)
    components, worst = NoiseComponents(), 0.0
    for step in range(STEPS):
        is_split = step % 2 == 0
        streams = torch.randn(MICROS, DIM, generator=shared) * (T_STREAM / DIM) ** 0.5
        halves = 2 if is_split else 1
        micros = []
        for k in range(MICROS):
            x = MEAN + streams[k] + torch.randn(ROWS, DIM, generator=own) * (T_ROW / DIM) ** 0.5
            micros += [(k, part) for part in x.chunk(halves)]
        ddp.zero_grad()
        gns.begin_window(len(micros), pairs=is_split)
        for index, (_, x) in enumerate(micros):
            is_last = index == len(micros) - 1
            no_sync = contextlib.nullcontext if is_last or world_size == 1 else ddp.no_sync
            with no_sync():
                gns.begin_micro(last=is_last)
                (ddp(x).mean() / len(micros)).backward()
                gns.end_micro(1 / len(micros), len(x))
        if not is_split:
            gns.step()
            continue
        norms = gns.pair_norms()
        assert norms is not None
        kappas, squares, sums = norms.T.tolist()
        pieces = [Piece(k, [-1] * len(x), [1.0] * len(x)) for k, x in micros]
        equations = torch.from_numpy(normal_equations(pieces, kappas, squares, sums))
        by_hand = [x.mean(dim=0).double() / len(micros) for _, x in micros]
        running = [torch.stack(by_hand[: k + 1]).sum(dim=0) for k in range(len(micros))]
        expected = normal_equations(pieces, kappas, [float(g @ g) for g in by_hand], [float(a @ a) for a in running])
        worst = max(
            worst, float(np.abs(equations.numpy() / np.where(expected, expected, 1.0) - 1)[expected != 0].max())
        )
        if world_size > 1:
            torch.distributed.all_reduce(equations)
        components.update(equations.tolist(), float(gns.grad_sq()), world_size * MICROS * ROWS, 0.0)
    return components.metrics(), worst


@pytest.mark.parametrize("world_size", [1, 2])
def test_hooks_find_the_noise_scale_of_rows_that_share_streams(world_size: int) -> None:
    if world_size == 1:
        results = [drawn_per_stream(0, 1)]
    else:
        results = run_on_ranks(drawn_per_stream, 2)
    for metrics, worst in results:
        assert worst < 1e-4  # of differences of float32 gradients
        assert metrics["gns/b_independent_low"] <= TRUTH <= metrics["gns/b_independent_high"]
        assert metrics["gns/b_independent"] == pytest.approx(TRUTH, rel=0.25)
        assert metrics["gns/noise_from_stream"] == pytest.approx(T_STREAM / (T_STREAM + T_ROW), abs=0.08)
    assert len({result[0]["gns/b_independent"] for result in results}) == 1


RUN = """
[gns]
components_every = 2

[checkpoint]
every = 10
"""


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_measures_it_and_learns_the_same(tmp_path: Path, nproc: int) -> None:
    config = write_tiny_config(tmp_path, RUN)
    arguments = ("--steps", "20", "--set", "train.micro_batches=2")
    measured = run("--config", config, "--run-dir", tmp_path / "on", *arguments, nproc=nproc)
    plain = run(
        *("--config", config, "--run-dir", tmp_path / "off", *arguments, "--set", "gns.components_every=0"), nproc=nproc
    )
    assert measured.returncode == plain.returncode == 0, measured.stderr + plain.stderr
    on, off = losses(tmp_path / "on" / "metrics.jsonl"), losses(tmp_path / "off" / "metrics.jsonl")
    assert on == pytest.approx(off, rel=1e-5)
    last = read_rows(tmp_path / "on" / "metrics.jsonl")["train", 20]
    assert {"gns/noise_from_stream", "gns/noise_from_row", "gns/b_simple_low"} <= last.keys()
    shares = [value for key, value in last.items() if key.startswith("gns/noise_from")]
    assert sum(shares) == pytest.approx(1.0)
    assert not [key for key in read_rows(tmp_path / "off" / "metrics.jsonl")["train", 20] if "noise_from" in key]


def test_ranks_that_exchange_states_run_as_many_halves(tmp_path: Path) -> None:
    """Some of the small streams leave a rank with a single row, which cannot be halved."""
    config = write_tiny_config(tmp_path, RUN)
    sets = ("train.micro_batches=2", 'ledger.ownership="exchange"', "gns.components_every=1")
    options = [word for each in sets for word in ("--set", each)]
    result = run("--config", config, "--run-dir", tmp_path / "run", "--steps", "20", *options, nproc=2)
    assert result.returncode == 0, result.stderr
    assert "failed and is off" not in result.stderr
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert "gns/noise_from_row" in rows["train", 20]


def test_a_resumed_run_measures_the_same(tmp_path: Path) -> None:
    config = write_tiny_config(tmp_path, RUN)
    common = ("--config", config, "--set", "train.micro_batches=2", "--set", "scheduler.name=constant")
    for name, steps in (("whole", 20), ("cut", 10)):
        result = run(*common, "--run-dir", tmp_path / name, "--steps", steps)
        assert result.returncode == 0, result.stderr
    result = run(*common, "--run-dir", tmp_path / "cut", "--steps", "20", "--resume", "auto")
    assert result.returncode == 0, result.stderr
    whole, cut = (read_rows(tmp_path / name / "metrics.jsonl")["train", 20] for name in ("whole", "cut"))
    assert {k: v for k, v in whole.items() if k.startswith("gns/")} == {
        k: v for k, v in cut.items() if k.startswith("gns/")
    }
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(tmp_path / "cut")[name]), name


@pytest.mark.parametrize(
    ("setting", "says"),
    [("gns.enabled=false", "needs the noise scale"), ('distributed.strategy="fsdp"', "before they can be compared")],
)
def test_it_is_refused_where_it_cannot_be_measured(tmp_path: Path, setting: str, says: str) -> None:
    config = write_tiny_config(tmp_path, RUN)
    result = run("--config", config, "--run-dir", tmp_path / "run", "--set", setting)
    assert result.returncode == 2
    assert "gns.components_every" in result.stderr
    assert says in result.stderr
