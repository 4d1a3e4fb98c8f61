"""`[model] family`: the models that need no code of the user's. A family is one file and one row here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DEFAULT = "rglru"


@dataclass(frozen=True)
class Family:
    """Where a family is built.

    Args:
        builder: import path of a function of vocab_size, dim, num_layers and `[model] args`.
        args: further arguments that the family itself gives.
        is_own: of this package, whose tests prove its contract; an adapter's model is checked before each run.
    """

    builder: str
    args: Mapping[str, Any] = field(default_factory=dict)
    is_own: bool = True


def _hugging_face(model_type: str) -> Family:
    return Family("trainer.model.hugging_face:build", {"model_type": model_type}, is_own=False)


FAMILIES: dict[str, Family] = {
    "rglru": Family("trainer.model.encoder:build"),
    "gated_delta": Family("trainer.model.gated_delta:build"),
    "transformer": Family("trainer.model.transformer:build"),
    "gru": Family("trainer.model.torch_rnn:gru", is_own=False),
    "lstm": Family("trainer.model.torch_rnn:lstm", is_own=False),
    "mamba2": _hugging_face("mamba2"),
    "bamba": _hugging_face("bamba"),
    "lfm2": _hugging_face("lfm2"),
    "qwen3_next": _hugging_face("qwen3_next"),
    "kimi_linear": _hugging_face("kimi_linear"),
}
