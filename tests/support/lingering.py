"""A model that leaves something behind which keeps its process, for `[model] target`; LINGERING says what."""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import Any

import trainer.ending
from trainer.model import build as build_reference
from trainer.model.encoder import RecurrentEncoder

trainer.ending.WAIT_FOR_THREADS_SEC = 1.0


def wait_for_ever() -> None:
    while True:
        time.sleep(3600)


def build(vocab_size: int, dim: int, num_layers: int, **args: Any) -> RecurrentEncoder:
    """The reference model."""
    what = os.environ["LINGERING"]
    if what == "thread":
        threading.Thread(target=wait_for_ever, name="uploads").start()
    elif what == "handler":
        atexit.register(wait_for_ever)
    return build_reference(vocab_size, dim, num_layers, **args)
