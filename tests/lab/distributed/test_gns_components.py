"""Where gradient noise comes from, measured in real training: hooks on two ranks, and whole runs."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.gloo import run_on_ranks
from tests.support.grouped import train
from tests.support.ranks import checkpoint_differences
from tests.support.runs import losses, read_rows, write_tiny_config
from trainer.lab.noise_components import NoiseComponents, Piece, normal_equations
from trainer.metrics.noise_scale.hooks import GradientNoiseScale

pytestmark = pytest.mark.distributed

STEPS, MICROS, ROWS, DIM = 80, 4, 4, 40
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
    """Metrics of some steps in which all ranks share the stream of a micro-batch, and the largest relative difference between
    the equations by hooks and by hand."""
    torch.manual_seed(0)
    model = Linear()
    ddp = DistributedDataParallel(model)
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
            no_sync = contextlib.nullcontext if is_last else ddp.no_sync
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
        torch.distributed.all_reduce(equations)
        components.update(equations.tolist(), float(gns.grad_sq()), world_size * MICROS * ROWS, 0.0)
    return components.metrics(), worst


def test_hooks_find_the_noise_scale_of_rows_that_share_streams() -> None:
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


def test_a_run_measures_it_learns_the_same_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    config, sets = write_tiny_config(tmp_path, RUN), ("train.steps=20", "train.micro_batches=2")
    train(config, tmp_path / "on", *sets, nproc=2)
    train(config, tmp_path / "off", *sets, "gns.components_every=0", nproc=2)
    train(
        config, tmp_path / "again", *sets, nproc=2, more=("--resume", tmp_path / "on" / "checkpoints" / "step_00000010")
    )
    on, off, again = (tmp_path / name for name in ("on", "off", "again"))
    assert losses(on / "metrics.jsonl") == pytest.approx(losses(off / "metrics.jsonl"), rel=1e-5)
    last, without, resumed = (read_rows(path / "metrics.jsonl")["train", 20] for path in (on, off, again))
    assert {"gns/noise_from_stream", "gns/noise_from_row", "gns/b_simple_low"} <= last.keys()
    assert sum(value for key, value in last.items() if key.startswith("gns/noise_from")) == pytest.approx(1.0)
    assert not [key for key in without if "noise_from" in key]
    assert {key: resumed[key] for key in resumed if key.startswith("gns/")} == {
        key: last[key] for key in last if key.startswith("gns/")
    }
    assert checkpoint_differences(on / "checkpoints" / "latest", again / "checkpoints" / "latest") == []


def test_ranks_that_exchange_states_run_as_many_halves(tmp_path: Path) -> None:
    """Some of the small streams leave a rank with a single row, which cannot be halved."""
    sets = ("train.steps=20", "train.micro_batches=2", 'ledger.ownership="exchange"', "gns.components_every=1")
    said = train(write_tiny_config(tmp_path, RUN), tmp_path / "run", *sets, nproc=2)
    assert "failed and is off" not in said
    assert "gns/noise_from_row" in read_rows(tmp_path / "run" / "metrics.jsonl")["train", 20]


@pytest.mark.parametrize(
    ("setting", "says"),
    [("gns.enabled=false", "needs the noise scale"), ('distributed.strategy="fsdp"', "before they can be compared")],
)
def test_it_is_refused_where_it_cannot_be_measured(tmp_path: Path, setting: str, says: str) -> None:
    said = train(write_tiny_config(tmp_path, RUN), tmp_path / "run", setting, code=2)
    assert "gns.components_every" in said
    assert says in said
