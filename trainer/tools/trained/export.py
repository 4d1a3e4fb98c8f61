"""A run's newest model as a directory of safetensors, config, tokenizer and model card."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path

from trainer.config.load import to_toml
from trainer.data.tokenizer import load_tokenizer
from trainer.errors import UserError
from trainer.files import write_file
from trainer.model.families import DEFAULT
from trainer.model.weights import WEIGHTS_FILE, save_weights
from trainer.tools.runs.load import load_run
from trainer.tools.trained.model_card import render_card
from trainer.tools.trained.saved_model import CONFIG_FILE, SavedCheckpoint, read_checkpoint, refuse_code
from trainer.training.setup.plan import build_model

HUGGING_FACE_CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_PARTS = (
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
)
"""What `transformers` reads beside a tokenizer.json, of which it makes the same tokenizer."""


def export_model(
    run_dir: Path, out: Path, *, step: int | None, as_hugging_face: bool = False, trust_code: bool = False
) -> SavedCheckpoint:
    """Write `model.safetensors`, `config.toml`, `README.md` and, if one is used, the files of the tokenizer into `out`.

    All is written beside `out` first, so that `out` is whole or absent.

    Args:
        as_hugging_face: weights and `config.json` as the model's own `save_pretrained` writes them, for `from_pretrained`;
            no `config.toml`.
        trust_code: import the model that the config names, which `as_hugging_face` builds.

    Raises:
        UserError: the config names code; no checkpoint, a missing tokenizer or package, a model that is none of `transformers`,
            or `out` cannot be written.
    """
    saved = read_checkpoint(run_dir, step)
    config = saved.config
    tokenizer = load_tokenizer(config.data.tokenizer, vocab_size=config.data.vocab_size)
    run_dir, place = run_dir.absolute(), out.absolute()
    staging = place.with_name(f".{out.name}.{os.getpid()}")
    try:
        staging.mkdir(parents=True)
        metadata = {
            "format": "pt",
            "step": str(saved.step),
            "tokenizer": tokenizer.name,
            "run": run_dir.name,
        }
        if as_hugging_face:
            refuse_code(config, run_dir, "model", trusted=trust_code)
            with chdir(os.curdir):  # which the model's code may leave
                _save_pretrained(saved, tokenizer.vocab_size, staging)
        else:
            save_weights(saved.weights, staging / WEIGHTS_FILE, metadata)
            write_file(staging / CONFIG_FILE, to_toml(config))
        if config.data.tokenizer.endswith(".json"):
            copy_tokenizer(Path(config.data.tokenizer), staging)
        card = render_card(
            saved,
            last_results(run_dir, saved.step),
            parameters=num_parameters(saved),
            vocab_size=tokenizer.vocab_size,
            name=config.run.name,
            out=str(out),
            as_hugging_face=as_hugging_face,
        )
        write_file(staging / "README.md", card)
        shutil.rmtree(place, ignore_errors=True)
        staging.rename(place)
    except OSError as error:
        raise UserError(str(out), f"cannot be written: {error.strerror}", "choose another --out") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return saved


def _save_pretrained(saved: SavedCheckpoint, vocab_size: int, directory: Path) -> None:
    model = build_model(saved.config.model, vocab_size, seq_len=saved.config.data.seq_len)
    save = getattr(model, "save_pretrained", None)
    if save is None:
        table = saved.config.model
        name, fix = table.target or table.family or DEFAULT, "export with --format safetensors"
        if table.target is not None:
            fix += ", or give your model a save_pretrained(directory)"
        raise UserError("--format hf", f"{name} has no counterpart in the package transformers", fix)
    model.load_state_dict(saved.weights)
    save(directory)
    if not model.state_width:
        _limit_context(directory / HUGGING_FACE_CONFIG, saved.config.data.seq_len)


def _limit_context(file: Path, seq_len: int) -> None:
    """Say in a `config.json` how many positions a model without state has seen together."""
    config = json.loads(file.read_text()) if file.is_file() else {}
    if "max_position_embeddings" in config:
        write_file(file, json.dumps({**config, "max_position_embeddings": seq_len}, indent=2) + "\n")


def num_parameters(saved: SavedCheckpoint) -> int:
    """Weights in the checkpoint, tensors that share memory counted once."""
    owners = {tensor.data_ptr(): tensor.numel() for tensor in saved.weights.values() if tensor.numel()}
    return sum(owners.values())


def last_results(run_dir: Path, step: int) -> Mapping[str, float]:
    """The last value of each key that was logged at `step` or before; empty if the run has no record."""
    try:
        run = load_run(run_dir)
    except UserError:
        return {}
    found: dict[str, float] = {}
    for key in run.keys:
        steps, values = run.column(key)
        upto = [value for at, value in zip(steps, values, strict=True) if at <= step]
        if upto:
            found[key] = upto[-1]
    return found


def copy_tokenizer(path: Path, directory: Path) -> None:
    """Copy a tokenizer.json, and what belongs to it, for `AutoTokenizer`.

    Without a `tokenizer_config.json`, `transformers` would take the tokenizer of the model's family and give it special tokens,
    the first of which gets the id that begins documents; one that names no family is written then.
    """
    shutil.copyfile(path, directory / "tokenizer.json")
    for part in (path.with_name(name) for name in TOKENIZER_PARTS if path.name == "tokenizer.json"):
        if part.is_dir():
            shutil.copytree(part, directory / part.name)
        elif part.exists():
            shutil.copyfile(part, directory / part.name)
    if not (directory / TOKENIZER_CONFIG).exists():
        write_file(directory / TOKENIZER_CONFIG, '{"tokenizer_class": "PreTrainedTokenizerFast"}\n')
