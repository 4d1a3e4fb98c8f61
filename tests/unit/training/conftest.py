"""Runs in the process of the tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from trainer.training.signals import STOP_SIGNALS


@pytest.fixture(autouse=True)
def own_signal_handlers() -> Iterator[None]:
    """`train` installs handlers; pytest needs its own back."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
