"""`--set table.key=value`: change one value of a config from the command line."""

from __future__ import annotations

import tomllib
from typing import Any

from trainer.config.lines import KeyPath
from trainer.errors import UserError


def apply_override(raw: dict[str, Any], text: str) -> KeyPath:
    """Change `raw` in place as `text` (`table.key=value`) says.

    The value is TOML; a bare word that is no TOML value is a string. An element of an array of tables is named by its
    index or by its `name`: `data.source.0.weight=2`, `data.source.python.weight=2`. Tables that do not exist are made.

    Returns:
        The path that was set, with indices.

    Raises:
        UserError: `text` is no `key=value`, or the path leads through a value that is no table.
    """
    name, separator, value = text.partition("=")
    parts = [part.strip() for part in name.split(".")]
    if not separator or not all(parts):
        raise UserError(f"--set {text}", "is not of the form table.key=value", "write --set data.mixing.batch_size=8")
    node: Any = raw
    path: KeyPath = ()
    for position, part in enumerate(parts):
        step = _step(node, part, f"--set {text}", path)
        path = (*path, step)
        if position == len(parts) - 1:
            node[step] = parse_value(value.strip())
        elif isinstance(node, list):
            node = node[int(step)]
        else:
            node = node.setdefault(step, {})
    return path


def parse_value(text: str) -> Any:
    """`text` as a TOML value, or as it stands if it is none."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    # More keys mean that the text held a newline: then it is no single value.
    return parsed["value"] if parsed.keys() == {"value"} else text


def _step(node: Any, part: str, option: str, path: KeyPath) -> str | int:
    here = ".".join(map(str, path)) or "the config"
    if isinstance(node, dict):
        return part
    if not isinstance(node, list):
        raise UserError(option, f"{here} is no table but {node!r}", "leave the last part of the key away")
    if part.isascii() and part.isdigit() and int(part) < len(node):
        return int(part)
    names = [element.get("name") for element in node if isinstance(element, dict)]
    if part in names:
        return names.index(part)
    known = ", ".join(str(name) for name in names if name)
    raise UserError(option, f"{here} has no element {part!r}", f"use 0 to {len(node) - 1} or a name: {known}")
