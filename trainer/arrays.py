"""Array types that several parts share, and the target that every loss ignores."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]

IGNORED: Final = -100  # target without anything to predict, as torch's default `ignore_index`
