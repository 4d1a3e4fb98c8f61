"""The TOML that `train init` writes: the keys that a newcomer is likely to change, each with its meaning beside it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib import resources
from typing import Any

from trainer.tools.init.sizing import Part, Sizes

WIDTH = 120  # of notes
TIE_FROM_VOCABULARY = 8192  # from this size on, tied embeddings save most of a small model's parameters
VOCABULARY = """\
# The largest id is {} (it occurs {:,} times). Set this to your tokenizer's vocabulary size.
vocab_size = {}
"""
END = "# eod = {}   # {}, as a target behind each document: generation learns to stop\n"
TYING = "args = { tie_embeddings = true }   # one matrix of vocabulary x dim instead of two\n"
OBJECTIVE = "[objective]\ntoken_types = true   # report the loss by type of character\n\n"
EVALUATION = """\
[eval]
every = {}
holdout_fraction = {}   # share of the documents held out for evaluation
depth = true   # report the loss by the tokens read before, with and without carried state"""
NO_EVALUATION = """\
# No [eval]: there are too few documents to hold any out. With more of them:
# [eval]
# every = 50
# holdout_fraction = 0.05
# depth = true"""
# A string, number, boolean or list of them, as TOML writes it.
_toml = partial(json.dumps, ensure_ascii=False)


@dataclass(frozen=True)
class StarterSource:
    """A `[[data.source]]`: `keys` are all but name, weight and mixing; `part` is its modality if it is one of several."""

    name: str
    keys: Mapping[str, Any]
    part: Part | None = None


@dataclass(frozen=True)
class Starter:
    name: str
    found: list[str]
    """Lines on the data, for the head of the file."""
    notes: list[str]
    """What the user should check."""
    sources: list[StarterSource]
    tokenizer: str
    vocab_size: int
    """As in `[data]`: 0 where the tokenizer has its own."""
    num_ids: int
    """Vocabulary of the model."""
    largest_id: tuple[int, int]
    """And how often it occurs."""
    suggests_eod: bool
    """Whether to suggest the key `eod`, which the sources lack."""
    end: tuple[str, int] | None
    """The tokenizer's mark of the end of a text, and its id."""
    sizes: Sizes
    length: str
    """Of the run, in words."""


def render_starter(starter: Starter, *, schema: str | None) -> str:
    """The whole file.

    Args:
        schema: path of the JSON Schema from the file's directory, for editors; None: none.
    """
    sizes = starter.sizes
    notes = [_comment(f"Note: {note}") for note in starter.notes]
    vocabulary = end = tying = objective = ""
    if starter.end:
        mark, number = starter.end
        end = END.format(number, mark)
    if starter.vocab_size:
        vocabulary = VOCABULARY.format(*starter.largest_id, starter.vocab_size)
    if starter.num_ids >= TIE_FROM_VOCABULARY:
        tying = TYING
    if starter.tokenizer == "bytes":
        objective = OBJECTIVE
    evaluation = NO_EVALUATION
    if sizes.holdout_fraction:
        evaluation = EVALUATION.format(max(sizes.steps // 10, 10), sizes.holdout_fraction)
    template = resources.files("trainer.tools.init") / "starter.toml.in"
    text = template.read_text(encoding="utf-8").format(
        **{**asdict(sizes), "name": _toml(starter.name), "tokenizer": _toml(starter.tokenizer)},
        head="\n".join([*(f"# {line}" for line in starter.found), *notes]),
        length=starter.length,
        vocabulary=vocabulary,
        end=end,
        sources=_sources(starter),
        evaluation=evaluation,
        tying=tying,
        objective=objective,
        warmup=sizes.steps // 20,
        save=max(sizes.steps // 5, 1),
    )
    if schema:
        text = f"#:schema {schema}\n{text}"
    return text


def _comment(text: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent="# ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False
    )


def _sources(starter: Starter) -> str:
    head = "# Add [[data.source]] tables to blend in more data; weight sets the proportions."
    if len(starter.sources) > 1:
        head = (
            "# One source per modality. A weight is a share of the tokens: here each modality's own share of the data."
        )
    blocks = []
    for source in starter.sources:
        lines = ["[[data.source]]", f"name = {_toml(source.name)}"]
        lines += [f"{key} = {_toml(value)}" for key, value in source.keys.items()]
        part = source.part
        if part is not None:
            lines.append(f"weight = {part.weight:.4g}   # {part.tokens:,} training tokens")
            if part.streams < starter.sizes.num_streams_mixed:
                lines.append(f"mixing = {{ num_streams_mixed = {part.streams} }}")
        if starter.suggests_eod:
            largest, times = starter.largest_id
            meaning = "id that ends a document, if there is one; without it a file is one document"
            eod = str(largest) if times > 1 else "..."  # an id that ends documents occurs more than once
            lines.append(f"# eod = {eod}   # {meaning}")
        blocks.append("\n".join(lines))
    return head + "\n" + "\n\n".join(blocks)
