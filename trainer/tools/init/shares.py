"""The shares in which a first config draws the modalities, by name. Imports nothing slow: the command line needs the names."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Mix(StrEnum):
    """What the shares of the modalities are to be."""

    tokens = "tokens"
    sqrt = "sqrt"
    equal = "equal"


IN_WORDS: Mapping[Mix, str] = {
    Mix.tokens: "in its share of the corpus",
    Mix.sqrt: "by the square root of its tokens, so that small ones come more often",
    Mix.equal: "equally often",
}
