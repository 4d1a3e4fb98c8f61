"""A checkpoint as a directory of safetensors, config, tokenizer and model card."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import chdir
from pathlib import Path
from typing import Any

from trainer.config.load import to_toml
from trainer.config.schema import ModelTable
from trainer.data.tokenizer import copy_tokenizer, load_tokenizer
from trainer.errors import UserError
from trainer.files import write_file
from trainer.model.families import DEFAULT, FAMILIES
from trainer.model.weights import WEIGHTS_FILE, save_weights
from trainer.tools.runs.load import load_run
from trainer.tools.trained.saved_model import CONFIG_FILE, SavedCheckpoint, model_with, read_checkpoint, refuse_code

HUGGING_FACE_CONFIG, CARD = "config.json", "README.md"
SHOWN_RESULTS = ("loss", "eval_loss", "eval_bits_per_byte", "eval_perplexity")
_USE = """\
## Use

Sample from it, or start a run of your own from these weights:

```
train sample {out} --prompt "Once" --bytes 200{option}
train --config x.toml --set model.weights={out}
```

In Python:

```python
import torch
from trainer.tools.trained.saved_model import load_model

saved = load_model("{out}", step=None, device=torch.device("cpu"){argument})
tokens = torch.tensor([[saved.tokenizer.bos_id, *saved.tokenizer.encode("Once")]])
logits, state = saved.model(tokens=tokens, state=None)  # [B, T, V]; the state to continue from
```
"""
_USE_HUGGING_FACE = """\
## Use

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{out}")
```

Every document began with the id {bos}, which no tokenizer adds: put it before the ids of a text.
"""
_TRAIN_ON_ADAPTER = '\nTrain on, by `[model] family` and `args = {{ from = "{out}" }}`.\n'
_TRAIN_ON_OWN = "\nTo train on, `train export --format safetensors` writes the weights that `[model] weights` reads.\n"


def export_model(
    run_dir: Path, out: Path, *, step: int | None, as_hugging_face: bool = False, trust_code: bool = False
) -> SavedCheckpoint:
    """Write `model.safetensors`, `config.toml`, `README.md` and, if one is used, the files of the tokenizer into `out`.

    All is written next to `out` first, so that `out` is complete or absent.

    Args:
        as_hugging_face: weights and `config.json` as the model's own `save_pretrained` writes them, for `from_pretrained`;
            no `config.toml`.
        trust_code: import the model that the config names, which `as_hugging_face` builds.

    Raises:
        UserError: the config names code; no checkpoint, a missing tokenizer or package, or a model that is none of
            `transformers`.
        OSError: `out` cannot be written.
    """
    saved = read_checkpoint(run_dir, step)
    config = saved.config
    tokenizer = load_tokenizer(config.data.tokenizer, vocab_size=config.data.vocab_size)
    run_dir, place = run_dir.absolute(), out.absolute()
    staging = place.with_name(f".{out.name}.{os.getpid()}")
    try:
        staging.mkdir(parents=True)
        if as_hugging_face:
            refuse_code(config, run_dir, "model", trusted=trust_code)
            with chdir(os.curdir):  # which the model's code may leave
                _save_pretrained(saved, tokenizer.vocab_size, staging)
        else:
            metadata = {"format": "pt", "step": str(saved.step), "tokenizer": tokenizer.name, "run": run_dir.name}
            save_weights(saved.weights, staging / WEIGHTS_FILE, metadata)
            write_file(staging / CONFIG_FILE, to_toml(config))
        if config.data.tokenizer.endswith(".json"):
            copy_tokenizer(Path(config.data.tokenizer), staging)
        card = _card(saved, _last_results(run_dir, saved.step), tokenizer.vocab_size, str(out), as_hugging_face)
        write_file(staging / CARD, card)
        shutil.rmtree(place, ignore_errors=True)
        staging.rename(place)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return saved


def _save_pretrained(saved: SavedCheckpoint, vocab_size: int, directory: Path) -> None:
    table, seq_len = saved.config.model, saved.config.data.seq_len
    model: Any = model_with(saved.weights, saved.config, vocab_size, saved.path)
    if not hasattr(model, "save_pretrained"):
        problem = f"{table.target or table.family or DEFAULT} has no save_pretrained(directory)"
        raise UserError("--format hf", problem, "export with --format safetensors")
    model.save_pretrained(directory)
    file = directory / HUGGING_FACE_CONFIG
    if (
        not model.state_width and file.is_file()
    ):  # a model without a state has seen as many positions together as a row has
        found = json.loads(file.read_text())
        if "max_position_embeddings" in found:
            write_file(file, json.dumps({**found, "max_position_embeddings": seq_len}, indent=2) + "\n")


def _last_results(run_dir: Path, step: int) -> dict[str, float]:
    """The last value of the keys of the card that was logged at `step` or before; empty if the run has no record."""
    try:
        run = load_run(run_dir)
    except UserError:
        return {}
    columns = {key: zip(*run.column(key), strict=True) for key in SHOWN_RESULTS}
    upto = {key: [value for at, value in column if at <= step] for key, column in columns.items()}
    return {key: values[-1] for key, values in upto.items() if values}


def _card(saved: SavedCheckpoint, results: dict[str, float], vocab_size: int, out: str, as_hugging_face: bool) -> str:
    """README.md of an exported model: what it is, what it was trained on, and how to load it.

    Args:
        results: the last logged value of each key.
        out: the directory, as the commands in the card name it.
        as_hugging_face: the directory is one for `from_pretrained`.
    """
    config, model, environment = saved.config, saved.config.model, saved.state.get("environment", {})
    sizes = f"dim {model.dim}, {model.num_layers} layers"
    if "from" in model.args:
        sizes = f"begun from {model.args['from']}, whose sizes it has"
    parameters = {tensor.data_ptr(): tensor.numel() for tensor in saved.weights.values() if tensor.numel()}
    rows: list[tuple[str, Any]] = [
        ("parameters", f"{sum(parameters.values()):,}"),
        ("model", f"`{model.target or model.family or DEFAULT}`, {sizes}"),
        ("tokenizer", f"`{config.data.tokenizer}`, {vocab_size:,} ids, the one that begins a document included"),
        ("trained for", f"{saved.step:,} of {config.train.steps:,} steps in cells of {config.data.seq_len} tokens"),
        ("tokens seen", f"{int(saved.state['tracker']['tokens_seen']):,}"),
        ("data", ", ".join(source.name for source in config.data.source)),
        ("precision", config.train.precision),
        ("torch", environment.get("packages", {}).get("torch", "unknown")),
        *((f"`{key}`", f"{value:.4f}") for key, value in results.items()),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    option, argument = (" --trust-code", ", trust_code=True") if model.target is not None else ("", "")
    return f"""\
---
library_name: {"transformers" if as_hugging_face else "trainer"}
tags: [language-model]
---
# {config.run.name}

A causal language model, exported after step {saved.step:,} by `train export`. The values below are the last that the run
logged up to that step{"" if as_hugging_face else "; the whole config is in `config.toml`"}.

| | |
|---|---|
{table}

What the data may be used for, and so what this model may, is for whoever publishes it to say here.

{_use(model, as_hugging_face).format(out=out, bos=vocab_size - 1, option=option, argument=argument)}"""


def _use(model: ModelTable, as_hugging_face: bool) -> str:
    if not as_hugging_face:
        return _USE
    family = FAMILIES.get(model.family or DEFAULT)
    is_adapter = model.target is None and family is not None and "model_type" in family.args
    return _USE_HUGGING_FACE + (_TRAIN_ON_ADAPTER if is_adapter else _TRAIN_ON_OWN)
