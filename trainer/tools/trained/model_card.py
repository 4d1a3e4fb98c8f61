"""The model card that lies beside exported weights: what the model is, what it was trained on, and how to load it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config.schema import ModelTable
from trainer.model.families import DEFAULT, FAMILIES
from trainer.tools.trained.saved_model import SavedCheckpoint

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


def _sizes(model: ModelTable) -> str:
    if "from" in model.args:  # whose sizes count
        return f"begun from {model.args['from']}, whose sizes it has"
    return f"dim {model.dim}, {model.num_layers} layers"


def render_card(
    saved: SavedCheckpoint,
    results: Mapping[str, float],
    *,
    parameters: int,
    vocab_size: int,
    name: str,
    out: str,
    as_hugging_face: bool = False,
) -> str:
    """README.md of an exported model.

    Args:
        results: the last logged value of each key.
        name: the run's.
        out: the directory, as the commands in the card name it.
        as_hugging_face: the directory is one for `from_pretrained`.
    """
    model = saved.config.model
    config, environment = saved.config, saved.state.get("environment", {})
    rows: list[tuple[str, Any]] = [
        ("parameters", f"{parameters:,}"),
        ("model", f"`{model.target or model.family or DEFAULT}`, {_sizes(model)}"),
        ("tokenizer", f"`{config.data.tokenizer}`, {vocab_size:,} ids, the one that begins a document included"),
        ("trained for", f"{saved.step:,} of {config.train.steps:,} steps in cells of {config.data.seq_len} tokens"),
        ("tokens seen", f"{int(saved.state['tracker']['tokens_seen']):,}"),
        ("data", ", ".join(f"{source.name}" for source in config.data.source)),
        ("precision", config.train.precision),
        ("torch", environment.get("packages", {}).get("torch", "unknown")),
    ]
    rows += [(f"`{key}`", f"{results[key]:.4f}") for key in SHOWN_RESULTS if key in results]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    option, argument = (" --trust-code", ", trust_code=True") if model.target is not None else ("", "")
    return f"""\
---
library_name: {"transformers" if as_hugging_face else "trainer"}
tags: [language-model]
---
# {name}

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
