"""Which documents are held out from training: a pure function of a stable hash."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from trainer.data.keyed import stable_hash
from trainer.errors import UserError
from trainer.hashing import splitmix64

Split: TypeAlias = Literal["train", "holdout", "all"]
SPLITS: tuple[Split, ...] = ("train", "holdout", "all")


def check_split(split: str, fraction: float) -> None:
    """Raise UserError unless the split is known and the fraction lies in [0, 1)."""
    if split not in SPLITS:
        raise UserError("split", f"must be one of {', '.join(SPLITS)}; got {split!r}")
    if not 0.0 <= fraction < 1.0:
        raise UserError("holdout_fraction", f"must be at least 0 and less than 1, got {fraction}")


def held_out(relative_path: str, num_documents: int, fraction: float) -> npt.NDArray[np.bool_]:
    """For each document of a stream, whether it is held out; bool [num_documents].

    This depends only on the stream's relative path, the document's index and the fraction. A document that is held out
    at one fraction is also held out at every larger one.
    """
    base = np.uint64(stable_hash("holdout", relative_path))
    hashes = splitmix64(splitmix64(np.arange(num_documents, dtype=np.uint64)) ^ base)
    uniforms = (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniforms < fraction


def documents_of(split: Split, relative_path: str, num_documents: int, fraction: float) -> npt.NDArray[np.bool_]:
    """The documents of a split; bool [num_documents]."""
    if split == "all" or (split == "train" and fraction == 0.0):
        return np.ones(num_documents, dtype=np.bool_)
    held = held_out(relative_path, num_documents, fraction)
    return held if split == "holdout" else ~held
