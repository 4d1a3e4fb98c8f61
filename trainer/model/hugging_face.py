"""Built-in families written as architectures of `transformers` that compute the same, so that `from_pretrained` opens them.

Configs that are written name every number in which the architectures could differ; the logits are those of the trained model
up to rounding.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.errors import UserError

NORM_EPS = torch.finfo(torch.float32).eps  # nn.RMSNorm's own for float32

Weights = dict[str, Tensor]


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Without progress bars and reports of what was loaded: every rank would show them."""
    log = transformers.utils.logging
    level, has_bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if has_bars:
            log.enable_progress_bar()


def package() -> Any:
    try:
        package = importlib.import_module("transformers")
    except ImportError:
        raise UserError("transformers", "is not installed", "run: pip install transformers") from None
    for handler in logging.getLogger("transformers").handlers:
        handler.addFilter(_is_no_missing_kernel)
    return package


def _is_no_missing_kernel(record: logging.LogRecord) -> bool:
    """Every rank would say, of each kernel that is not installed, that a slower one takes its place."""
    return "falling back to its reference" not in record.getMessage()


def save(model: Any, directory: Path) -> None:
    """Write weights and config of a model of `transformers`, so that a plain call of what `from_pretrained` returns works.

    `transformers` 5.23 asks a cache without layers of attention for its length, which raises; such a model is written with
    `use_cache` off, and `generate` then reads the whole text for each token.
    """
    transformers, config = package(), model.config
    cache, given = transformers.DynamicCache(config=config), config.use_cache
    if "past_key_values" in inspect.signature(model.forward).parameters:
        try:
            cache.get_seq_length()
        except ValueError:
            config.use_cache = model.generation_config.use_cache = False
    try:
        with quiet(transformers):
            model.save_pretrained(directory)
    finally:
        config.use_cache = model.generation_config.use_cache = given


def save_as_llama(model: Any, directory: Path, *, rotary_base: float) -> None:
    """Write a `Transformer`."""
    attention = model.blocks[0].attention
    config = package().LlamaConfig(
        **_common(model),
        num_attention_heads=attention.heads,
        num_key_value_heads=attention.kv_heads,
        hidden_act="gelu",
        rope_parameters={"rope_type": "default", "rope_theta": rotary_base},
    )
    weights = _outer(model)
    for number, block in enumerate(model.blocks):
        weights |= _block(
            number,
            block.mlp,
            {
                "input_layernorm": block.attention_norm,
                "self_attn.q_proj": block.attention.queries,
                "self_attn.k_proj": block.attention.keys,
                "self_attn.v_proj": block.attention.values,
                "self_attn.o_proj": block.attention.out,
                "post_attention_layernorm": block.mlp_norm,
            },
        )
    _save(config, weights, directory)


def save_as_qwen3_next(model: Any, directory: Path) -> None:
    """Write a `GatedDelta`, as layers of linear attention alone with plain MLPs."""
    width = model.dim // model.heads
    config = package().Qwen3NextConfig(
        **_common(model),
        layer_types=["linear_attention"] * model.num_layers,
        linear_num_key_heads=model.heads,
        linear_num_value_heads=model.heads,
        linear_key_head_dim=width,
        linear_value_head_dim=width,
        linear_conv_kernel_dim=model.blocks[0].mixer.taps.shape[0],
        # Of no layer here, but checked against each other.
        num_attention_heads=model.heads,
        num_key_value_heads=model.heads,
        head_dim=width,
        num_experts=0,
        mlp_only_layers=list(range(model.num_layers)),
        hidden_act="silu",
    )
    weights = _outer(model)
    for number, block in enumerate(model.blocks):
        mixer = block.mixer
        weights |= _block(number, block.mlp, {"linear_attn.out_proj": mixer.out, "linear_attn.norm": mixer.norm})
        queries, keys, values = mixer.inputs.weight.chunk(3)
        decay, rate = mixer.gates.weight.chunk(2)
        prefix = f"model.layers.{number}.linear_attn."
        weights |= {
            f"{prefix}in_proj_qkvz.weight": _by_head(model.heads, queries, keys, values, mixer.output_gate.weight),
            f"{prefix}in_proj_ba.weight": _by_head(model.heads, rate, decay),
            f"{prefix}conv1d.weight": mixer.taps.flip(0).T[:, None],  # [3 D, 1, taps], the oldest position first
            f"{prefix}A_log": mixer.log_a,
            f"{prefix}dt_bias": mixer.step_bias,
            # It multiplies by 1 + weight.
            f"model.layers.{number}.input_layernorm.weight": block.mixer_norm.weight - 1.0,
            f"model.layers.{number}.post_attention_layernorm.weight": block.mlp_norm.weight - 1.0,
        }
    weights["model.norm.weight"] = model.norm.weight - 1.0
    _save(config, weights, directory)


def _common(model: Any) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": model.hidden,
        "num_hidden_layers": model.num_layers,
        "rms_norm_eps": NORM_EPS,
        "tie_word_embeddings": model.head.weight is model.embedding.weight,
        "bos_token_id": model.vocab_size - 1,
        "eos_token_id": model.vocab_size - 1,
    }


def _outer(model: Any) -> Weights:
    return {
        "model.embed_tokens.weight": model.embedding.weight,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.head.weight,
    }


def _block(number: int, mlp: Any, others: dict[str, Any]) -> Weights:
    modules = {**others, "mlp.gate_proj": mlp.gate, "mlp.up_proj": mlp.values, "mlp.down_proj": mlp.out}
    return {f"model.layers.{number}.{name}.weight": module.weight for name, module in modules.items()}


def _by_head(heads: int, *parts: Tensor) -> Tensor:
    """Rows [heads * n_i, D] of several matrices as one, all rows of a head together."""
    return torch.cat([part.reshape(heads, -1, part.shape[1]) for part in parts], dim=1).flatten(0, 1)


def _save(config: Any, weights: Weights, directory: Path) -> None:
    model = package().AutoModelForCausalLM.from_config(config)
    model.load_state_dict({name: weight.detach() for name, weight in weights.items()})  # exactly these tensors
    save(model, directory)
