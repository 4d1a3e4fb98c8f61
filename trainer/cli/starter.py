"""The TOML that `train init` writes: every line that a newcomer is likely to change, with what it means beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.cli.counts import counted
from trainer.data.inspection.sizing import Sizes

TIE_FROM_VOCABULARY = 8192  # ids from which on one embedding for both ends saves most of a small model


@dataclass(frozen=True)
class Starter:
    """What a starter config says.

    Args:
        name: of the run and of its source.
        found: lines that say what was found, for the head of the file.
        notes: lines that say what to look at.
        source: keys of `[[data.source]]` but the name.
        tokenizer, vocab_size: as in `[data]`; vocab_size 0 where the tokenizer knows.
        num_ids: of the model.
        largest_id: of token ids: the largest that was seen, and how often.
        names_eod: the source may say which id ends a document, and does not.
    """

    name: str
    found: list[str]
    notes: list[str]
    source: Mapping[str, Any]
    tokenizer: str
    vocab_size: int
    num_ids: int
    largest_id: tuple[int, int]
    names_eod: bool
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
        "# Written by `train init`. Every key: train config docs. What follows from this file: train check --config FILE"
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
# precision = "bf16"   # on a GPU that has it
"""


def _data(starter: Starter) -> str:
    sizes = starter.sizes
    lines = [
        "[data]",
        f"seq_len = {sizes.seq_len}   # tokens in a cell: what is trained on at once; state is carried on",
    ]
    lines.append(f"tokenizer = {toml_value(starter.tokenizer)}   # bytes, ids, or the path of a tokenizer.json")
    if starter.vocab_size:
        seen, times = starter.largest_id
        lines.append(f"# The largest id is {seen} (it occurs {times:,} times). Set this to your tokenizer's size.")
        lines.append(f"vocab_size = {starter.vocab_size}")
    lines.append(f"max_group_cells = {sizes.max_group_cells}   # state is carried over so many cells at most")
    if sizes.pack:
        lines.append("pack = true   # most documents are shorter than a cell: several share a row")
    lines += ["", "[data.mixing]"]
    lines.append(f"num_streams_mixed = {sizes.num_streams_mixed}   # files that are read side by side (K)")
    lines.append(f"batch_size = {sizes.batch_size}   # cells per micro-batch and rank")
    return "\n".join([*lines, ""])


def _source(starter: Starter) -> str:
    lines = ["# More [[data.source]] tables blend more data; weight says in which proportion.", "[[data.source]]"]
    lines.append(f"name = {toml_value(starter.name)}")
    lines += [f"{key} = {toml_value(value)}" for key, value in starter.source.items()]
    if starter.names_eod:
        seen, times = starter.largest_id
        hint = f"{seen}" if times > 1 else "..."
        lines.append(f"# eod = {hint}   # the id that ends a document, if one does; without it a file is one document")
    return "\n".join([*lines, ""])


def _eval(starter: Starter) -> str:
    sizes = starter.sizes
    if not sizes.holdout_fraction:
        return (
            "# [eval] is left out: there are too few documents to hold any out. With more of them:\n"
            "# [eval]\n# every = 50\n# holdout_fraction = 0.05\n"
        )
    return f"""\
[eval]
every = {max(sizes.steps // 10, 10)}
holdout_fraction = {sizes.holdout_fraction}   # share of the documents that is never trained on
"""


def _model(starter: Starter) -> str:
    lines = ["[model]", "dim = 192", "num_layers = 4"]
    if starter.num_ids >= TIE_FROM_VOCABULARY:
        lines.append("args = { tie_embeddings = true }   # one matrix of vocabulary x dim instead of two")
    return "\n".join([*lines, ""])


def _rest(starter: Starter) -> str:
    sizes = starter.sizes
    types = "\n[objective]\ntoken_types = true   # loss by type of character\n" if starter.tokenizer == "bytes" else ""
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
