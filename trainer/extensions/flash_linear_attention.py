"""Operators of flash-linear-attention on rows that continue a group and may hold several documents.

The operators take sequences one behind the other, [1, N, ...], whose bounds are `cu_seqlens`, and a state for each sequence,
[S, ...]. `run_rows` is the way between these and the trainer's rows, states and resets; it fits every operator that takes
`initial_state`, `output_final_state` and `cu_seqlens`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer.errors import UserError
from trainer.model.gated_delta import DeltaMixer, GatedDelta, build, gated_delta_rule

Operator = Callable[..., tuple[Tensor, Tensor]]


def run_rows(
    operator: Operator, inputs: Mapping[str, Tensor], state: Tensor, resets: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Run an operator over rows from their states.

    Args:
        inputs: the operator's tensors of positions by the names of its arguments, each [B, T, ...].
        state: before the first position of each row, [B, ...].
        resets: bool [B, T], True where the state is zero before the position; None: nowhere.
        options: further arguments of the operator.

    Returns:
        Its output [B, T, ...], and the states after each row's last position, [B, ...].
    """
    if resets is None:
        return operator(**inputs, initial_state=state, output_final_state=True, **options)
    rows, length = resets.shape
    begins = resets.clone()
    begins[:, 0] = True
    firsts = begins.flatten().nonzero()[:, 0]  # [S]
    row = firsts // length
    is_fresh = resets.flatten()[firsts].view(-1, *[1] * (state.ndim - 1))
    bounds = torch.cat([firsts, firsts.new_full((1,), rows * length)])
    output, ends = operator(
        **{name: each.flatten(0, 1)[None] for name, each in inputs.items()},
        initial_state=state[row].masked_fill(is_fresh, 0.0),
        output_final_state=True,
        cu_seqlens=bounds,
        **options,
    )
    return output[0].view(rows, length, *output.shape[2:]), ends[begins.sum(1).cumsum(0) - 1]


def flash_gated_delta_rule(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    state: Tensor,
    resets: Tensor | None = None,
    *,
    operator: Operator,
) -> tuple[Tensor, Tensor]:
    """`gated_delta.gated_delta_rule` by `chunk_gated_delta_rule`; products have the type of autocast, if it is on."""
    kind = queries.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else queries.dtype
    given = {"q": queries.to(dtype), "k": keys.to(dtype), "v": values.to(dtype), "g": log_decay, "beta": rate}
    inputs = {name: each.transpose(1, 2) for name, each in given.items()}
    output, end = run_rows(operator, inputs, state, resets, scale=1.0)
    return output.transpose(1, 2).to(state.dtype), end


def _rule(queries: Tensor, *args: Any, operator: Operator) -> tuple[Tensor, Tensor]:
    """The kernels for what they take; the rule in torch before the model is on its device, and in float64."""
    if queries.is_cuda and queries.dtype != torch.float64:
        return flash_gated_delta_rule(queries, *args, operator=operator)
    return gated_delta_rule(queries, *args)


def build_gated_delta(vocab_size: int, dim: int, num_layers: int, **args: Any) -> GatedDelta:
    """Build a `GatedDelta` that runs the kernels of flash-linear-attention.

    Args:
        args: of `gated_delta.build`.

    Raises:
        UserError: they are not installed, or there is no CUDA device.
    """
    what, fix = (
        "fla_gated_delta runs kernels of flash-linear-attention, which ",
        'or set it to "gated_delta", the same rule',
    )
    if not torch.cuda.is_available():
        raise UserError("model.family", f"{what}need a CUDA device", f"use a machine with one, {fix} in torch")
    try:
        operator = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except ImportError as error:
        problem = f"{what}cannot be imported: {error}"
        raise UserError("model.family", problem, f"run: pip install 'fla-core[cuda]', {fix} in torch") from None
    model = build(vocab_size, dim, num_layers, **args)
    for mixer in mixers(model):
        mixer.rule = partial(_rule, operator=operator)
    model.resets_in_one_pass = False  # `run_rows` gives each number of documents another shape
    return model


def mixers(model: GatedDelta) -> Iterator[DeltaMixer]:
    """The mixers, whose `rule` another function with the same arguments may replace."""
    return (each for each in model.modules() if isinstance(each, DeltaMixer))
