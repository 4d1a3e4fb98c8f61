"""The TOML that `train init` writes: the keys that a newcomer is likely to change, each with its meaning beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.cli.terminal import counted
from trainer.data.inspection.sizing import Sizes

TIE_FROM_VOCABULARY = 8192  # from this size on, tied embeddings save most of a small model's parameters


@dataclass(frozen=True)
class Starter:
    """Contents of a starter config.

    Args:
        name: of the run and of its source.
        found: lines on the data that was found, for the head of the file.
        notes: lines on what the user should check.
        source: keys of `[[data.source]]` except the name.
        tokenizer, vocab_size: as in `[data]`; vocab_size 0 where the tokenizer has its own.
        num_ids: vocabulary of the model.
        largest_id: the largest token id, and how often it occurs.
        suggests_eod: whether to suggest the key `eod`, which the source lacks.
    """

    name: str
    found: list[str]
    notes: list[str]
    source: Mapping[str, Any]
    tokenizer: str
    vocab_size: int
    num_ids: int
    largest_id: tuple[int, int]
    suggests_eod: bool
    sizes: Sizes


def render_starter(starter: Starter, *, schema: str | None) -> str:
    """The whole file.

    Args:
        schema: path of the JSON Schema from the file's directory, for editors; None: none.
    """
    blocks = [
        _head(starter, schema),
        _train(starter),
        _data(starter),
        _source(starter),
        _eval(starter),
        _model(starter),
        _rest(starter),
    ]
    return "\n".join(blocks)


def toml_value(value: Any) -> str:
    """A string, number, boolean or list of them, as TOML writes it."""
    return json.dumps(value, ensure_ascii=False)


def _head(starter: Starter, schema: str | None) -> str:
    lines = [f"#:schema {schema}"] if schema else []
    lines += [
        "# Written by `train init`. All keys: train config docs. Values derived from this file: train check --config FILE"
    ]
    lines += [f"# {line}" for line in starter.found]
    lines += [f"# Note: {line}" for line in starter.notes]
    lines += ["", "[run]", f"name = {toml_value(starter.name)}   # the run lives in runs/<name>-<time>", "seed = 0", ""]
    return "\n".join(lines)


def _train(starter: Starter) -> str:
    sizes = starter.sizes
    return f"""\
[train]
steps = {sizes.steps}   # about {counted(sizes.passes, "pass")} over the data on 1 rank
micro_batches = {sizes.micro_batches}   # micro-batches per optimizer step and rank
# precision = "bf16"   # on a GPU that supports it
"""


def _data(starter: Starter) -> str:
    sizes = starter.sizes
    lines = [
        "[data]",
        f"seq_len = {sizes.seq_len}   # tokens per cell; the recurrent state is carried from cell to cell",
    ]
    lines.append(f"tokenizer = {toml_value(starter.tokenizer)}   # bytes, ids, or the path of a tokenizer.json")
    if starter.vocab_size:
        seen, times = starter.largest_id
        lines.append(
            f"# The largest id is {seen} (it occurs {times:,} times). Set this to your tokenizer's vocabulary size."
        )
        lines.append(f"vocab_size = {starter.vocab_size}")
    lines.append(f"max_group_cells = {sizes.max_group_cells}   # state is carried over at most this many cells")
    if sizes.pack:
        lines.append("pack = true   # most documents are shorter than a cell, so several share a row")
    lines += ["", "[data.mixing]"]
    lines.append(f"num_streams_mixed = {sizes.num_streams_mixed}   # streams read concurrently (K)")
    lines.append(f"batch_size = {sizes.batch_size}   # cells per micro-batch and rank")
    return "\n".join([*lines, ""])


def _source(starter: Starter) -> str:
    lines = ["# Add [[data.source]] tables to blend in more data; weight sets the proportions.", "[[data.source]]"]
    lines.append(f"name = {toml_value(starter.name)}")
    lines += [f"{key} = {toml_value(value)}" for key, value in starter.source.items()]
    if starter.suggests_eod:
        seen, times = starter.largest_id
        hint = f"{seen}" if times > 1 else "..."
        lines.append(f"# eod = {hint}   # id that ends a document, if there is one; without it a file is one document")
    return "\n".join([*lines, ""])


def _eval(starter: Starter) -> str:
    sizes = starter.sizes
    if not sizes.holdout_fraction:
        return (
            "# No [eval]: there are too few documents to hold any out. With more of them:\n"
            "# [eval]\n# every = 50\n# holdout_fraction = 0.05\n"
        )
    return f"""\
[eval]
every = {max(sizes.steps // 10, 10)}
holdout_fraction = {sizes.holdout_fraction}   # share of the documents held out for evaluation
"""


def _model(starter: Starter) -> str:
    lines = ["[model]", "dim = 192", "num_layers = 4"]
    if starter.num_ids >= TIE_FROM_VOCABULARY:
        lines.append("args = { tie_embeddings = true }   # one matrix of vocabulary x dim instead of two")
    return "\n".join([*lines, ""])


def _rest(starter: Starter) -> str:
    sizes = starter.sizes
    types = (
        "\n[objective]\ntoken_types = true   # report the loss by type of character\n"
        if starter.tokenizer == "bytes"
        else ""
    )
    return f"""\
[optimizer]
lr = 2e-3
{types}
[scheduler]
name = "cosine"
warmup_steps = {sizes.steps // 20}

[metrics]
log_interval = 10
# wandb = {{ mode = "offline", project = "trainer" }}

[checkpoint]
every = {max(sizes.steps // 5, 1)}
"""
