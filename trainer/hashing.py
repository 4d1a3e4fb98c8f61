"""SplitMix64 over numpy arrays: the hash behind group owners, holdout splits and shuffles."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def splitmix64(values: NDArray[np.int64] | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014), element by element.

    A bijection on 64-bit integers that spreads neighbouring values over all bits.
    """
    z = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
