"""The gated delta rule, chunk by chunk (Yang et al. 2024, arXiv 2412.06464).

    M_t = a_t (I - b_t k_t k_t^T) M_{t-1} + b_t k_t v_t^T,      o_t = M_t^T q_t

Writing the correction as u_t = b_t (v_t - a_t M_{t-1}^T k_t) gives M_t = a_t M_{t-1} + k_t u_t^T. Within a chunk that begins
with M_0, and with d_{ts} = a_{s+1} ... a_t and d_t = a_1 ... a_t, the corrections solve a triangular system,

    u_t + b_t sum_{s<t} d_{ts} (k_t . k_s) u_s = b_t (v_t - d_t M_0^T k_t),

which is solved for all chunks at once, as a linear function of M_0; only M_0 itself goes from chunk to chunk (the WY form of
section 3.3). The products d are exponentials of differences of cumulated logarithms, at most 1 each: nothing overflows, and an
underflow is a correct zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def gated_delta_rule(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    state: Tensor,
    resets: Tensor | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Run the rule over a row from `state`; cutting the row anywhere and carrying the state changes only rounding.

    Args:
        queries, keys: q and k, [B, H, T, K]; keys of norm at most 1.
        values: v, [B, H, T, V].
        log_decay: log a, [B, H, T], at most 0.
        rate: b, [B, H, T], in [0, 1].
        state: M before the first position, [B, H, K, V].
        resets: bool [B, T], True where M is zero before the position; None: nowhere.
        chunk: positions that are solved together.

    Returns:
        o [B, H, T, V] and M after the last position [B, H, K, V], in the type of `state`.
    """
    length = queries.shape[2]
    if resets is None:
        resets = torch.zeros(queries.shape[0], length, dtype=torch.bool, device=queries.device)
    chunk = min(chunk, length)
    padding = -length % chunk
    parts = [queries, keys, values, log_decay[..., None], rate[..., None]]
    # Positions that change nothing: a = 1, b = 0.
    padded = [_in_chunks(F.pad(part.to(state.dtype), (0, 0, 0, padding)), 2, chunk) for part in parts]
    q, k, v, log_a, b = padded  # [B, H, N, C, .]
    document = _in_chunks(F.pad(resets, (0, padding)), 1, chunk).cumsum(-1)[:, None]  # [B, 1, N, C]

    since_start = log_a[..., 0].cumsum(-1)  # [B, H, N, C]
    is_later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    is_same = (document[..., :, None] == document[..., None, :]) & is_later
    decay = (since_start[..., :, None] - since_start[..., None, :]).masked_fill(~is_same, -torch.inf).exp()  # d_{ts}
    from_state = since_start.exp().masked_fill(document > 0, 0.0)[..., None]  # d_t; [B, H, N, C, 1]

    system = (b * (k @ k.transpose(-1, -2)) * decay).tril(-1)
    right = torch.cat([b * v, b * from_state * k], dim=-1)
    solved = torch.linalg.solve_triangular(_plus_identity(system), right, upper=False, unitriangular=True)
    without, by_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)  # u = without - by_state M_0
    mixing = (q @ k.transpose(-1, -2)) * decay
    to_end = decay[..., -1, :, None] * k  # [B, H, N, C, K]
    outputs = []
    for n in range(q.shape[2]):
        correction = without[:, :, n] - by_state[:, :, n] @ state
        outputs.append(from_state[:, :, n] * (q[:, :, n] @ state) + mixing[:, :, n] @ correction)
        state = from_state[:, :, n, -1:] * state + to_end[:, :, n].transpose(-1, -2) @ correction
    return torch.cat(outputs, dim=2)[:, :, :length], state


def gated_delta_rule_by_steps(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    state: Tensor,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` position by position, as its first formula says: what the chunked form is tested against."""
    outputs = []
    for t in range(queries.shape[2]):
        if resets is not None:
            state = state.masked_fill(resets[:, t, None, None, None], 0.0)
        k, v, b = keys[:, :, t, :, None], values[:, :, t, None, :], rate[:, :, t, None, None]
        state = log_decay[:, :, t, None, None].exp() * state
        state = state - b * k @ (k.transpose(-1, -2) @ state) + b * k @ v
        outputs.append(queries[:, :, t, None, :] @ state)
    return torch.cat(outputs, dim=2), state


def _in_chunks(x: Tensor, dim: int, chunk: int) -> Tensor:
    """[..., N * chunk, ...] as [..., N, chunk, ...]."""
    return x.reshape(*x.shape[:dim], -1, chunk, *x.shape[dim + 1 :])


def _plus_identity(lower: Tensor) -> Tensor:
    return lower + torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
