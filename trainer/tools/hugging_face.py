"""Any causal model of `transformers` for `train doctor --hf`: of a directory, or a class by name with small sizes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.errors import UserError
from trainer.import_path import format_error
from trainer.lab.contracts.adapted import Adapted
from trainer.lab.contracts.subject import CallFailed
from trainer.lab.hugging_face import package, quiet, references_on_cpu, without_attention
from trainer.wording import few

HEADS = 4
# Keys of configs that say how large a model is, as far as its config has them; `--args` goes before.
SIZES: dict[str, Any] = {
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "num_experts": 2, "num_local_experts": 2,
    "num_experts_per_tok": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "state_size": 8, "mamba_d_state": 8, "time_step_rank": 4, "mamba_dt_rank": 4, "chunk_size": 4, "mamba_chunk_size": 4,
    "n_groups": 1, "mamba_n_groups": 1, "mamba_ngroups": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "n_mamba_heads": 2, "use_mamba_kernels": False,
    "q_lora_rank": 16, "kv_lora_rank": 16, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def load(
    where: str, *, vocab_size: int, dim: int, num_layers: int, settings: Mapping[str, Any]
) -> tuple[Adapted, int, str]:
    """A model for the checks, its number of token ids, and what was loaded in words. Nothing is downloaded.

    Args:
        where: a directory of `save_pretrained`, or the name of a class such as `MambaForCausalLM`.
        vocab_size, dim, num_layers: of a class; a directory has its own.
        settings: further keys of the config of a class.

    Raises:
        UserError: there is no such directory or class, it cannot be built, or it takes no token ids.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers = package()
    is_folder = Path(where).is_dir()
    with quiet(transformers), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            model = _read(transformers, where) if is_folder else None
            if model is None:
                sizes = {"vocab_size": vocab_size, "hidden_size": dim, "num_hidden_layers": num_layers}
                model = _small(transformers, where, sizes, settings)
            adapted, note = _adapted(transformers, model)
        except UserError:
            raise
        except Exception as error:  # of a damaged directory, and from a family's own rules for sizes, anything
            cause: BaseException = error
            while cause.__cause__ is not None and not isinstance(error, CallFailed):
                cause = cause.__cause__
            fix = "set keys of its config with --args '{ key = value }', such as layer_types for --num-layers"
            if is_folder:
                fix = "name another directory"
            elif isinstance(error, CallFailed):
                fix = "name a causal model with an output layer, such as MambaForCausalLM"
            said = str(error) if isinstance(error, CallFailed) else format_error(cause)
            raise UserError("--hf", f"{where} cannot be checked: {said[:600]}", fix) from error
    config = model.config.get_text_config()
    parameters = sum(each.numel() for each in model.parameters())
    return adapted, config.vocab_size, f"{type(model).__name__} of {parameters:,} parameters, in {model.dtype}{note}"


def _read(transformers: Any, folder: str) -> Any:
    if not (Path(folder) / "config.json").is_file():
        raise UserError("--hf", f"{folder} has no config.json", "name a directory that save_pretrained wrote")
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, output_loading_info=True
    )
    if missing := sorted(found["missing_keys"]):
        problem = f"{folder} has no weights for {few(missing)}, which would be drawn at random"
        raise UserError("--hf", problem, "save the whole model, with the class that its config names")
    return model


def _small(transformers: Any, name: str, sizes: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    kind: Any = getattr(transformers, name, None)
    make: Any = getattr(kind, "config_class", None)
    if make is None:
        fix = "name a directory with config.json and weights, or a class such as MambaForCausalLM"
        raise UserError("--hf", f"{name} is neither a directory nor a model of transformers", fix)
    known = make()
    wide = {"intermediate_size": 2 * sizes["hidden_size"], "lru_width": sizes["hidden_size"]}
    head = sizes["hidden_size"] // HEADS
    # Heads of a mixer share twice the width, those of attention the width itself.
    heads = {"head_dim": head, "attention_head_dim": head, "mamba_d_head": head, "mamba_n_heads": 2 * HEADS}
    depth = getattr(known, "num_hidden_layers", 0)
    by_layer = {key: each for key, each in known.to_dict().items() if isinstance(each, list) and len(each) == depth > 2}
    heads |= {key: each[: sizes["num_hidden_layers"]] for key, each in by_layer.items()}
    if hasattr(known, "state_size") and hasattr(known, "num_heads"):
        heads |= {"num_heads": 2 * HEADS}
    given = {key: value for key, value in {**SIZES, **wide, **heads, **sizes}.items() if hasattr(known, key)}
    return kind(make(**{**given, **settings}))


def _adapted(transformers: Any, model: Any) -> tuple[Adapted, str]:
    """With a cache that answers what only layers of attention can, where the model's own refuses for lack of such layers; and
    a note of that."""
    references_on_cpu(model)
    adapted = Adapted(model)
    if adapted.state_name == "past_key_values" and "get_seq_length" in adapted.why_stateless:

        def new_cache() -> Any:
            return without_attention(transformers.DynamicCache(config=model.config))

        again = Adapted(model, new_cache=new_cache)
        if "cannot be used" not in again.why_stateless:
            return again, "; its own cache refuses a second cell for lack of attention layers, and was completed"
    return adapted, ""
