"""A small model, and one with the noise scale's hooks on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn

from tests.support.gns_cases import make_model
from trainer.metrics.noise_scale.hooks import GradientNoiseScale


@pytest.fixture
def model() -> nn.Module:
    return make_model()


@pytest.fixture
def gns(model: nn.Module) -> Iterator[GradientNoiseScale]:
    gns = GradientNoiseScale(model)
    yield gns
    gns.close()
