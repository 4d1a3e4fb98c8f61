"""`--set table.key=value`: change one value of a config from the command line."""

from __future__ import annotations

import tomllib
from typing import Any

from trainer.config.lines import KeyPath
from trainer.errors import UserError


def apply_override(raw: dict[str, Any], text: str) -> KeyPath:
    """Change `raw` in place as `text` (`table.key=value`) says.

    The value is TOML; a bare word that is not a TOML value is a string. An element of an array of tables is named by its
    index or by its `name`: `data.source.0.weight=2`, `data.source.python.weight=2`. Missing tables are created.

    Returns:
        The path that was set, with indices.

    Raises:
        UserError: `text` is not of the form `key=value`, or the path leads through a value that is not a table.
    """
    name, separator, value = text.partition("=")
    parts = [part.strip() for part in name.split(".")]
    if not separator or not all(parts):
        raise UserError(f"--set {text}", "is not of the form table.key=value", "write --set data.mixing.batch_size=8")
    node: Any = raw
    path: KeyPath = ()
    for part in parts[:-1]:
        path = (*path, _step(node, part, text, path))
        node = node.setdefault(part, {}) if isinstance(node, dict) else node[path[-1]]
    path = (*path, _step(node, parts[-1], text, path))
    node[path[-1]] = parse_value(value.strip())
    return path


def parse_value(text: str) -> Any:
    """`text` as a TOML value, or unchanged if it is not one."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # not TOML, or an integer of thousands of digits
        return text
    # Further keys come from a newline in the text: then it is not a single value.
    return parsed["value"] if parsed.keys() == {"value"} else text


def _step(node: Any, part: str, text: str, path: KeyPath) -> str | int:
    """The key or index of `node` that `part` names."""
    here = ".".join(map(str, path)) or "the config"
    if isinstance(node, dict):
        return part
    if not isinstance(node, list):
        raise UserError(f"--set {text}", f"{here} is not a table but {node!r}", "drop the last part of the key")
    if part.isascii() and part.isdigit() and int(part) < len(node):
        return int(part)
    names = [element.get("name") for element in node if isinstance(element, dict)]
    if part in names:
        return names.index(part)
    known = ", ".join(str(name) for name in names if name)
    raise UserError(f"--set {text}", f"{here} has no element {part!r}", f"use 0 to {len(node) - 1} or a name: {known}")
