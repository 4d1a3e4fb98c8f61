"""Any causal model of `transformers` on disk, for `train doctor --hf`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from trainer.errors import UserError
from trainer.import_path import format_error
from trainer.lab.contracts.adapted import Adapted
from trainer.lab.contracts.subject import CallFailed
from trainer.lab.hugging_face import package, quiet, references_on_cpu, without_attention
from trainer.wording import few

OTHER_MODEL = "name a causal model with an output layer"


def load(folder: str) -> tuple[Adapted, int, str]:
    """A model for the checks, its number of token ids, and its name. Nothing is downloaded.

    Args:
        folder: a directory of `save_pretrained`.

    Raises:
        UserError: there is no such directory, it cannot be read, or the model takes no token ids.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers = package()
    with quiet(transformers), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            model = _read(transformers, folder)
            adapted, note = _adapted(transformers, model)
        except UserError:
            raise
        except CallFailed as error:
            problem = f"{folder} cannot be checked: {str(error)[:600]}"
            raise UserError("--hf", problem, OTHER_MODEL) from error
        except Exception as error:  # a damaged directory may raise anything
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            problem = f"{folder} cannot be checked: {format_error(cause)[:600]}"
            raise UserError("--hf", problem, "name another directory") from error
    config = model.config.get_text_config()
    parameters = sum(each.numel() for each in model.parameters())
    what = f"{type(model).__name__} of {parameters:,} parameters, in {model.dtype}{note}"
    return adapted, config.vocab_size, what


def _read(transformers: Any, folder: str) -> Any:
    if not (Path(folder) / "config.json").is_file():
        fix = "name a directory that save_pretrained wrote"
        raise UserError("--hf", f"{folder} has no config.json", fix)
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, output_loading_info=True
    )
    missing = sorted(found["missing_keys"])
    if missing:
        problem = f"{folder} has no weights for {few(missing)}, which would be drawn at random"
        raise UserError("--hf", problem, "save the whole model, with the class that its config names")
    return model


def _adapted(transformers: Any, model: Any) -> tuple[Adapted, str]:
    """With a cache that answers what only layers of attention can, where the model's own refuses
    for lack of such layers; and a note of that."""
    references_on_cpu(model)
    adapted = Adapted(model)
    if adapted.state_name == "past_key_values" and "get_seq_length" in adapted.why_stateless:

        def new_cache() -> Any:
            return without_attention(transformers.DynamicCache(config=model.config))

        again = Adapted(model, new_cache=new_cache)
        if "cannot be used" not in again.why_stateless:
            return again, "; its own cache refuses a second cell for lack of attention layers, and was completed"
    return adapted, ""
