"""`[model] family`: the models that need no code of the user's, one row each."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.files import read_json

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig

DEFAULT = "rglru"
WIDEST = 128  # heads of gated_delta by default


@dataclass(frozen=True)
class Family:
    """Where a family is built."""

    builder: str  # of vocab_size, dim, num_layers, args: import path, or a name in `Parts.families`
    args: Mapping[str, Any] = field(default_factory=dict)  # further arguments that the family itself gives
    is_own: bool = True  # proven by this package's tests; other models are checked before each run
    # Of a row. Some models take a path of their own for one token after a state, which writes into
    # the state, and so cannot be trained through.
    least_tokens: int = 1


def _hugging_face(model_type: str, *, least_tokens: int = 1) -> Family:
    return Family("hugging_face", {"model_type": model_type}, is_own=False, least_tokens=least_tokens)


FAMILIES: dict[str, Family] = {
    "rglru": Family("trainer.model.encoder:build"),
    "gated_delta": Family("gated_delta"),
    "transformer": Family("transformer"),
    "gru": Family("torch_rnn", {"kind": "GRU"}, is_own=False),
    "lstm": Family("torch_rnn", {"kind": "LSTM"}, is_own=False),
    "mamba2": _hugging_face("mamba2", least_tokens=2),
    "bamba": _hugging_face("bamba", least_tokens=2),
    **{name: _hugging_face(name) for name in ("lfm2", "qwen3_next", "kimi_linear")},
}


def fewest_heads(dim: int) -> int:
    """The fewest heads that divide `dim`, at most `WIDEST` wide: kernels are fastest there."""
    least = max(-(-dim // WIDEST), 1)
    return next((heads for heads in range(least, dim) if dim % heads == 0), max(dim, 1))


def with_sizes(config: RunConfig, trained: Mapping[str, Any]) -> RunConfig:
    """A run's config with the sizes that it leaves open: heads of gated_delta, or a read model's.

    `trained`: a checkpoint's config, whose sizes count; empty: the default, or the model's own.
    """
    table, update = config.model, dict[str, Any]()
    if table.family == "gated_delta" and not table.args.get("heads"):
        heads = fewest_heads(table.dim)
        match trained:
            case {"model": {"args": {"heads": int(known)}}}:
                heads = known
        update = {"args": {**table.args, "heads": heads}}
    elif table.target is None and isinstance(table.args.get("from"), str):
        with suppress(OSError, ValueError):  # a file that cannot be read is refused where the model is built
            read = read_json(Path(table.args["from"], "config.json"))
            update = {"dim": read.get("hidden_size", table.dim)}
            update["num_layers"] = read.get("num_hidden_layers", table.num_layers)
        match trained:
            case {"model": {"args": {"from": str()}, "dim": int(dim), "num_layers": int(num_layers)}}:
                update = {"dim": dim, "num_layers": num_layers}
    return config.model_copy(update={"model": table.model_copy(update=update)})
