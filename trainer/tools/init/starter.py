"""The TOML that `train init` writes: the keys that a newcomer is likely to change, explained."""

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
TIE_FROM_VOCABULARY = 8192  # from here on, tied embeddings save most of a small model
# A string, number, boolean or list of them, as TOML writes it.
_toml = partial(json.dumps, ensure_ascii=False)


@dataclass(frozen=True)
class StarterSource:
    """A `[[data.source]]`: `keys` are all but name, weight and mixing."""

    name: str
    keys: Mapping[str, Any]
    part: Part | None = None


@dataclass(frozen=True)
class Starter:
    name: str
    found: list[str]  # lines on the data, for the head of the file
    notes: list[str]  # what the user should check
    sources: list[StarterSource]
    tokenizer: str
    vocab_size: int  # as in `[data]`: 0 where the tokenizer has its own
    num_ids: int  # vocabulary of the model
    largest_id: tuple[int, int]  # and how often it occurs
    suggests_eod: bool  # whether to suggest the key `eod`, which the sources lack
    end: tuple[str, int] | None  # the tokenizer's mark of the end of a text, and its id
    sizes: Sizes
    length: str  # of the run, in words


def render_starter(starter: Starter, *, schema: str | None) -> str:
    """The whole file.
    `schema`: path of the JSON Schema from the file's directory, for editors; None: none."""
    sizes, (largest, times) = starter.sizes, starter.largest_id
    notes = [_comment(f"Note: {note}") for note in starter.notes]
    # Lines of the template that begin with one of these and a bar are optional.
    shown = {
        "ids": bool(starter.vocab_size),
        "end": starter.end is not None,
        "large": starter.num_ids >= TIE_FROM_VOCABULARY,
        "bytes": starter.tokenizer == "bytes",
        "held out": sizes.holdout_fraction > 0,
        "few": sizes.holdout_fraction == 0,
    }
    lines, template = [], resources.files("trainer.tools.init") / "starter.toml.in"
    for line in template.read_text(encoding="utf-8").splitlines(keepends=True):
        mark, _, rest = line.partition("|")
        if shown.get(mark, True):
            lines.append(rest if mark in shown else line)
    text = "".join(lines).format(
        **{**asdict(sizes), "name": _toml(starter.name), "tokenizer": _toml(starter.tokenizer)},
        head="\n".join([*(f"# {line}" for line in starter.found), *notes]),
        length=starter.length,
        largest=largest,
        times=times,
        vocab_size=starter.vocab_size,
        end=starter.end or ("", 0),
        sources=_sources(starter),
        every=max(sizes.steps // 10, 10),
        warmup=sizes.steps // 20,
        save=max(sizes.steps // 5, 1),
    )
    if schema:
        text = f"#:schema {schema}\n{text}"
    return text


def _comment(text: str) -> str:
    keep: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, WIDTH, initial_indent="# ", subsequent_indent="#   ", **keep)


def _sources(starter: Starter) -> str:
    head = "# Add [[data.source]] tables to blend in more data; weight sets the proportions."
    if len(starter.sources) > 1:
        head = "# One source per modality. A weight is a share of the tokens: "
        head += "here each modality's own share of the data."
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
            eod = str(largest) if times > 1 else "..."  # such an id occurs often
            lines.append(f"# eod = {eod}   # {meaning}")
        blocks.append("\n".join(lines))
    return head + "\n" + "\n\n".join(blocks)
