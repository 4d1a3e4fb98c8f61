"""What the plain scan and the kernels share."""

from typing import Final

GATE_SHARPNESS: Final = 8.0
"""The constant c of `a = exp(-c * softplus(Lambda) * sigmoid(r))`, as in De et al. 2024 (arXiv 2402.19427)."""
