"""Built-in families written as architectures of `transformers` that compute the same, so that `from_pretrained` opens them.

The configs name every number in which the architectures could differ; the logits are those of the trained model up to rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.model.adapters.hugging_face import package, save

Weights = dict[str, Tensor]

NORM_EPS = torch.finfo(torch.float32).eps  # nn.RMSNorm's own for float32


def save_as_llama(model: Any, directory: Path, *, rotary_base: float) -> None:
    """Write a `Transformer`.

    Raises:
        UserError: the package `transformers` is missing.
    """
    attention = model.blocks[0].attention
    config = package().LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.dim,
        intermediate_size=model.hidden,
        num_hidden_layers=model.num_layers,
        num_attention_heads=attention.heads,
        num_key_value_heads=attention.kv_heads,
        hidden_act="gelu",
        rms_norm_eps=NORM_EPS,
        tie_word_embeddings=model.head.weight is model.embedding.weight,
        rope_parameters={"rope_type": "default", "rope_theta": rotary_base},
        bos_token_id=model.vocab_size - 1,
        eos_token_id=model.vocab_size - 1,
    )
    weights = _outer(model)
    for number, block in enumerate(model.blocks):
        weights |= _block(
            number,
            {
                "input_layernorm": block.attention_norm,
                "self_attn.q_proj": block.attention.queries,
                "self_attn.k_proj": block.attention.keys,
                "self_attn.v_proj": block.attention.values,
                "self_attn.o_proj": block.attention.out,
                "post_attention_layernorm": block.mlp_norm,
                **_mlp(block.mlp),
            },
        )
    _save(config, weights, directory)


def save_as_qwen3_next(model: Any, directory: Path) -> None:
    """Write a `GatedDelta`, as layers of linear attention alone with plain MLPs.

    Raises:
        UserError: the package `transformers` is missing.
    """
    width = model.dim // model.heads
    config = package().Qwen3NextConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.dim,
        intermediate_size=model.hidden,
        num_hidden_layers=model.num_layers,
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
        rms_norm_eps=NORM_EPS,
        tie_word_embeddings=model.head.weight is model.embedding.weight,
        bos_token_id=model.vocab_size - 1,
        eos_token_id=model.vocab_size - 1,
    )
    weights = _outer(model)
    for number, block in enumerate(model.blocks):
        mixer = block.mixer
        weights |= _block(
            number, {"linear_attn.out_proj": mixer.out, "linear_attn.norm": mixer.norm, **_mlp(block.mlp)}
        )
        queries, keys, values = mixer.inputs.weight.chunk(3)
        decay, rate = mixer.gates.weight.chunk(2)
        prefix = f"model.layers.{number}.linear_attn."
        weights |= {
            f"{prefix}in_proj_qkvz.weight": _by_head(model.heads, queries, keys, values, mixer.output_gate.weight),
            f"{prefix}in_proj_ba.weight": _by_head(model.heads, rate, decay),
            f"{prefix}conv1d.weight": mixer.taps.flip(0).T[:, None],  # [3 D, 1, taps], the oldest position first
            f"{prefix}A_log": mixer.log_a,
            f"{prefix}dt_bias": mixer.step_bias,
            f"model.layers.{number}.input_layernorm.weight": block.mixer_norm.weight
            - 1.0,  # it multiplies by 1 + weight
            f"model.layers.{number}.post_attention_layernorm.weight": block.mlp_norm.weight - 1.0,
        }
    weights["model.norm.weight"] = model.norm.weight - 1.0
    _save(config, weights, directory)


def _outer(model: Any) -> Weights:
    return {
        "model.embed_tokens.weight": model.embedding.weight,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.head.weight,
    }


def _block(number: int, modules: dict[str, nn.Module]) -> Weights:
    return {f"model.layers.{number}.{name}.weight": module.weight for name, module in modules.items()}  # type: ignore[misc]


def _mlp(mlp: Any) -> dict[str, nn.Module]:
    return {"mlp.gate_proj": mlp.gate, "mlp.up_proj": mlp.values, "mlp.down_proj": mlp.out}


def _by_head(heads: int, *parts: Tensor) -> Tensor:
    """Rows [heads * n_i, D] of several matrices as one, all rows of a head together."""
    return torch.cat([part.reshape(heads, -1, part.shape[1]) for part in parts], dim=1).flatten(0, 1)


def _save(config: Any, weights: Weights, directory: Path) -> None:
    model = package().AutoModelForCausalLM.from_config(config)
    model.load_state_dict({name: weight.detach() for name, weight in weights.items()})  # exactly these tensors
    save(model, directory)
