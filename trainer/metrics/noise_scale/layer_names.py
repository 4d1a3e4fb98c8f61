"""Which layer a parameter belongs to, by its name."""

from __future__ import annotations

from collections.abc import Iterable

# What DDP, torch.compile and checkpoint wrappers put into the names of the parameters below them.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def layer_of(name: str) -> str:
    """The layer of a parameter: its name up to the first number, `blocks.0` of `blocks.0.mixer.weight`; without a number the
    module that owns it, `embedding` of `embedding.weight`; of a parameter of the model itself its own name."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    kept = parts[: number + 1] if number is not None else parts[:-1] or parts
    return as_segment(".".join(kept))


def as_segment(name: str) -> str:
    """A name as one segment of a metric key, in which a slash separates segments."""
    return name.replace("/", "_")


def grouped(names: Iterable[str]) -> dict[str, list[int]]:
    """The indices of the names by layer, in the order of appearance."""
    layers: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        layers.setdefault(layer_of(name), []).append(index)
    return layers
