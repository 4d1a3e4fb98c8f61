"""What holds for every test."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    import torch

# An example that takes long says something about the machine's load, nothing about the code.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


gc.disable()  # while tests are collected, which imports all there is


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections: there is a million of it, and it stays."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tests marked `cuda` run: on the device that TRAINER_TEST_DEVICE names, on the CPU without it."""
    import torch

    wanted = torch.device(os.environ.get("TRAINER_TEST_DEVICE", "cpu"))
    assert wanted.type != "cuda" or torch.cuda.is_available(), (
        "TRAINER_TEST_DEVICE=cuda, but torch finds no CUDA device"
    )
    return wanted
