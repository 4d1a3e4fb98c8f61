"""`train doctor --hf`: any causal model of `transformers` on disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from trainer.errors import UserError
from trainer.import_path import format_error
from trainer.lab.contracts.adapted import Adapted
from trainer.lab.hugging_face import package, quiet, references_on_cpu
from trainer.wording import few


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
            references_on_cpu(model)
            adapted = Adapted(model)
        except UserError:
            raise
        except Exception as error:  # a damaged directory may raise anything
            problem = f"{folder} cannot be checked: {format_error(error)[:600]}"
            raise UserError("--hf", problem, "name the directory of a causal model with an output layer") from error
    config = model.config.get_text_config()
    parameters = sum(each.numel() for each in model.parameters())
    what = f"{type(model).__name__} of {parameters:,} parameters, in {model.dtype}"
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
