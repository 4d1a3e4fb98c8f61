"""`[model] family`: the models that need no code of the user's, one row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DEFAULT = "rglru"


@dataclass(frozen=True)
class Family:
    """Where a family is built."""

    builder: str  # of vocab_size, dim, num_layers, args: import path, or a name in `Parts.families`
    args: Mapping[str, Any] = field(default_factory=dict)  # further arguments that the family itself gives
    is_own: bool = True  # proven by this package's tests; other models are checked before each run
    # Of a row. Some models take a path of their own for one token after a state, which writes into
    # the state, and so cannot be trained through.
    least_tokens: int = 1


FAMILIES: dict[str, Family] = {
    "rglru": Family("trainer.model.encoder:build"),
    "gated_delta": Family("gated_delta"),
    "transformer": Family("transformer"),
    "gru": Family("torch_rnn", {"kind": "GRU"}, is_own=False),
    "lstm": Family("torch_rnn", {"kind": "LSTM"}, is_own=False),
    **{
        name: Family("hugging_face", {"model_type": name}, is_own=False, least_tokens=least)
        for name, least in {"mamba2": 2, "bamba": 2, "lfm2": 1, "qwen3_next": 1, "kimi_linear": 1}.items()
    },
}
