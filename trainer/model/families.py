"""`[model] family`: the models that need no code of the user's, a row each; and `nn.GRU` and `nn.LSTM` as language models."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainer.files import read_json
from trainer.model.protocol import ModelOutput

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig

DEFAULT = "rglru"
WIDEST = 128  # heads of gated_delta by default


@dataclass(frozen=True)
class Family:
    """Where a family is built.

    Args:
        builder: import path, or a name in `Parts`, of a function of vocab_size, dim, num_layers and `[model] args`.
        args: further arguments that the family itself gives.
        is_own: of this package, whose tests prove its contract; an adapter's model is checked before each run.
        least_tokens: of a row. One token after a state takes a path of its own in some models, which writes into the state and
            so cannot be trained through.
    """

    builder: str
    args: Mapping[str, Any] = field(default_factory=dict)
    is_own: bool = True
    least_tokens: int = 1


def _hugging_face(model_type: str, least_tokens: int = 1) -> Family:
    return Family("hugging_face", {"model_type": model_type}, is_own=False, least_tokens=least_tokens)


FAMILIES: dict[str, Family] = {
    "rglru": Family("trainer.model.encoder:build"),
    "gated_delta": Family("gated_delta"),
    "transformer": Family("transformer"),
    "gru": Family("trainer.model.families:TorchRnn", {"kind": nn.GRU}, is_own=False),
    "lstm": Family("trainer.model.families:TorchRnn", {"kind": nn.LSTM}, is_own=False),
    "mamba2": _hugging_face("mamba2", least_tokens=2),
    "bamba": _hugging_face("bamba", least_tokens=2),
    "lfm2": _hugging_face("lfm2"),
    "qwen3_next": _hugging_face("qwen3_next"),
    "kimi_linear": _hugging_face("kimi_linear"),
}

GONE = {"fla_gated_delta": 'use "gated_delta", which runs the same kernels on CUDA where fla-core is installed'}


def fewest_heads(dim: int) -> int:
    """The fewest heads that divide `dim` and are at most `WIDEST` wide, the width at which kernels are fastest."""
    return next((n for n in range(-(-dim // WIDEST), dim) if n and dim % n == 0), max(dim, 1))


def as_trained(config: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's config as this version writes it: heads of gated_delta that it lacks were one per 64 of `dim`."""
    match config:
        case {"model": {"family": "gated_delta" | "fla_gated_delta", "dim": int(dim), "args": {**args}, **table}}:
            args["heads"] = args.get("heads") or max(dim // 64, 1)
            return {**config, "model": {**table, "family": "gated_delta", "dim": dim, "args": args}}
    return config


def with_sizes(config: RunConfig, trained: Mapping[str, Any]) -> RunConfig:
    """A run's config with the sizes that it leaves open, heads of gated_delta or those of a model that is read: as in a
    checkpoint's config, or without one the default, or the model's own."""
    table, update = config.model, dict[str, Any]()
    if table.family == "gated_delta" and not table.args.get("heads"):
        heads = fewest_heads(table.dim)
        match trained:
            case {"model": {"args": {"heads": int(known)}}}:
                heads = known
        update = {"args": {**table.args, "heads": heads}}
    elif table.target is None and isinstance(table.args.get("from"), str):
        with suppress(OSError, ValueError):  # what cannot be read is refused where the model is built
            found = read_json(Path(table.args["from"], "config.json"))
            update = {"dim": found.get("hidden_size", table.dim)}
            update["num_layers"] = found.get("num_hidden_layers", table.num_layers)
        match trained:
            case {"model": {"args": {"from": str()}, "dim": int(dim), "num_layers": int(num_layers)}}:
                update = {"dim": dim, "num_layers": num_layers}
    return config.model_copy(update={"model": table.model_copy(update=update)})


class TorchRnn(nn.Module):
    """An embedding, torch's recurrent layers, and a linear output; every cell of a group continues h (and c).

    Args:
        vocab_size: number of token ids.
        dim: width of the embedding and of each layer.
        num_layers: of the recurrent module.
        kind: `nn.GRU` or `nn.LSTM`.
        dropout: between layers, in training.
        tie_embeddings: share the embedding's weight with the output layer.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        num_layers: int,
        *,
        kind: Any,
        dropout: float = 0.0,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        self.num_layers, self.dim, self.vocab_size = num_layers, dim, vocab_size
        self.gates = 4 if kind is nn.LSTM else 3
        self.embedding = nn.Embedding(vocab_size, dim)
        self.rnn = kind(dim, dim, num_layers=num_layers, dropout=dropout if num_layers > 1 else 0.0, batch_first=True)
        self.head = nn.Linear(dim, vocab_size)
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        if tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, state: tuple[Tensor, ...] | None = None) -> ModelOutput:
        """Predict from tokens [B, T]; the state is (h,) or (h, c), each [B, layers, dim]."""
        given: Any = None
        if state is not None:
            given = tuple(part.transpose(0, 1).contiguous() for part in state)
            given = given if len(given) == 2 else given[0]
        x, end = self.rnn(self.embedding(tokens), given)
        ends = end if isinstance(end, tuple) else (end,)
        return ModelOutput(self.head(x), tuple(part.transpose(0, 1) for part in ends))  # type: ignore[arg-type]

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations per trained token: 6 per weight of a matrix product."""
        return 6.0 * (self.num_layers * self.gates * 2 * self.dim**2 + self.dim * self.vocab_size)
