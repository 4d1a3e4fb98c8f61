"""The square norm behind the noise scale and clipping, accurate where one fp32 reduction is not."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1024  # elements summed in fp32; 256 takes twice as long, 4,096 loses a digit in bf16


def square_norm(tensor: Tensor) -> Tensor:
    """Sum of squares of all elements, [] float64 on the tensor's device.

    fp32 within rows of 1,024 elements, fp64 across rows: relative error about 1e-9 (5e-7 if all elements are equal, so
    that rounding does not cancel) in 1.3 to 1.7 times the time of one fp32 norm, whose error at 39 million elements is
    5e-3.
    """
    flat = tensor.detach()
    if flat.is_sparse:
        flat = flat.coalesce().values()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    flat = flat.reshape(-1)
    in_rows = flat.numel() // _CHUNK * _CHUNK
    wide = flat[in_rows:].double()
    if in_rows > 0:
        accumulate = torch.float64 if flat.dtype == torch.float64 else torch.float32
        rows = torch.linalg.vector_norm(flat[:in_rows].view(-1, _CHUNK), dim=1, dtype=accumulate)
        wide = torch.cat([rows.double(), wide])
    return torch.dot(wide, wide)
