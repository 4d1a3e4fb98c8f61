"""The TOML that `train init` writes: the keys that a newcomer is likely to change, each with its meaning beside it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.tools.init.sizing import MIXES, Mix, Part, Sizes

WIDTH = 120  # of notes
TIE_FROM_VOCABULARY = 8192  # from this size on, tied embeddings save most of a small model's parameters


@dataclass(frozen=True)
class StarterSource:
    """A `[[data.source]]`.

    Args:
        keys: all but name, weight and mixing.
        part: its modality, if the source is one of several; None: the only one.
    """

    name: str
    keys: Mapping[str, Any]
    part: Part | None = None


@dataclass(frozen=True)
class Starter:
    """Contents of a starter config.

    Args:
        name: of the run.
        found: lines on the data that was found, for the head of the file.
        notes: lines on what the user should check.
        sources: of the blend.
        mix: the shares that the weights of several sources make.
        tokenizer, vocab_size: as in `[data]`; vocab_size 0 where the tokenizer has its own.
        num_ids: vocabulary of the model.
        largest_id: the largest token id, and how often it occurs.
        suggests_eod: whether to suggest the key `eod`, which the sources lack.
        length: of the run, in words.
    """

    name: str
    found: list[str]
    notes: list[str]
    sources: list[StarterSource]
    mix: Mix
    tokenizer: str
    vocab_size: int
    num_ids: int
    largest_id: tuple[int, int]
    suggests_eod: bool
    sizes: Sizes
    length: str

    @property
    def mix_lines(self) -> list[str]:
        """The shares of each modality, a line each; none for a single one."""
        parts = [source.part for source in self.sources if source.part is not None]
        width = max((len(part.modality) for part in parts), default=0)
        return [f"{part.modality:<{width}}  {_shares(part)}" for part in parts]


def _shares(part: Part) -> str:
    return f"{part.token_share:.1%} of the training tokens, {part.drawn_share:.1%} of what is drawn"


def render_starter(starter: Starter, *, schema: str | None) -> str:
    """The whole file.

    Args:
        schema: path of the JSON Schema from the file's directory, for editors; None: none.
    """
    sizes = starter.sizes
    lines = [f"#:schema {schema}"] if schema else []
    lines += [
        "# Written by `train init`. All keys: train config docs. Values derived from this file: train check --config FILE",
        *(f"# {line}" for line in starter.found),
        *(line for note in starter.notes for line in _comment(f"Note: {note}")),
        "",
        "[run]",
        f"name = {_toml(starter.name)}   # the run directory is runs/<name>-<time>",
        "seed = 0",
        "",
        "[train]",
        f"steps = {sizes.steps}   # {starter.length}",
        f"micro_batches = {sizes.micro_batches}   # micro-batches per optimizer step and rank",
        '# precision = "bf16"   # on a GPU that supports it',
        "",
        "[data]",
        f"seq_len = {sizes.seq_len}   # tokens per cell; the recurrent state is carried from cell to cell",
        f"tokenizer = {_toml(starter.tokenizer)}   # bytes, ids, or the path of a tokenizer.json",
    ]
    if starter.vocab_size:
        largest, times = starter.largest_id
        lines += [
            f"# The largest id is {largest} (it occurs {times:,} times). Set this to your tokenizer's vocabulary size.",
            f"vocab_size = {starter.vocab_size}",
        ]
    lines.append(f"max_group_cells = {sizes.max_group_cells}   # state is carried over at most this many cells")
    if sizes.pack:
        lines.append("pack = true   # most documents are shorter than a cell, so several share a row")
    lines += [
        "",
        "[data.mixing]",
        f"num_streams_mixed = {sizes.num_streams_mixed}   # streams read concurrently (K)",
        f"batch_size = {sizes.batch_size}   # cells per micro-batch and rank",
        "",
        *_source_lines(starter),
        *_eval_lines(sizes),
        "",
        "[model]",
        "dim = 192",
        "num_layers = 4",
    ]
    if starter.num_ids >= TIE_FROM_VOCABULARY:
        lines.append("args = { tie_embeddings = true }   # one matrix of vocabulary x dim instead of two")
    lines += ["", "[optimizer]", "lr = 2e-3", ""]
    if starter.tokenizer == "bytes":
        lines += ["[objective]", "token_types = true   # report the loss by type of character", ""]
    lines += [
        "[scheduler]",
        'name = "cosine"',
        f"warmup_steps = {sizes.steps // 20}",
        "",
        "[metrics]",
        "log_interval = 10",
        'wandb = { mode = "auto", project = "trainer" }   # online with a login, otherwise offline; or "disabled"',
        "",
        "[checkpoint]",
        f"every = {max(sizes.steps // 5, 1)}",
        "",
    ]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    """A string, number, boolean or list of them, as TOML writes it."""
    return json.dumps(value, ensure_ascii=False)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent="# ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False
    )


def _source_lines(starter: Starter) -> list[str]:
    lines = ["# Add [[data.source]] tables to blend in more data; weight sets the proportions."]
    if len(starter.sources) > 1:
        others = ", ".join(f"{mix}: {words}" for mix, (words, _) in MIXES.items() if mix != starter.mix)
        text = "One source per modality. A weight is a share of the micro-batches; these draw each modality "
        text += f"{MIXES[starter.mix][0]} (train init --weights {starter.mix}). Other choices: {others}."
        lines = _comment(text)
    for source in starter.sources:
        lines += ["[[data.source]]", f"name = {_toml(source.name)}"]
        lines += [f"{key} = {_toml(value)}" for key, value in source.keys.items()]
        if (part := source.part) is not None:
            lines.append(f"weight = {part.weight:.4g}   # {_shares(part)}")
            if part.streams < starter.sizes.num_streams_mixed:
                lines.append(f"mixing = {{ num_streams_mixed = {part.streams} }}")
        if starter.suggests_eod:
            largest, times = starter.largest_id
            hint = largest if times > 1 else "..."
            meaning = "id that ends a document, if there is one; without it a file is one document"
            lines.append(f"# eod = {hint}   # {meaning}")
        lines.append("")
    return lines


def _eval_lines(sizes: Sizes) -> list[str]:
    if not sizes.holdout_fraction:
        missing = "# No [eval]: there are too few documents to hold any out. With more of them:"
        return [missing, "# [eval]", "# every = 50", "# holdout_fraction = 0.05"]
    return [
        "[eval]",
        f"every = {max(sizes.steps // 10, 10)}",
        f"holdout_fraction = {sizes.holdout_fraction}   # share of the documents held out for evaluation",
    ]
