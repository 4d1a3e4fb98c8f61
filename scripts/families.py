"""Checks public models against the state contract, and writes docs/families.csv.

    pip install -e '.[families]'
    python scripts/families.py

Random weights on the CPU, a few seconds per family; nothing is downloaded. Each family is wrapped the way a user would wrap
it for `[model] target`: its own cache, flattened to [B, state_width] and back, without repairing anything.
"""

from __future__ import annotations

import csv
import importlib
import os
import platform
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.lab.contracts import Report, check_model
from trainer.lab.hugging_face import HuggingFace, without_attention
from trainer.lab.nested_state import carry_flat
from trainer.model.protocol import ModelOutput

TABLE = Path(__file__).resolve().parents[1] / "docs" / "families.csv"
VOCAB = 64
RECORDED = ("torch", "transformers")
NOT_TRIED = {
    "mamba-ssm, xlstm": "need a GPU",
    "titans-pytorch, Hugging Face rwkv": "not wrapped here",
    "Hugging Face olmo_hybrid, falcon_h1, zamba": "need full attention, whose cache grows",
}

_SMALL: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
_LINEAR = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "linear_attention"],
}
_MAMBA2 = {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4, "expand": 2}
# Family -> settings of its config. Layers of full attention are left out: a cache that grows has no fixed width.
HUGGING_FACE: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": _MAMBA2,
    "jamba": {
        **{"mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
        **{"num_experts": 1, "num_experts_per_tok": 1},
        **{"attn_layer_period": 10, "attn_layer_offset": 9},
    },
    "bamba": {
        **{"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_chunk_size": 4},
        "attn_layer_indices": [],
    },
    "recurrent_gemma": {"block_types": ["recurrent"], "lru_width": 32},
    "lfm2": {"layer_types": ["conv", "conv"], "block_multiple_of": 8},
    "qwen3_next": {**_LINEAR, "num_experts": 0, "mlp_only_layers": [0, 1]},
}


def hugging_face(family: str) -> nn.Module:
    """A family of `transformers` behind the trainer's own adapter."""
    return carry_flat(HuggingFace(small(family)))


def small(family: str, **further: Any) -> Any:
    """A new small model of a family of `transformers`, with further settings of its config."""
    transformers = importlib.import_module("transformers")
    known = transformers.AutoConfig.for_model(family)
    settings = {name: value for name, value in _SMALL.items() if hasattr(known, name)}
    config = transformers.AutoConfig.for_model(family, **{**settings, **HUGGING_FACE.get(family, {}), **further})
    return transformers.AutoModelForCausalLM.from_config(config)


class RecurrentGemma(nn.Module):
    """Keeps its states in its modules: put there before the forward, and read from there after it."""

    def __init__(self) -> None:
        super().__init__()
        transformers = importlib.import_module("transformers")
        settings = {**_SMALL, **HUGGING_FACE["recurrent_gemma"]}
        self.model = transformers.AutoModelForCausalLM.from_config(transformers.RecurrentGemmaConfig(**settings))
        self.new_cache = transformers.DynamicCache
        with torch.no_grad():
            self._run(torch.zeros(1, 8, dtype=torch.long))
        self.layout = [getattr(module, name).shape[1:] for module, name in self._places()]
        self.state_width = sum(shape.numel() for shape in self.layout)

    def _run(self, tokens: Tensor) -> Tensor:
        cache = without_attention(self.new_cache(config=self.model.config))
        positions = torch.arange(1, tokens.shape[1] + 1).expand(tokens.shape)  # at position 0 it resets its states
        given = {"input_ids": tokens, "position_ids": positions, "past_key_values": cache}
        logits: Tensor = self.model(use_cache=True, **given).logits
        return logits

    def _places(self) -> list[tuple[nn.Module, str]]:
        names = ("recurrent_states", "conv1d_state")
        return [(module, name) for module in self.model.modules() for name in names if name in vars(module)]

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
        """Logits and the flattened states of all modules."""
        if state is None:
            state = torch.zeros(tokens.shape[0], self.state_width)
        pieces = torch.split(state, [shape.numel() for shape in self.layout], dim=1)
        for (module, name), shape, piece in zip(self._places(), self.layout, pieces, strict=True):
            setattr(module, name, piece.reshape(-1, *shape).clone())
        logits = self._run(tokens)
        ends = torch.cat([getattr(module, name).flatten(1) for module, name in self._places()], dim=1)
        for module, name in self._places():
            setattr(module, name, None)  # a module with tensors of a graph cannot be copied
        return ModelOutput(logits, ends)


def families() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Name -> model of every family that is tried."""
    for family in HUGGING_FACE:
        if family == "recurrent_gemma":
            yield "Hugging Face recurrent_gemma", RecurrentGemma
        else:
            yield f"Hugging Face {family}", lambda family=family: hugging_face(family)  # type: ignore[misc]


def row_of(name: str, make: Callable[[], nn.Module]) -> tuple[str, str, str]:
    """The table's row of one family: its name, the verdict, and how."""
    torch.manual_seed(0)
    try:
        report = check_model(make(), vocab_size=VOCAB, build=make, seq_len=32)
    except Exception as error:  # noqa: BLE001 - a family that is missing, or that cannot be built, is a row too
        return name, "not tried", f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return name, *judged(report)


def judged(report: Report) -> tuple[str, str]:
    """The verdict, such as `exact` or `silently wrong`, and how."""
    if report["forward"].status != "held":
        return "fails", report["forward"].text
    carry, gradient = report["carry"], report["gradient"]
    others = [verdict for verdict in report.breaches if verdict.check not in ("carry", "gradient")]
    if carry.status == "broken":
        return "silently wrong", f"cells differ by {carry.size or 0.0:.1e} of the logits' spread"
    if carry.status != "held":
        others.insert(0, carry)
    if others:
        return "in doubt", "; ".join(f"{verdict.check}: {verdict.text}" for verdict in others)
    if gradient.status != "held":
        return "forward exact", textwrap.shorten(gradient.text, 160)
    return "exact", f"logits to {carry.size:.0e}, gradients to {gradient.size:.0e}"


def main() -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rows = []
    for name, make in families():
        rows.append(row_of(name, make))
        print(rows[-1], flush=True)
    versions = ", ".join(f"{name} {version(name)}" for name in RECORDED)
    rows += [(name, "not tried", why) for name, why in NOT_TRIED.items()]
    rows.append(("measured with", "", f"{versions}, Python {platform.python_version()}"))
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("family", "verdict", "how"), *rows])
    return 0


def version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
