"""Array types that several parts share; and hashes and random numbers that are pure functions of
their key.

Nothing here has state: the same key gives the same numbers in every process and after every
restart, so checkpoints need no generator state. The generators are numpy's counter-based Philox,
keyed by a blake2b digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]

IGNORED: Final = -100  # target without anything to predict, as torch's default `ignore_index`


def is_known(targets: Any) -> Any:
    """Where the targets, an array or a tensor, are known: ids but `IGNORED`, floats but NaN."""
    if "float" in str(targets.dtype):
        return targets == targets  # not so of NaN alone
    return targets != IGNORED


def weights_of(targets: Any) -> Any:
    """How much each position of targets [B, T, ...] counts, [B, T]: how many values are known."""
    known = is_known(targets)
    return known if known.ndim == 2 else known.reshape(*known.shape[:2], -1).sum(-1)


def splitmix64(values: NDArray[np.int64] | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014), element by element.

    A bijection on 64-bit integers that spreads neighbouring values over all bits.
    """
    z = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


BLOCK = 1024  # uniform numbers of a key that are made together


def _digest(parts: tuple[str | int, ...], size: int) -> int:
    # With lengths: no two tuples of parts give the same text, but for a number and its text.
    text = "\x1f".join(f"{len(str(part))}:{part}" for part in parts)
    # Names of files may hold bytes that are not UTF-8.
    data = text.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(data, digest_size=size).digest(), "little")


def stable_hash(*parts: str | int) -> int:
    """A 64-bit hash of the parts, the same in every process and on every machine."""
    return _digest(parts, 8)


def keyed_generator(*parts: str | int) -> np.random.Generator:
    """A Philox generator whose 128-bit key is a digest of the parts."""
    return np.random.Generator(np.random.Philox(key=_digest(parts, 16)))


class KeyedUniforms:
    """The uniform numbers in [0, 1) of a key; one block is cached."""

    def __init__(self, *parts: str | int) -> None:
        self._parts = parts
        self._block = -1
        self._values: list[float] = []

    def ahead(self, index: int) -> list[float]:
        """The numbers from the index-th to the last of its block."""
        block, offset = divmod(index, BLOCK)
        if block != self._block:
            self._values, self._block = self.block(block).tolist(), block
        return self._values[offset:]

    def block(self, block: int) -> NDArray[np.float64]:
        """The numbers [block * BLOCK, (block + 1) * BLOCK)."""
        return keyed_generator(*self._parts, block).random(BLOCK)


def as_list(found: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """States as a list; a single one as a list of one."""
    if isinstance(found, Mapping):
        return [found]
    return list(found)
