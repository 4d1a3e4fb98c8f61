"""Smoothing on and off the device, MFU and memory."""

from __future__ import annotations

import math

import pytest
import torch

from trainer import on_device
from trainer.metrics.tracker import Ema
from trainer.on_device import compute_mfu, get_memory_stats, lookup_peak_tflops, memory_of, peak_tflops_of


def test_tensors_are_averaged_as_numbers_are() -> None:
    average, tensor = Ema(0.3), torch.zeros(())
    for index, sample in enumerate([math.nan, 3.0, math.nan, -1.0, math.inf, 0.5, 8.0]):
        average.update(tensor.fill_(sample) if index % 2 else sample)
        assert index or average.read() is None
    assert average.read() == pytest.approx(0.7 * (0.7 * (0.7 * 3.0 - 0.3) + 0.15) + 2.4), "of finite samples alone"


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA A10G", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA H1000", None),
    ],
)
def test_peaks_are_of_the_very_card_or_unknown(name: str, peak: float | None) -> None:
    assert lookup_peak_tflops(name) == peak
    assert peak_tflops_of("cpu") is None


def test_mfu_is_the_share_of_the_peak_of_all_devices() -> None:
    # 6 PFLOP/s of arithmetic on 8 devices of 1.5 PFLOP/s.
    mfu = compute_mfu(tokens_per_sec=1e6, flops_per_token=6e9, num_devices=8, peak_tflops=1500.0)
    assert mfu == pytest.approx(0.5)
    assert compute_mfu(tokens_per_sec=1e6, flops_per_token=6e9, num_devices=8, peak_tflops=None) is None
    assert compute_mfu(tokens_per_sec=1e6, flops_per_token=0.0, num_devices=8, peak_tflops=1.0) is None


def test_a_rank_has_its_part_of_what_its_container_may_use(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(on_device, "CONTAINER_LIMIT", tmp_path / "memory.max")
    whole = memory_of(torch.device("cpu"))
    for limit, expected in (("8000000\n", 4_000_000), ("max\n", whole // 2)):
        (tmp_path / "memory.max").write_text(limit)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert memory_of(torch.device("cpu")) == expected


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_a_cuda_device_is_that_of_the_allocator() -> None:
    before = get_memory_stats("cuda")["allocated_gb"]
    held = torch.empty(250_000_000, dtype=torch.uint8, device="cuda")
    after = get_memory_stats("cuda")
    assert after["allocated_gb"] - before == pytest.approx(0.25, rel=0.02)
    assert after["allocated_gb"] <= after["peak_gb"] <= after["reserved_gb"] <= after["total_gb"]
    del held
