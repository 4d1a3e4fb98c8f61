"""Options of reading that no file of a source heeds: they would be ignored without a word."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.data.formats.own_format import is_import_path
from trainer.data.formats.registry import format_name, formats_with, takes_option
from trainer.data.streams.layout import Stream
from trainer.errors import UserError


def refuse_unheeded(streams: Sequence[Stream], format: str, given: Mapping[str, object], *, source: str = "") -> None:
    """Refuse `dtype`, `eod` and `text_split` where no stream is of a format that takes them.

    Args:
        streams, format: of the source.
        given: option -> its value; None, and `file` as `text_split`, are not given.
        source: how messages name it; empty: they do not.

    Raises:
        UserError: an option changes nothing.
    """
    if is_import_path(format):  # a format of the user's own may take any of them
        return
    for option, value in given.items():
        if value is None or (option, value) == ("text_split", "file"):
            continue
        names = [format_name(Path(stream.path), format) for stream in streams]
        if any(takes_option(name, option) for name in names):
            continue
        kinds = " or ".join("raw text" if name == "text" else name for name in formats_with(option))
        has = "the source has" if source else "there are"
        problem = f"is {json.dumps(value)}, but {has} no {kinds} files"
        fix = "remove it" + (": the index beside a .bin file defines it" if "megatron" in names else "")
        raise UserError(f"{source}: {option}" if source else option, problem, fix)
