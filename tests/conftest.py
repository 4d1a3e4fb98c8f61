"""What holds for every test."""

from __future__ import annotations

import gc
import os

from hypothesis import settings

# An example that takes long says something about the machine's load, nothing about the code.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


# Neither a login of this machine's user nor a service process per run; tests of wandb itself name a mode.
os.environ["WANDB_MODE"] = "disabled"

gc.disable()  # while tests are collected, which imports all there is


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections: there is a million of it, and it stays."""
    gc.freeze()
    gc.enable()
